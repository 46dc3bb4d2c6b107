"""The processors and the memory of the machine that this process may take. Importing this loads no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

# Of a control group: its limit, what it uses, and the fields of memory.stat that the kernel takes back when memory is
# short: pages of files, such as checkpoints that have just been read.
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


def num_usable_cpus(root: Path = Path("/")) -> int:
    """Return the processors that this process may run on, or as many as the tightest quota of its control groups pays
    for, a part of one left out: threads beyond those would be stopped together, in the midst of a step.

    `root` is for tests.
    """
    quotas = [_num_paid(folder, version) for folder, version in _control_groups("cpu", root)]
    num_paid = min((int(quota) for quota in quotas if quota is not None), default=None)
    num_cpus = len(os.sched_getaffinity(0))
    return num_cpus if num_paid is None else max(1, min(num_cpus, num_paid))


def _num_paid(folder: Path, version: int) -> float | None:
    """Return how many processors' time the group may take, or None if it has no limit."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except OSError:
        return None  # no such group, or none of processors
    return None if quota in ("max", "-1") else int(quota) / int(period)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that is left of the machine, or of the tightest of the control groups that this process is in.
    `root` is for tests."""
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


def _control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Return the folders of the control groups of this process, and of those around them, with the version of each.

    In a container the path may be one that only the host can see. The outermost folder is then the container's own.
    `root` is for tests.
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
