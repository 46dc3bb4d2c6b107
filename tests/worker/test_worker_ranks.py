"""The settings that `pagewire worker` passes to each rank that it starts."""

import os

import pytest

from pagewire.hosting import supervisor
from pagewire.hosting.worker_ranks import rank_configs
from worker_service.config import WorkerConfig


@pytest.mark.parametrize("port", [0, 65535])
def test_ranks_need_ports_that_follow_each_other(port):
    config = WorkerConfig(model="m", port=port, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="--port is"):
        rank_configs(config)


def test_ranks_of_one_machine_share_its_cores_and_have_ports_of_their_own():
    config = WorkerConfig(model="m", port=50061, health_port=50161, tensor_parallel_size=3, num_threads=None)
    ranks = rank_configs(config)
    assert [rank.port for rank in ranks] == [50061, 50062, 50063]
    assert [rank.health_port for rank in ranks] == [50161, 50162, 50163]
    assert [rank.tensor_parallel_rank for rank in ranks] == [0, 1, 2]
    (address,) = {rank.tensor_parallel_address for rank in ranks}
    assert address.startswith("127.0.0.1:")
    (num_threads,) = {rank.num_threads for rank in ranks}
    assert num_threads == max(1, len(os.sched_getaffinity(0)) // 3)


@pytest.mark.parametrize(("port", "health_port"), [(29_999, 0), (1024, 29_999)])
def test_ranks_do_not_meet_where_one_of_them_is_to_listen(port, health_port, monkeypatch):
    monkeypatch.setattr(supervisor, "WORKER_PORTS", range(30_000, 30_001))
    monkeypatch.setattr(supervisor, "_found", [])
    with pytest.raises(OSError, match="no free port"):
        rank_configs(WorkerConfig(model="m", port=port, health_port=health_port, tensor_parallel_size=2))
