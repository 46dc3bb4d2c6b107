"""How many processors this process may use. Importing this loads no torch."""

import os
from pathlib import Path

from worker_service.startup.control_groups import control_groups


def num_usable_cpus(root: Path = Path("/")) -> int:
    """Return the processors that this process may run on, or as many as the tightest quota of its control groups pays
    for, a part of one left out: threads beyond those would be stopped together, in the midst of a step.

    `root` is for tests.
    """
    quotas = [_quota(folder, version) for folder, version in control_groups("cpu", root)]
    num_paid = min((int(quota) for quota in quotas if quota is not None), default=None)
    num_cpus = len(os.sched_getaffinity(0))
    return num_cpus if num_paid is None else max(1, min(num_cpus, num_paid))


def _quota(folder: Path, version: int) -> float | None:
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
