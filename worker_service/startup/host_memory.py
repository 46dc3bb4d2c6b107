"""How much of the machine's memory this process may still take. Importing this loads no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

# Of a control group: its limit, what it uses, and the fields of memory.stat that the kernel takes back when memory is
# short: pages of files, such as checkpoints that have just been read.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that is left of the machine, or of the tightest of the control groups that this process is in.
    `root` is for tests."""
    available = _machine_bytes(root / "proc/meminfo")
    for folder, names in _control_groups(root):
        left = _group_bytes(folder, *names)
        available = available if left is None else min(available, left)
    return max(0, available)


def _machine_bytes(meminfo: Path) -> int:
    if not meminfo.exists():
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Folders of the groups of this process and of those around them, and how their files are called.

    In a container the path may be one that only the host can see. The outermost folder is then the container's own.
    """
    memberships = root / "proc/self/cgroup"
    mounted = root / "sys/fs/cgroup"
    lines = memberships.read_text().splitlines() if memberships.exists() else ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = mounted, _V2
        elif "memory" in controllers.split(","):
            top, names = mounted / "memory", _V1
        else:
            continue
        folder = top / path.lstrip("/")
        yield folder, names
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder, names


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
