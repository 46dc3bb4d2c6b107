"""A worker with two ranks: both get every plan, a result counts when both have it, and losing one rank loses both."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pagewire.common.wire.messages import AddedGrammar, GrammarKind, StepPlan
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.config import SchedulerConfig
from scheduler_service.links.worker.worker_link import FencedError, WorkerLink
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import expected_tokens, request, serve
from tests.contract.worker_listener import SWAP_OUT, WORK, Listener, opening

PROMPT = [5, 6, 7, 8, 9]


class WrongTokensWorker(FakeWorker):
    """A fake rank that returns other tokens."""

    async def _send(self, response: worker_pb2.ExecuteResponse, context: grpc.aio.ServicerContext) -> None:
        response.result.token_ids[:] = [token_id ^ 1 for token_id in response.result.token_ids]
        await super()._send(response, context)


class Ranks:
    """Fake ranks that a worker link dials."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = workers
        self.listener = Listener()
        self.restarted: list[tuple[int, str]] = []
        self.running: asyncio.Task[None]


def rank(number: int, size: int = 2, **capacity: object) -> FakeWorker:
    return FakeWorker(b"digest", tensor_parallel_rank=number, tensor_parallel_size=size, **capacity)


@asynccontextmanager
async def linked(*workers: FakeWorker, restarts: bool = True) -> AsyncIterator[Ranks]:
    """Start fake ranks and a link to them. `restarts`: the link may ask for a restart of unusable ranks."""
    ranks = Ranks(*workers)
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
        diallers = [Dialler(f"127.0.0.1:{worker.port}", ()) for worker in workers]
        for dialler in diallers:
            stack.push_async_callback(dialler.close)
        link = WorkerLink(
            diallers,
            ranks.listener,
            instance_id="one",
            model_digest=b"digest",
            pipeline_depth=2,
            restart_worker=(lambda *restarted: ranks.restarted.append(restarted)) if restarts else None,
        )
        ranks.running = asyncio.create_task(link.run())
        yield ranks
        ranks.running.cancel()
        await asyncio.gather(ranks.running, return_exceptions=True)
    for worker in workers:
        await worker.kill()


async def joined(ranks: Ranks) -> tuple:
    """Wait until all ranks are ready. Return their common capacity and the link to them."""
    while (event := await ranks.listener.next())[0] == "missing":
        pass
    kind, both = event
    assert kind == "ready"
    return both


async def lost(ranks: Ranks) -> str:
    """Wait until the epoch ends, ignoring other events. Return the reason."""
    while True:
        kind, reason = await ranks.listener.next()
        if kind == "lost":
            return str(reason)


async def test_the_capacity_is_what_all_ranks_have() -> None:
    states = {"num_device_states": 9, "num_host_states": 5, "state_bytes": 64, "num_state_layers": 2}
    first = rank(0, num_device_blocks=90, num_host_blocks=8, swap_bandwidth=2e9, max_model_len=200, **states)
    second = rank(1, num_host_blocks=6, **(states | {"num_device_states": 7, "num_host_states": 8}))
    async with linked(first, second) as ranks:
        capacity, _ = await joined(ranks)
        assert (capacity.num_device_blocks, capacity.num_host_blocks, capacity.max_model_len) == (90, 6, 200)
        assert (capacity.swap_bandwidth, capacity.tensor_parallel_size) == (1e9, 2)
        assert (capacity.num_device_states, capacity.num_host_states) == (7, 5)
        assert ranks.workers[0].epochs == ranks.workers[1].epochs


async def test_a_result_counts_when_every_rank_has_given_it() -> None:
    first, second = rank(0), rank(1)
    second.step_seconds = 0.3
    async with linked(first, second) as ranks:
        _, link = await joined(ranks)
        epoch = link.epoch
        link.send(StepPlan(epoch, 1, openings=(opening(),), work_slots=(0,), work_num_tokens=(8,)))
        link.send(StepPlan(epoch, 2, work_slots=(0,), work_num_tokens=(1,)))
        heard = [await ranks.listener.next() for _ in range(4)]
        assert heard == [("moved", 1), ("result", 1), ("moved", 2), ("result", 2)]
        assert second.num_steps == 2


