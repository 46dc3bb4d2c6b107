"""Ranks that communicate over gloo. Here they are threads of one process, each with its own connections."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from pagewire.hosting.supervisor import free_port
from worker_service.models.communicator import RankGroup

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def group(rank: int, address: str, size: int = 2) -> RankGroup:
    return RankGroup(rank, size, address, HOST, CPU)


@pytest.fixture(params=["TCP", "files"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address at which the ranks meet."""
    return f"{HOST}:{free_port(HOST)}" if request.param == "TCP" else f"file:{tmp_path}"


def together(ranks: list[RankGroup], what) -> list[torch.Tensor]:
    """Return the result of `what(rank)` for each rank, computed at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(torch.inference_mode()(what), ranks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_same_bits(address: str, size: int, dtype: torch.dtype) -> None:
    ranks = [group(rank, address, size) for rank in range(size)]
    generator = torch.Generator().manual_seed(0)
    brought = torch.randn(size, 5, 7, generator=generator).to(dtype)
    for rank in ranks:
        rank.begin(1)
    sums = together(ranks, lambda rank: rank.all_reduce(brought[rank.rank].clone()))
    rows = together(ranks, lambda rank: rank.all_gather(brought[rank.rank].clone()))
    assert all(torch.equal(sums[0], other) for other in sums)
    expected = brought[0].clone()
    for part in brought[1:]:
        expected += part  # in the order of ranks
    assert torch.equal(sums[0], expected)
    assert all(torch.equal(torch.cat(list(brought), dim=1), gathered) for gathered in rows)


def test_before_the_first_epoch_each_is_alone(address: str) -> None:
    rank, x = group(1, address), torch.ones(2, 3)
    assert torch.equal(rank.all_reduce(x), x)
    assert rank.all_gather(x).shape == (2, 6)


def test_ranks_reconnect_in_every_epoch_even_after_store_loss(address: str) -> None:
    first, second = group(0, address), group(1, address)
    for epoch in (1, 2, 5, 6):
        if epoch == 5:
            first = None  # its process ends, and another process replaces it
            first = group(0, address)
        for rank in (first, second):
            rank.begin(epoch)
        sums = together([first, second], lambda rank: rank.all_reduce(torch.full((2,), 1.0 + rank.rank)))
        assert [total.tolist() for total in sums] == [[3.0, 3.0]] * 2


def test_a_rank_that_leaves_frees_the_one_that_waits_for_it(address: str) -> None:
    ranks = [group(rank, address) for rank in range(2)]
    for rank in ranks:
        rank.begin(1)
    together(ranks, lambda rank: rank.all_reduce(torch.ones(2)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].all_reduce, torch.ones(2))
        ranks[1].begin(2)
        with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer|Broken pipe"):
            waiting.result(20)
    ranks[0].begin(2)
    assert together(ranks, lambda rank: rank.all_reduce(torch.ones(1)))[0].tolist() == [2.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_not_awaited_for_ever(
    address: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.models.communicator._RENDEZVOUS_TIMEOUT", timedelta(seconds=0.5))
    alone = group(rank, address)
    alone.begin(1)
    with pytest.raises(RuntimeError, match="tim"):
        alone.all_reduce(torch.ones(2))


def test_files_of_epochs_that_are_over_do_not_pile_up(tmp_path: Path) -> None:
    ranks = [group(rank, f"file:{tmp_path}") for rank in range(2)]
    for epoch in (1, 2, 3 << 60):
        for rank in ranks:
            rank.begin(epoch)
        together(ranks, lambda rank: rank.all_reduce(torch.ones(1)))
    assert [path.name for path in tmp_path.iterdir()] == [f"epoch-{3 << 60}"]


def test_a_directory_that_is_not_there_is_told_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"the ranks' directory .*/none does not exist; see --tensor-parallel-address"):
        group(0, f"file:{tmp_path}/none")


def test_a_taken_port_is_told_with_the_flags_that_choose_it() -> None:
    told = r"rank 0's store cannot listen .* see --host and --tensor-parallel-address"
    with socket.create_server((HOST, 0)) as taken, pytest.raises(OSError, match=told):
        group(0, f"{HOST}:{taken.getsockname()[1]}")


def test_a_store_that_listens_everywhere_is_reached_over_both_kinds_of_address() -> None:
    port = free_port(HOST)
    first = RankGroup(0, 2, f"{HOST}:{port}", "::", CPU)
    hosts = [HOST, *(["::1"] if socket.has_dualstack_ipv6() else [])]
    for host in hosts:
        with socket.create_connection((host, port), timeout=20):
            pass
    assert first.rank == 0  # keeps the rank alive until now
