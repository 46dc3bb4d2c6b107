"""The available memory, from the kernel's files about it."""

from pathlib import Path

import pytest

from worker_service.startup.resources import available_bytes

MIB = 1 << 20
MEMINFO = f"MemTotal: {100 * 1024} kB\nMemAvailable: {64 * 1024} kB\n"
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


def machine(root: Path, memberships: str | None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    if memberships is not None:
        (root / "proc/self/cgroup").write_text(memberships)
    return root


def group(folder: Path, names: tuple[str, str, str], *, limit: object, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    statistics = f"anon 5\n{names[2]}inactive_file {cached - cached // 4}\n{names[2]}active_file {cached // 4}\n"
    (folder / "memory.stat").write_text(statistics)


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, "0::/\n")) == 64 * MIB
    assert available_bytes() > 0


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/kubepods/pod-that-only-the-host-sees\n")
    group(root / "sys/fs/cgroup", V2, limit=32 * MIB, used=20 * MIB)
    assert available_bytes(root) == 12 * MIB


def test_pages_of_files_that_were_read_are_available(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n")
    group(root / "sys/fs/cgroup", V2, limit=32 * MIB, used=30 * MIB, cached=24 * MIB)
    assert available_bytes(root) == 26 * MIB


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/system.slice/pagewire.service\n")
    group(root / "sys/fs/cgroup/system.slice", V2, limit=16 * MIB, used=10 * MIB)
    group(root / "sys/fs/cgroup/system.slice/pagewire.service", V2, limit="max", used=9 * MIB)
    assert available_bytes(root) == 6 * MIB
    group(root / "sys/fs/cgroup/system.slice/pagewire.service", V2, limit=11 * MIB, used=9 * MIB)
    assert available_bytes(root) == 2 * MIB


@pytest.mark.parametrize("path", ["/", "/docker/abc"])
def test_the_first_version_of_groups(tmp_path: Path, path: str) -> None:
    root = machine(tmp_path, f"7:cpu,cpuacct:/x\n4:memory:{path}\n0::/\n")
    group(root / "sys/fs/cgroup/memory", V1, limit=2**63 - 4096, used=50 * MIB)
    group(root / f"sys/fs/cgroup/memory{path}", V1, limit=30 * MIB, used=20 * MIB, cached=8 * MIB)
    assert available_bytes(root) == 18 * MIB


def test_beyond_its_limit_nothing_is_left(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n")
    group(root / "sys/fs/cgroup", V2, limit=MIB, used=2 * MIB)
    assert available_bytes(root) == 0
