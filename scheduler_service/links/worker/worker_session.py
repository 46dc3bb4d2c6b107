"""One epoch with a worker: it sends plans to every rank, receives results and heartbeats, and judges the ranks'
liveness.

Every rank of a worker gets every plan, and all ranks must return equal results.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import grpc
import grpc.aio

from pagewire.common.process.shutdown import cancel
from pagewire.common.wire.messages import (
    CertificateValidity,
    GrammarReport,
    Heartbeat,
    StepPlan,
    StepResult,
    StepResults,
    WorkerCapacity,
    WorkerProtocolError,
)
from pagewire.common.wire.worker_wire import Response, decode_response, encode_request
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.links.worker.liveness import Liveness
from scheduler_service.serving.step_loop import PlanExchange

logger = logging.getLogger(__name__)

_JUDGE_INTERVAL = 0.1
# Capacity fields that must be equal in all ranks, and fields of which the lowest value applies.
_EQUAL = ("vocab_size", "block_size", "dtype", "layer_groups", "num_state_layers", "tables_digest")
_LEAST = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_device_blocks",
    "num_host_blocks",
    "num_device_states",
    "num_host_states",
    "swap_bandwidth",
)


class SessionEnded(Exception):
    """Raised if the connection to the worker has ended. The message is the reason."""


class WorkerUnusable(SessionEnded):
    """Raised if the worker cannot be used until its process is restarted, because it hangs or is connected to another
    scheduler."""


class Session:
    """The connection to all ranks (processes) of the worker during one epoch, the time from connecting to the loss of
    any rank.

    A step is finished when all ranks have returned its result. So no rank has more unfinished plans than its pipeline
    depth allows. The ranks compute in lockstep, so their results arrive at almost the same time. The output tokens of
    rank 0 are used.
    """

    def __init__(self, exchange: PlanExchange, epoch: int, on_plan_sent: Callable[[int], None], num_ranks: int) -> None:
        """Create the connection to the worker's ranks. `epoch` is the number of the connection, and increases from one
        to the next. `on_plan_sent` is called with the size of every plan in bytes."""
        self.epoch = epoch
        self.ranks = [RankSession(self, rank) for rank in range(num_ranks)]
        self._exchange = exchange
        self._on_plan_sent = on_plan_sent
        self._capacities: dict[int, WorkerCapacity] = {}  # by rank
        self._results: list[deque[StepResult]] = [deque() for _ in range(num_ranks)]  # by rank; others' are missing
        self._moved_steps = [0] * num_ranks
        self._last_moved_step = 0
        self._silent_ranks: dict[int, set[int]] = {}  # by grammar id, ranks that have not reported the grammar yet
        self._failed_grammars: set[int] = set()  # ids of failed grammars, whose later reports are ignored

    def send(self, plan: StepPlan) -> None:
        for grammar_id in plan.released_grammar_ids:
            self._silent_ranks.pop(grammar_id, None)
            self._failed_grammars.discard(grammar_id)
        for added in plan.added_grammars:
            self._silent_ranks[added.grammar_id] = set(range(len(self.ranks)))
        message = encode_request(plan)
        self._on_plan_sent(message.ByteSize())
        for rank in self.ranks:
            rank.send(plan, message)

    def close(self, reason: str) -> None:
        self.ranks[0].close(reason)

    def rank_ready(self, rank: int, capacity: WorkerCapacity) -> None:
        """Record that a rank of the worker is ready. When all ranks are ready, report the worker to the step loop.
        Raise SessionEnded if the ranks differ in properties that must be equal, such as the block size."""
        self._capacities[rank] = capacity
        if len(self._capacities) == len(self.ranks):
            self._exchange.worker_ready(self._capacity(), self.epoch, self)
        else:
            self._exchange.availability.worker_missing("the worker is ready, another rank is not", rank)

    def rank_moved(self, rank: int, step: int) -> None:
        self._moved_steps[rank] = step
        if min(self._moved_steps) > self._last_moved_step:
            self._last_moved_step = min(self._moved_steps)
            self._exchange.moved(self._last_moved_step)

    def rank_grammar_ready(self, rank: int, grammar_id: int, error: str) -> None:
        """Record that a rank has compiled a grammar, or why it cannot compile the grammar.

        When all ranks have compiled the grammar, report it to the step loop as ready. If a rank fails, report the first
        rank's error. Raise WorkerProtocolError if a rank reports the same grammar twice.
        """
        silent = self._silent_ranks.get(grammar_id)
        if silent is None or len(self.ranks) == 1:  # the core handles other ids
            self._exchange.grammar_ready(grammar_id, error)
            return
        if rank not in silent:
            raise WorkerProtocolError(f"rank {rank} reported grammar {grammar_id} twice")
        silent.remove(rank)
        if grammar_id in self._failed_grammars:
            return
        if error:
            self._failed_grammars.add(grammar_id)
            self._exchange.grammar_ready(grammar_id, f"rank {rank}: {error}")
        elif not silent:
            self._exchange.grammar_ready(grammar_id, "")

    def rank_result(self, rank: int, result: StepResult, age: float) -> None:
        """Record the result of a step, which was `age` seconds old when it arrived from a rank. When all ranks have
        returned the result, pass it to the step loop. Raise WorkerProtocolError if the ranks chose different tokens or
        returned different steps."""
        self._results[rank].append(result)
        while all(self._results):
            first, *others = (results.popleft() for results in self._results)
            for other_rank, other in enumerate(others, start=1):
                _check_equal(first, other_rank, other)
            self._exchange.result(first, age)

    def _capacity(self) -> WorkerCapacity:
        first, *others = (self._capacities[rank] for rank in range(len(self.ranks)))
        for rank, other in enumerate(others, start=1):
            for name in _EQUAL:
                if getattr(other, name) != getattr(first, name):
                    raise SessionEnded(
                        f"rank {rank} has {name} {getattr(other, name)}, rank 0 has {getattr(first, name)}; start all "
                        "ranks of a worker with the same flags"
                    )
        least = {name: min(getattr(capacity, name) for capacity in (first, *others)) for name in _LEAST}
        return replace(
            first,
            **least,
            grammar_version=self._grammar_version(),
            weight_bytes=sum(capacity.weight_bytes for capacity in self._capacities.values()),
            gates_grammars=any(capacity.gates_grammars for capacity in self._capacities.values()),
        )

    def _grammar_version(self) -> str:
        """Return the version of the grammar library of the worker's ranks, or an empty string if the ranks have
        different versions.

        With an empty version, the scheduler refuses requests with grammars and accepts all others.
        """
        versions = [self._capacities[rank].grammar_version for rank in range(len(self.ranks))]
        if len(set(versions)) == 1:
            return versions[0]
        found = ", ".join(f"rank {rank} has {version or 'none'}" for rank, version in enumerate(versions))
        logger.warning("the ranks have different versions of llguidance, so grammars are refused: %s", found)
        return ""


class RankSession:
    """The gRPC stream to one rank of the worker. It is part of a `Session`, which has one stream to each rank."""

    def __init__(self, session: Session, rank: int) -> None:
        self.session = session
        self.rank = rank
        self.is_ready = False
        self._outbox: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._liveness = Liveness(time.monotonic())
        self._last_moved_step = 0

    def send(self, plan: StepPlan, message: worker_pb2.ExecuteRequest) -> None:
        """Send a plan, which says what to compute in one step, to this rank. `message` is the encoded plan. Do not wait
        for the transmission."""
        has_moves = bool(plan.swap_out_device_blocks or plan.swap_in_host_blocks)
        now = time.monotonic()
        self._liveness.sent(plan.step, sum(plan.work_num_tokens), now, has_moves=has_moves)
        for step in range(plan.step + 1, plan.step + 1 + plan.num_leased_steps):
            self._liveness.sent(step, 0, now)
        self._outbox.put_nowait(message)

    def close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)

    async def hold(
        self,
        call: grpc.aio.StreamStreamCall,
        capacity: WorkerCapacity,
        on_certificates: Callable[[tuple[CertificateValidity, ...]], object],
    ) -> NoReturn:
        """Exchange messages with this rank until its stream ends. Always end with an exception, which contains the
        reason.

        `on_certificates` is called at each heartbeat with the validity periods of the worker's TLS certificates.
        """
        self._on_certificates = on_certificates
        self._liveness = Liveness(time.monotonic())
        self.session.rank_ready(self.rank, capacity)
        self.is_ready = True
        parts = (self._receive(call), self._transmit(call), self._watch())
        tasks: list[asyncio.Future[None]] = [asyncio.create_task(part) for part in parts]
        try:
            ends: list[asyncio.Future[Any]] = [self._closed, *tasks]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._closed in done:
                raise SessionEnded(self._closed.result())
            raise done.pop().exception() or AssertionError("the parts of a session end by raising only")
        finally:
            await cancel(tasks)

    async def _receive(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        while True:
            message = await read(call)
            now = time.monotonic()
            self._liveness.heard(now)
            if isinstance(message, StepResults):
                for i, result in enumerate(message.results):
                    later_us = sum(later.duration_us for later in message.results[i + 1 :])
                    self._take_result(result, later_us / 1e6, now)
                continue
            if not isinstance(message, StepResult | Heartbeat | GrammarReport):
                raise WorkerProtocolError(f"the worker sent {type(message).__name__} in the middle of a session")
            if message.epoch != self.session.epoch:
                raise WorkerProtocolError(
                    f"a {type(message).__name__} of epoch {message.epoch} in epoch {self.session.epoch}"
                )
            if isinstance(message, Heartbeat):
                self._on_certificates(message.certificates)
            if isinstance(message, GrammarReport):
                self.session.rank_grammar_ready(self.rank, message.grammar_id, message.error)
                continue
            if isinstance(message, StepResult):
                self._take_result(message, 0.0, now)
            else:
                self._take_moved_step(message.last_moved_step, now)

    def _take_result(self, result: StepResult, age: float, now: float) -> None:
        if result.epoch != self.session.epoch:
            raise WorkerProtocolError(f"a StepResult of epoch {result.epoch} in epoch {self.session.epoch}")
        self._take_moved_step(result.last_moved_step, now)
        self._liveness.finished(result.step + result.num_dropped_steps, result.duration_us / 1e6, now)
        self.session.rank_result(self.rank, result, age)

    def _take_moved_step(self, step: int, now: float) -> None:
        if step > self._last_moved_step:
            self._last_moved_step = step
            self._liveness.moved(step, now)
            self.session.rank_moved(self.rank, step)

    async def _transmit(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        while True:
            await write(call, await self._outbox.get())

    async def _watch(self) -> NoReturn:
        while True:
            await asyncio.sleep(_JUDGE_INTERVAL)
            if verdict := self._liveness.judge(time.monotonic()):
                raise WorkerUnusable(verdict)


async def read(call: grpc.aio.StreamStreamCall) -> Response:
    """Wait for the next message of the worker and return it. Raise SessionEnded if the worker has ended the stream,
    AioRpcError if the stream breaks, and WorkerProtocolError if the message is invalid."""
    message = await call.read()
    if message is grpc.aio.EOF:
        raise await _ended(call)
    return decode_response(message)


async def write(call: grpc.aio.StreamStreamCall, message: worker_pb2.ExecuteRequest) -> None:
    """Send a message to the worker over its stream. Raise SessionEnded if the stream has ended, and AioRpcError if it
    breaks."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:  # the stream has ended, but the reader has not noticed yet
        raise await _ended(call) from None


async def _ended(call: grpc.aio.StreamStreamCall) -> SessionEnded:
    return SessionEnded(f"the worker ended the stream ({await call.code()}: {await call.details()})")


def _check_equal(first: StepResult, rank: int, other: StepResult) -> None:
    """Raise WorkerProtocolError if rank 0 and another rank of the worker returned different steps or chose different
    tokens.

    Ranks that chose different tokens would compute different keys and values from then on, so the whole KV cache of the
    epoch could not be trusted.
    """
    if other.step != first.step:
        raise WorkerProtocolError(f"rank {rank} answered step {other.step} where rank 0 answered step {first.step}")
    chosen = [
        (result.statuses, result.token_ids, result.candidates.token_ids, result.candidates.counts)
        for result in (first, other)
    ]
    if chosen[0] != chosen[1]:
        raise WorkerProtocolError(f"rank {rank} chose other tokens in step {first.step} than rank 0")
