"""Work that is scheduled in turns by tenant: the order of the pieces, and the limit on waiting bytes."""

import asyncio
import threading
import weakref
from functools import partial

import pytest

from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.turns import PIECE_SIZE, TenantBytes, Turns

MANY = 1 << 30


class Pieces:
    """Pieces of work that record their names and block until `may_go_on` is set."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_go_on = threading.Event()

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.may_go_on.wait(20)
        return name


def turns_of(max_bytes: int = MANY, max_tenant_bytes: int = MANY) -> Turns:
    return Turns(TenantBytes("texts", max_bytes, max_tenant_bytes))


@pytest.mark.parametrize(("size", "num_ahead"), [(100, 2), (PIECE_SIZE + 1, 1)], ids=["short", "long"])
async def test_another_tenant_waits_for_one_piece(size: int, num_ahead: int) -> None:
    """Two short pieces run in parallel."""
    pieces, turns = Pieces(), turns_of()
    flood = [asyncio.create_task(turns.run("a", size, pieces.work, f"a{index}")) for index in range(40)]
    await asyncio.sleep(0)
    other = asyncio.create_task(turns.run("b", size, pieces.work, "b"))
    await asyncio.sleep(0)
    pieces.may_go_on.set()
    assert await other == "b"
    assert await asyncio.gather(*flood) == [f"a{index}" for index in range(40)]
    assert pieces.begun.index("b") <= num_ahead
    assert [name for name in pieces.begun if name != "b"] == [f"a{index}" for index in range(40)]
    assert not turns._queues
    assert turns.waiting.num_bytes == 0
    turns.close()


async def test_a_long_piece_holds_up_no_short_one() -> None:
    pieces, turns = Pieces(), turns_of()
    long = asyncio.create_task(turns.run("a", PIECE_SIZE + 1, pieces.work, "long"))
    await asyncio.sleep(0)
    assert await turns.run("b", 1, str, "short") == "short"
    assert await turns.run_in_turn("a", PIECE_SIZE, threading.get_ident) == threading.get_ident()
    assert not long.done()
    pieces.may_go_on.set()
    assert await long == "long"
    assert await turns.run_in_turn("a", PIECE_SIZE + 1, threading.get_ident) != threading.get_ident()
    turns.close()


async def test_what_waits_is_refused_to_the_tenant_that_has_too_much() -> None:
    pieces, turns = Pieces(), turns_of(100, 60)
    waiting = [asyncio.create_task(turns.run(tenant, 50, pieces.work, tenant)) for tenant in "aab"]
    await asyncio.sleep(0)
    with pytest.raises(RefusedError, match="texts of this tenant hold 50 bytes, this one needs 50 more") as refused:
        await waiting[1]
    assert refused.value.reason is Reason.RESOURCE_EXHAUSTED
    with pytest.raises(RefusedError, match="texts of all tenants hold 100 bytes"):
        await turns.run("b", 5, str)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert turns.waiting.num_bytes == 100  # a thread still uses the bytes
    pieces.may_go_on.set()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert waiting[0].cancelled()
    assert await waiting[2] == "b"
    assert await turns.run("a", 1000, partial(str, "alone")) == "alone"
    assert not turns.waiting._held
    turns.close()


async def test_a_caller_that_leaves_keeps_its_turn_while_its_piece_runs() -> None:
    """A caller that leaves keeps its turn while its piece runs.

    Otherwise the tenant's next piece would run in parallel, and its bytes would not be counted.
    """
    pieces, turns = Pieces(), turns_of()
    begun = asyncio.create_task(turns.run("a", PIECE_SIZE + 1, pieces.work, "begun"))
    waiting = [asyncio.create_task(turns.run("a", PIECE_SIZE + 1, pieces.work, "a")) for _ in range(8)]
    await asyncio.sleep(0)
    for left in (begun, *waiting):
        left.cancel()
    await asyncio.wait(waiting)
    last = asyncio.create_task(turns.run("a", PIECE_SIZE + 1, pieces.work, "last"))
    await asyncio.sleep(0)
    assert turns.waiting.num_bytes == 2 * (PIECE_SIZE + 1)
    assert turns._long_thread._work_queue.qsize() == 0
    pieces.may_go_on.set()
    assert await last == "last"
    assert begun.cancelled()
    assert pieces.begun == ["begun", "last"]
    assert turns.waiting.num_bytes == 0
    assert not turns._queues
    turns.close()


async def test_work_of_a_caller_that_has_left_is_not_kept() -> None:
    pieces, turns = Pieces(), turns_of()
    running = asyncio.create_task(turns.run("a", PIECE_SIZE + 1, pieces.work, "a"))
    held = {1, 2, 3}  # a type that supports weak references
    freed = weakref.ref(held)
    waiting = asyncio.create_task(turns.run("b", PIECE_SIZE + 1, len, held))
    del held
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    del waiting
    assert freed() is None
    pieces.may_go_on.set()
    await running
    turns.close()


async def test_pieces_on_the_event_loop_leave_turns_to_others() -> None:
    """Pieces on the event loop yield after each piece.

    Between two pieces, the event loop runs other callbacks, however many calls arrive at once.
    """
    turns, done = turns_of(), list[str]()
    flood = [asyncio.create_task(turns.run_in_turn("a", PIECE_SIZE, done.append, "a")) for _ in range(40)]
    other = asyncio.create_task(turns.run_in_turn("b", PIECE_SIZE, done.append, "b"))
    most = before = 0
    while not all(task.done() for task in flood):
        await asyncio.sleep(0)
        most, before = max(most, len(done) - before), len(done)
    await other
    assert most == 1
    assert (done.count("a"), done.index("b") <= 2) == (40, True)
    assert not turns._queues
    turns.close()
