"""The number of threads, from the kernel's files about processor quotas."""

import os
from pathlib import Path

import pytest

from worker_service.startup.resources import num_usable_cpus


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def machine(root: Path, memberships: str, groups: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(memberships)
    for name, content in groups.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("memberships", "groups", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),
        ("0::/pods/that-only-the-host-sees\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "500000 100000\n", "a/b/cpu.max": "150000 50000\n"}, 3),
        (
            "4:memory:/\n3:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu/docker/x/cpu.cfs_quota_us": "400000\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        ("3:cpu,cpuacct:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_quota_counts_beside_the_processors(
    tmp_path: Path, memberships: str, groups: dict[str, str], expected: int
) -> None:
    assert num_usable_cpus(machine(tmp_path, memberships, groups)) == expected


def test_this_machine_has_some() -> None:
    assert 1 <= num_usable_cpus() <= 8
