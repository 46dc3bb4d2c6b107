"""Drives the scheduler core through a trace in simulated time.

A step begins when the one before has ended: as it stands for `scale` steps of a real worker, planning ahead of results
would delay requests by far more than it does there. What happens during a step enters the core at its own time.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pagewire.common.messages import SamplingParams, WorkerCapacity
from scheduler_service.core.explain import stats
from scheduler_service.core.policy import Policy
from scheduler_service.core.request import (
    AdmissionError,
    AdmissionReason,
    Request,
    SchedulerStats,
    SequenceEnd,
    TokenOutputs,
)
from scheduler_service.core.retention import EXPECTATIONS, Expectation
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.simulation.belady import Belady
from scheduler_service.simulation.trace import Trace, TraceContent, TraceRequest
from scheduler_service.simulation.trace_worker import TraceWorker, WorkerSpeed

NO_LIMIT = 2**62
RETENTIONS = (*EXPECTATIONS, "belady")  # whose idle blocks are kept; the last knows the trace
_VOCAB_SIZE = 2**31
_GAP_DIGITS = 6  # gaps between tokens are told apart to the microsecond


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What a trace is driven through. Sizes are in tokens of the trace."""

    pool_tokens: int
    speed: WorkerSpeed
    host_tokens: int = 0
    block_size: int = 64
    max_sessions: int | None = None  # at once; the next begins when one ends
    max_think_s: float | None = None
    max_num_seqs: int = 256
    has_session_tenants: bool = False  # each session is a tenant of its own
    tenant_shares: tuple[int, ...] = ()  # or they are dealt to so many tenants, this many to each in turn
    retention: str = "lru"  # one of RETENTIONS

    def check(self, trace: Trace) -> None:
        """Raise ValueError where the sizes do not go with one another, or with the trace."""
        scale = self.speed.scale
        for what, size in (("the block size", self.block_size), ("the trace's block size", trace.block_size)):
            if size % scale:
                raise ValueError(f"the scale is {scale}, but must divide {what}, {size}")
        if self.pool_tokens < self.block_size:
            raise ValueError(f"the pool has {self.pool_tokens} tokens, but must hold a block of {self.block_size}")
        if not self.speed.transfer_rate and self.host_tokens:
            raise ValueError("a host tier needs a transfer rate above 0")
        if self.retention not in RETENTIONS:
            raise ValueError(f"the retention is {self.retention!r}, but must be one of {', '.join(RETENTIONS)}")
        if self.speed.max_num_batched_tokens is None and self.speed.step_overhead_s * self.speed.decode_rate >= 1:
            raise ValueError(
                f"the step overhead, {self.speed.step_overhead_s:g} s, leaves no time for prompts beside a token at "
                f"{self.speed.decode_rate:g} per second: give the tokens of a step, --max-num-batched-tokens"
            )

    def think_s(self, request: TraceRequest) -> float:
        """The seconds between the answer before and a request."""
        return min(request.think_s, math.inf if self.max_think_s is None else self.max_think_s)

    def tenant(self, session: int, name: str) -> str:
        """The tenant of a session, by its index and name."""
        if not self.tenant_shares:
            return name if self.has_session_tenants else ""
        owners = [tenant for tenant, share in enumerate(self.tenant_shares) for _ in range(share)]
        return f"tenant {owners[session % len(owners)]}"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The times of a request that was served, in seconds of simulated time."""

    session: int
    index: int
    arrived_at: float
    first_scheduled_at: float
    first_token_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class ServedSession:
    """The times of a session, and the seconds that it would take alone with a cache that forgets nothing."""

    session: int
    started_at: float
    ended_at: float
    alone_s: float


@dataclass(slots=True)
class SimulatedRun:
    """What a run yielded. `gaps` counts the seconds between tokens of the core, each of which stands for `scale`."""

    requests: list[ServedRequest] = field(default_factory=list)
    sessions: list[ServedSession] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)
    num_rejected: int = 0  # requests that the pool can never hold
    num_needed_tokens: int = 0  # of the trace, of the requests that were served
    num_computed_tokens: int = 0  # of the core, as all counts of `stats`
    num_steps: int = 0
    stats: SchedulerStats | None = None

    @property
    def ended_at(self) -> float:
        return max((request.ended_at for request in self.requests), default=0.0)


@dataclass(slots=True)
class _SessionUnderWay:
    """A session under way."""

    session: int
    started_at: float
    alone_s: float = 0.0


@dataclass(slots=True)
class _RequestUnderWay:
    """A request that is to arrive or has arrived, and when its last token came."""

    session: _SessionUnderWay
    index: int
    last_token_at: float | None = None


class Simulation:
    """One policy, one trace. `run` may be called once."""

    def __init__(self, trace: Trace, policy: Policy, settings: SimulationSettings) -> None:
        """Raises ValueError for settings that do not go with the trace."""
        settings.check(trace)
        self._trace = trace
        self._settings = settings
        self._speed = settings.speed
        self._content = TraceContent(trace, self._speed.scale)
        self._worker = TraceWorker(self._speed, settings.block_size // self._speed.scale)
        self._belady = Belady(trace, settings.think_s) if settings.retention == "belady" else None
        self._scheduler = _scheduler(policy, settings, self._belady)
        # Time, number, and a request that arrives or the step whose moves are done.
        self._events: list[tuple[float, int, _RequestUnderWay | int]] = []
        self._num_events = 0
        self._unstarted = deque(range(len(trace.sessions)))
        self._open: dict[int, _RequestUnderWay] = {}  # by sequence
        self._run = SimulatedRun()

    def run(self, progress: Callable[[SimulatedRun, float], None] | None = None) -> SimulatedRun:
        """Serve the whole trace. `progress` is told after each step what there is and what time it is."""
        scheduler, worker, run = self._scheduler, self._worker, self._run
        now = 0.0
        for _ in range(min(len(self._unstarted), self._settings.max_sessions or NO_LIMIT)):
            self._start_session(now)
        while True:
            self._take_events(now)
            plan = scheduler.schedule(now)
            if plan is None:
                if not self._events:
                    break
                now = self._events[0][0]
                continue
            step = worker.execute(plan, now)
            if step.moved_at is not None:
                self._add_event(step.moved_at, plan.step)
            self._take_events(step.ended_at)
            now = step.ended_at
            self._take_outputs(scheduler.complete(step.result, now), now)
            scheduler.drop_kv_events()
            run.num_computed_tokens += step.num_prompt_tokens
            run.num_steps += 1
            if progress is not None:
                progress(run, now)
        if scheduler.has_requests:
            raise RuntimeError(f"the scheduler serves no request at {now:.3f} s, though there are some")
        run.stats = stats(scheduler.state)
        return run

    # Events

    def _add_event(self, at: float, event: _RequestUnderWay | int) -> None:
        self._num_events += 1
        heappush(self._events, (at, self._num_events, event))

    def _take_events(self, until: float) -> None:
        """Let everything happen that happens up to a time, each at its own."""
        while self._events and self._events[0][0] <= until:
            at, _, event = heappop(self._events)
            if isinstance(event, int):
                self._scheduler.moved(event, at)
            else:
                self._arrive(event, at)

    def _start_session(self, now: float) -> None:
        index = self._unstarted.popleft()
        started_at = max(now, self._trace.sessions[index].start_s)
        self._add_event(started_at, _RequestUnderWay(_SessionUnderWay(index, started_at), 0))

    def _arrive(self, arrival: _RequestUnderWay, now: float) -> None:
        session = arrival.session
        source = self._trace.sessions[session.session]
        prompt, output = self._content.tokens(session.session, arrival.index)
        request = Request(
            request_id=f"{source.name}:{arrival.index}",
            tenant=self._settings.tenant(session.session, source.name),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(),
            max_tokens=len(output),
            session_id=source.name if self._belady else "",
        )
        if self._belady is not None:
            self._belady.began(source.name, arrival.index)
        try:
            [sequence_id] = self._scheduler.add(request, now)
        except AdmissionError as error:
            if error.reason is not AdmissionReason.INVALID:
                raise
            self._run.num_rejected += 1
            self._go_on(arrival, now)
            return
        traced = source.requests[arrival.index]
        self._run.num_needed_tokens += traced.num_needed_tokens
        session.alone_s += self._speed.alone_s(traced.num_needed_tokens, traced.num_output_tokens)
        self._worker.expect(sequence_id, output)
        self._open[sequence_id] = arrival

    def _go_on(self, request: _RequestUnderWay, now: float) -> None:
        """A request of a session is over: the next one comes when the thinking is, or the next session begins."""
        session, index = request.session, request.index + 1
        requests = self._trace.sessions[session.session].requests
        if index < len(requests):
            think_s = self._settings.think_s(requests[index])
            session.alone_s += think_s
            self._add_event(now + think_s, _RequestUnderWay(session, index))
            return
        self._run.sessions.append(ServedSession(session.session, session.started_at, now, session.alone_s))
        if self._unstarted:
            self._start_session(now)

    # Outputs

    def _take_outputs(self, outputs: TokenOutputs, now: float) -> None:
        for sequence_id in outputs.sequence_ids:
            request = self._open[sequence_id]
            if request.last_token_at is not None:
                self._run.gaps[round(now - request.last_token_at, _GAP_DIGITS)] += 1
            request.last_token_at = now
        for end in outputs.ended:
            self._end(end, now)

    def _end(self, end: SequenceEnd, now: float) -> None:
        request = self._open.pop(end.sequence_id)
        self._worker.forget(end.sequence_id)
        if end.first_token_at is None or end.first_scheduled_at is None:
            raise RuntimeError(f"a request ended without a token: {end.reason.value} {end.message}")
        self._run.requests.append(
            ServedRequest(
                request.session.session,
                request.index,
                end.arrived_at,
                end.first_scheduled_at,
                end.first_token_at,
                now,
            )
        )
        self._go_on(request, now)


def _scheduler(policy: Policy, settings: SimulationSettings, belady: Belady | None) -> Scheduler:
    """Make a scheduler with its worker. Nothing is refused but what the pool can never hold."""
    speed, scale = settings.speed, settings.speed.scale

    def new_expectation() -> Expectation:
        return belady or EXPECTATIONS[settings.retention]()

    scheduler = Scheduler(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=speed.max_step_tokens,
        max_model_len=NO_LIMIT,
        pipeline_depth=1,
        max_waiting_requests=NO_LIMIT,
        max_waiting_tokens=NO_LIMIT,
        policy=policy,
        new_expectation=new_expectation,
    )
    capacity = WorkerCapacity(
        worker_id="simulated",
        model_digest=b"",
        vocab_size=_VOCAB_SIZE,
        max_model_len=NO_LIMIT,
        block_size=settings.block_size // scale,
        num_device_blocks=settings.pool_tokens // settings.block_size,
        block_bytes=settings.block_size,  # a byte for each token, so that bytes per second are tokens per second
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=speed.max_step_tokens,
        device="",
        dtype="",
        attention_backend="",
        num_host_blocks=settings.host_tokens // settings.block_size,
        swap_bandwidth=speed.transfer_rate if settings.host_tokens else 0.0,
    )
    scheduler.worker_joined(capacity, 1, 0.0)
    return scheduler