async def test_moves_are_done_when_every_rank_has_done_them() -> None:
    first, second = rank(0, num_host_blocks=4), rank(1, num_host_blocks=4)
    second.holds_moves = True
    async with linked(first, second) as ranks:
        _, link = await joined(ranks)
        epoch = link.epoch
        link.send(StepPlan(epoch, 1, openings=(opening(),), work_slots=(0,), work_num_tokens=(8,)))
        assert [await ranks.listener.next() for _ in range(2)] == [("moved", 1), ("result", 1)]
        link.send(StepPlan(epoch, 2, (0,), **SWAP_OUT))
        assert [await ranks.listener.next() for _ in range(2)] == [("result", 2), ("moved", 2)]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_that_dies_ends_the_epoch_of_all_and_they_begin_together(number: int) -> None:
    async with linked(rank(0), rank(1)) as ranks:
        await joined(ranks)
        dead, other = ranks.workers[number], ranks.workers[1 - number]
        await dead.kill()
        assert f"rank {number}: " in await lost(ranks)
        told = ("missing", (1 - number, "the worker is ready, another rank is not"))
        while (event := await ranks.listener.next()) != told:
            assert event[0] == "missing"
        await dead.start()
        _, link = await joined(ranks)
        assert other.epochs[-1] == dead.epochs[-1] == link.epoch
        link.send(StepPlan(link.epoch, 1, openings=(opening(),), **WORK))
        assert [await ranks.listener.next() for _ in range(2)] == [("moved", 1), ("result", 1)]
        assert (dead.num_steps, other.num_steps) == (1, 1)
        assert ranks.restarted == []


class RepeatingWorker(FakeWorker):
    """A fake rank that reports each grammar twice."""

    async def _report(self, epoch: int, grammar: AddedGrammar, context: grpc.aio.ServicerContext) -> None:
        await super()._report(epoch, grammar, context)
        await super()._report(epoch, grammar, context)


def adding(epoch: int, *grammar_ids: int) -> StepPlan:
    """Return a plan of step 1 that adds grammars and allocates a row. The text of a grammar is its id."""
    added = tuple(AddedGrammar(grammar_id, GrammarKind.REGEX, str(grammar_id), (1,)) for grammar_id in grammar_ids)
    return StepPlan(epoch, 1, openings=(opening(),), work_slots=(0,), work_num_tokens=(8,), added_grammars=added)


async def told_of_grammar(ranks: Ranks) -> object:
    """Return the next report about a grammar."""
    while True:
        kind, told = await ranks.listener.next()
        assert kind in ("grammar", "moved", "result")
        if kind == "grammar":
            return told


async def test_a_grammar_is_ready_when_every_rank_has_it_and_fails_with_the_first_that_has_not() -> None:
    first, second = rank(0), rank(1)
    first.bad_grammars, second.bad_grammars = {"3": "no", "4": "no"}, {"2": "no", "4": "no"}
    second.reports_grammars.clear()
    async with linked(first, second) as ranks:
        _, link = await joined(ranks)
        link.send(adding(link.epoch, 1, 2, 3, 4, 5))
        assert [await told_of_grammar(ranks) for _ in range(2)] == [(3, "rank 0: no"), (4, "rank 0: no")]
        second.reports_grammars.set()
        assert [await told_of_grammar(ranks) for _ in range(3)] == [(1, ""), (2, "rank 1: no"), (5, "")]


async def test_reports_about_released_grammars_are_forwarded() -> None:
    first, second = rank(0), rank(1)
    first.reports_grammars.clear()
    second.reports_grammars.clear()
    async with linked(first, second) as ranks:
        _, link = await joined(ranks)
        epoch = link.epoch
        link.send(adding(epoch, 1))
        link.send(StepPlan(epoch, 2, released_grammar_ids=(1,), work_slots=(0,), work_num_tokens=(1,)))
        first.reports_grammars.set()
        assert await told_of_grammar(ranks) == (1, "")


async def test_a_rank_that_tells_twice_of_a_grammar_ends_the_epoch() -> None:
    async with linked(RepeatingWorker(b"digest", tensor_parallel_size=2), rank(1)) as ranks:
        _, link = await joined(ranks)
        link.send(adding(link.epoch, 1))
        assert "rank 0 reported grammar 1 twice" in await lost(ranks)


