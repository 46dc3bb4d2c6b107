"""The processors and the memory that this process may use. Importing this module does not import torch."""

import os
from collections.abc import Iterator
from pathlib import Path

# The files of a control group: its limit, its usage, and the fields of memory.stat that the kernel can reclaim when
# memory is short. These are pages of files, such as checkpoints that have just been read.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def num_usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use: its affinity, limited by its control groups' quotas.

    A fraction of a processor is left out. Threads beyond the quota would all be stopped together in the middle of a
    step. `root` is for tests.
    """
    quotas = [_num_paid(folder, version) for folder, version in _control_groups("cpu", root)]
    num_paid = min((int(quota) for quota in quotas if quota is not None), default=None)
    num_cpus = len(os.sched_getaffinity(0))
    return num_cpus if num_paid is None else max(1, min(num_cpus, num_paid))


def _num_paid(folder: Path, version: int) -> float | None:
    """Return the quota of the group in processors, or None if it has no limit."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except OSError:
        return None  # no such group, or a group without the cpu controller
    return None if quota in ("max", "-1") else int(quota) / int(period)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the available memory in bytes, of the machine or of this process's tightest control group.

    `root` is for tests.
    """
    available = _machine_bytes(root / "proc/meminfo")
    for folder, version in _control_groups("memory", root):
        left = _group_bytes(folder, *_MEMORY_FILES[version])
        available = available if left is None else min(available, left)
    return max(0, available)


def _machine_bytes(meminfo: Path) -> int:
    if not meminfo.exists():
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_bytes(folder: Path, limit_name: str, usage_name: str, reclaimable: tuple[str, str]) -> int | None:
    """Return the remaining bytes of the control group's limit, or None if it has no limit."""
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # no such group, or a group without the memory controller
    return int(limit) - used + sum(int(statistics.get(name, 0)) for name in reclaimable)


def _control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's control groups and of their ancestors, each with its cgroup version.

    In a container the path may be visible only to the host. The outermost folder is then the container's own. `root` is
    for tests.
    """
    memberships = root / "proc/self/cgroup"
    mounted = root / "sys/fs/cgroup"
    lines = memberships.read_text().splitlines() if memberships.exists() else ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, version = mounted, 2
        elif controller in controllers.split(","):
            top, version = mounted / controller, 1
        else:
            continue
        folder = top / path.lstrip("/")
        yield folder, version
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder, version
