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
    """Return the number of processors that this process may use, at least 1.

    The number follows from the CPU affinity of the process and the CPU quotas of its control groups (cgroups). A quota
    is rounded down, because threads beyond the quota would all be stopped together in the middle of a step. `root` is
    the root of the file system; only tests change it.
    """
    quotas = [_cpu_quota(folder, version) for folder, version in _control_groups("cpu", root)]
    num_allowed = min((int(quota) for quota in quotas if quota is not None), default=None)
    num_cpus = len(os.sched_getaffinity(0))
    return num_cpus if num_allowed is None else max(1, min(num_cpus, num_allowed))


def _cpu_quota(folder: Path, version: int) -> float | None:
    """Return the CPU quota of a control group (cgroup), in processors, or None if the group has no quota.

    `folder` is the group's folder, and `version` is the version of cgroups.
    """
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
    """Return the memory, in bytes, that this process can still allocate.

    This is the smaller of the machine's available memory and the rest of the tightest memory limit among the process's
    control groups (cgroups). `root` is the root of the file system; only tests change it.
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
    """Return the bytes that a control group (cgroup) may still allocate, or None if it has no memory limit.

    Memory that the kernel can reclaim from the group counts as free.
    """
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
    """Yield (folder, version) of the control groups (cgroups) of this process and of the groups that contain them.

    `version` is the version of cgroups, 1 or 2. `controller` is "cpu" or "memory". In a container, the path of a group
    may exist only on the host. The outermost folder is then the container's own group. `root` is the root of the file
    system; only tests change it.
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