@pytest.mark.parametrize(("versions", "version"), [(("1.9", "1.9"), "1.9"), (("1.9", "1.8"), ""), (("", "1.9"), "")])
async def test_grammars_need_the_same_library_in_all_ranks(
    versions: tuple[str, str], version: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = rank(0, grammar_version=versions[0], weight_bytes=4)
    second = rank(1, grammar_version=versions[1], gates_grammars=True, weight_bytes=3)
    async with linked(first, second) as ranks:
        capacity, _ = await joined(ranks)
        assert (capacity.grammar_version, capacity.gates_grammars) == (version, True)
        assert capacity.weight_bytes == 7, "of all ranks"
        assert ("the ranks have different versions of llguidance" in caplog.text) == (not version)


async def test_a_silent_rank_is_the_one_that_hangs() -> None:
    async with linked(rank(0), rank(1)) as ranks:
        _, link = await joined(ranks)
        ranks.workers[1].is_silent = True
        link.send(StepPlan(link.epoch, 1, openings=(opening(),), **WORK))
        reason = await lost(ranks)
        assert reason.startswith("rank 1: the worker has been silent")
        assert ranks.restarted == [(1, reason.removeprefix("rank 1: "))]


async def test_tokens_that_differ_end_the_epoch_before_they_count() -> None:
    liar = WrongTokensWorker(b"digest", tensor_parallel_rank=1, tensor_parallel_size=2)
    async with linked(rank(0), liar) as ranks:
        _, link = await joined(ranks)
        link.send(StepPlan(link.epoch, 1, openings=(opening(),), work_slots=(0,), work_num_tokens=(9,)))
        assert await ranks.listener.next() == ("moved", 1)
        kind, reason = await ranks.listener.next()
        assert (kind, "chose other tokens in step 1 than rank 0" in str(reason)) == ("lost", True)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ((rank(0), rank(1, dtype="bfloat16")), "rank 1 has dtype bfloat16, rank 0 has float32; start all"),
        ((rank(0, tables_digest="a1"), rank(1, tables_digest="b2")), "rank 1 has tables_digest b2, rank 0 has a1"),
        ((rank(0), rank(1, block_size=8)), "rank 1 has block_size 8, rank 0 has 4"),
        ((rank(1), rank(0)), "the worker is rank 1 of 2, here it is rank 0 of 2; name the addresses of all"),
        ((rank(0),), "the worker is rank 0 of 2, here it is rank 0 of 1; name the addresses of all"),
    ],
)
async def test_ranks_that_do_not_fit_together_are_refused(workers: tuple[FakeWorker, ...], message: str) -> None:
    async with linked(*workers) as ranks:
        while True:
            kind, reason = await ranks.listener.next()
            assert kind == "missing"
            if message in str(reason):
                break


@pytest.mark.parametrize("workers", ["a:1,", "a:1,b", "unix:", "a:1,unix:", "unix:/" + "x" * 107])
def test_every_address_is_checked(workers: str) -> None:
    with pytest.raises(ValueError, match="--worker is"):
        SchedulerConfig(model="m", worker=workers).validate()


async def test_a_rank_that_another_scheduler_has_taken_is_started_again_where_that_can_be() -> None:
    async with linked(rank(0), rank(1)) as ranks:
        await joined(ranks)
        ranks.workers[1].last_epoch, ranks.workers[1].holder = 2**63, "usurper"
        await ranks.workers[0].kill()
        await ranks.workers[0].start()
        told = f"scheduler usurper has taken the worker in epoch {2**63}"
        while (await ranks.listener.next()) != ("missing", (1, told)):
            pass
        assert ranks.restarted[0] == (1, told)
        await ranks.workers[1].kill()
        await ranks.workers[1].start()
        while (await ranks.listener.next())[0] != "ready":
            pass
        assert ranks.workers[0].epochs[-1] == ranks.workers[1].epochs[-1] < 2**63


async def test_a_scheduler_that_loses_one_rank_to_another_ends() -> None:
    async with linked(rank(0), rank(1), restarts=False) as ranks:
        await joined(ranks)
        ranks.workers[1].last_epoch, ranks.workers[1].holder = 2**63, "usurper"
        await ranks.workers[0].kill()
        await ranks.workers[0].start()
        with pytest.raises(FencedError, match="scheduler usurper"):
            await asyncio.wait_for(asyncio.shield(ranks.running), 10)


async def test_a_stream_of_two_ranks_goes_on_where_it_was(checkpoint: Path) -> None:
    digest = read_model_info(str(checkpoint)).digest
    first, second = (FakeWorker(digest, tensor_parallel_rank=i, tensor_parallel_size=2) for i in range(2))
    for worker in (first, second):
        worker.step_seconds = 0.01
        await worker.start()
    addresses = f"127.0.0.1:{first.port}, 127.0.0.1:{second.port}"
    async with serve(checkpoint, workers=addresses, worker=first) as stack:
        stream = asyncio.create_task(stack.generate(request(PROMPT, max_tokens=100)))
        for worker, num_tokens in ((second, 20), (first, 60)):
            await stack.until(lambda loads, num_tokens=num_tokens: loads.num_generation_tokens > num_tokens)
            await worker.kill()
            await stack.until(lambda loads: not loads.worker_connected)
            await worker.start()
        assert (await stream).token_ids[0] == expected_tokens(PROMPT, 100)
        assert (await stack.until_idle()).num_worker_losses == 2
    await second.kill()
