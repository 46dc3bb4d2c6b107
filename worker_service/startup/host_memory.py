"""How much of the machine's memory this process may still take. Importing this loads no torch."""

import os
from pathlib import Path

from worker_service.startup.control_groups import control_groups

# Of a control group: its limit, what it uses, and the fields of memory.stat that the kernel takes back when memory is
# short: pages of files, such as checkpoints that have just been read.
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that is left of the machine, or of the tightest of the control groups that this process is in.
    `root` is for tests."""
    available = _machine_bytes(root / "proc/meminfo")
    for folder, version in control_groups("memory", root):
        left = _group_bytes(folder, *_NAMES[version])
        available = available if left is None else min(available, left)
    return max(0, available)


def _machine_bytes(meminfo: Path) -> int:
    if not meminfo.exists():
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_bytes(folder: Path, limit_name: str, usage_name: str, reclaimable: tuple[str, str]) -> int | None:
    """Return what is left of the control group's limit, or None if it has no limit."""
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # no such group, or none of memory
    return int(limit) - used + sum(int(statistics.get(name, 0)) for name in reclaimable)
