"""The driver of a simulation: runs the step loop through a trace in simulated time.

A step starts when the step before has ended. One simulated step represents `scale` steps of a real worker. So planning
ahead of results would delay requests far more here than on a real worker. An event during a step enters the core at its
own time.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.common.wire.messages import SamplingParams, StepResult, WorkerCapacity
from scheduler_service.core.explain import stats
from scheduler_service.core.policy import Policy
from scheduler_service.core.request import (
    AdmissionError,
    AdmissionReason,
    Request,
    SchedulerStats,
    SequenceEnd,
)
from scheduler_service.core.retention import EXPECTATIONS, ReturnEstimate
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.core.sequence import Session
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.observer import Observer
from scheduler_service.serving.output import SampleRecord
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.simulation.timeline import Timeline
from scheduler_service.simulation.trace import Trace, TraceContent, TraceRequest
from scheduler_service.simulation.trace_worker import TraceWorker, WorkerSpeed

NO_LIMIT = 2**62
RETENTIONS = (*EXPECTATIONS, "belady")  # which sessions' idle blocks are kept longest; "belady" reads the trace


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The settings of a simulation of the scheduler. Sizes are in tokens of the trace."""

    pool_tokens: int
    speed: WorkerSpeed
    host_tokens: int = 0
    block_size: int = 64
    max_sessions: int | None = None  # concurrent sessions; the next starts when one ends
    max_think_s: float | None = None
    max_num_seqs: int = 256
    has_session_tenants: bool = False  # each session is a tenant of its own
    tenant_shares: tuple[int, ...] = ()  # if set: the number of sessions that each tenant gets in turn
    retention: str = "lru"  # one of RETENTIONS
    # Of a model with states besides K and V: the number of states, and the tokens whose K and V weigh as much as one.
    num_device_states: int = 0
    state_tokens: int = 0

    def check(self, trace: Trace) -> None:
        """Raise ValueError if the settings contradict each other, or if the block sizes are not multiples of the
        scale."""
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
                f"the step overhead of {self.speed.step_overhead_s:g} s leaves no time for prompts at a decode rate of "
                f"{self.speed.decode_rate:g} tokens per second: set --max-num-batched-tokens"
            )

    def think_s(self, request: TraceRequest) -> float:
        """Return the seconds between the end of a session's previous answer and `request`. The result is at most
        `max_think_s`, if this limit is set."""
        return min(request.think_s, math.inf if self.max_think_s is None else self.max_think_s)

    def tenant(self, session: int, name: str) -> str:
        """Return the name of the tenant that sends a session of the trace, or an empty string if the settings define no
        tenants.

        `session` is the index of the session, and `name` is its name.
        """
        if not self.tenant_shares:
            return name if self.has_session_tenants else ""
        owners = [tenant for tenant, share in enumerate(self.tenant_shares) for _ in range(share)]
        return f"tenant {owners[session % len(owners)]}"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The times at which a finished request of a simulation arrived, started and ended, in seconds of simulated time.
    `session` and `index` identify the request in the trace."""

    session: int
    index: int
    arrived_at: float
    first_scheduled_at: float
    first_token_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class ServedSession:
    """The times at which a finished session of a simulation started and ended, in seconds of simulated time.

    `alone_s` is how long the session would take if no other session ran and the prefix cache never evicted blocks.
    """

    session: int
    started_at: float
    ended_at: float
    alone_s: float


@dataclass(slots=True)
class SimulatedRun:
    """The results of a simulation of one trace.

    `gaps` maps each time between two successive simulated tokens, in seconds, to the number of times it occurred. Each
    simulated token represents `scale` tokens of the trace.
    """

    requests: list[ServedRequest] = field(default_factory=list)
    sessions: list[ServedSession] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)
    num_rejected: int = 0  # requests larger than the pool
    num_needed_tokens: int = 0  # of the trace, over the finished requests
    num_computed_tokens: int = 0  # of the core, like all counts in `stats`
    num_steps: int = 0
    stats: SchedulerStats | None = None

    @property
    def ended_at(self) -> float:
        return max((request.ended_at for request in self.requests), default=0.0)


class Belady(ReturnEstimate):
    """A cache eviction rule that knows the future: the session whose next request in the trace comes last loses its KV
    cache blocks first.

    After Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", 1966. Sessions have the same names
    as in the trace. The rule knows when a session's next request arrives, but not how long the request will then wait.
    """

    def __init__(self, trace: Trace, think_s: Callable[[TraceRequest], float]) -> None:
        self._sessions = {session.name: session for session in trace.sessions}
        self._think_s = think_s
        self.last_index: dict[str, int] = {}  # index of each session's latest request

    def last_needed_at(self, session: Session) -> float:
        requests, index = self._sessions[session.name].requests, self.last_index[session.name]
        if index + 1 >= len(requests):
            return -math.inf
        return -(session.last_used_at + self._think_s(requests[index + 1]))


@dataclass(slots=True)
class _ActiveSession:
    """A session of the trace that is in progress. The simulation sends its requests one after another."""

    session: int
    started_at: float
    alone_s: float = 0.0
    index: int = 0  # of the next or current request


class Simulation(Observer):
    """A simulation of the scheduler that replays one trace of requests under one scheduling policy. It plays the part
    of all clients, and records the results of each step. `run` may be called only once."""

    def __init__(self, trace: Trace, policy: Policy, settings: SimulationSettings) -> None:
        """Create a simulation with a simulated worker. Raises ValueError if the settings do not fit the trace."""
        settings.check(trace)
        self._trace = trace
        self._settings = settings
        self._content = TraceContent(trace, settings.speed.scale)
        self._belady = Belady(trace, settings.think_s) if settings.retention == "belady" else None
        self._timeline = Timeline()
        self._scheduler = Scheduler(
            SchedulerOptions(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.speed.max_step_tokens,
                pipeline_depth=1,
                max_waiting_requests=NO_LIMIT,
                max_waiting_tokens=NO_LIMIT,
            ),
            policy=policy,
            new_expectation=lambda: self._belady or EXPECTATIONS[settings.retention](),
        )
        self._loop = StepLoop(self._scheduler, [self], worker_timeout=math.inf, clock=self._timeline)
        block_size = settings.block_size // settings.speed.scale
        self._worker = TraceWorker(settings.speed, block_size, self._timeline, self._loop)
        self._unstarted = deque(range(len(trace.sessions)))
        self._open: dict[int, _ActiveSession] = {}  # by sequence id
        self._run = SimulatedRun()
        self._loop.exchange.worker_ready(
            WorkerCapacity(
                worker_id="simulated",
                model_digest=b"",
                vocab_size=2**31,
                max_model_len=NO_LIMIT,
                block_size=block_size,
                num_device_blocks=settings.pool_tokens // settings.block_size,
                block_bytes=settings.block_size,  # one byte per token: bytes per second are tokens per second
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.speed.max_step_tokens,
                device="",
                dtype="",
                attention_backend="",
                num_host_blocks=settings.host_tokens // settings.block_size,
                swap_bandwidth=settings.speed.transfer_rate if settings.host_tokens else 0.0,
                num_device_states=settings.num_device_states,
                state_bytes=settings.state_tokens,
            ),
            1,
            self._worker,
        )

    def run(self, progress: Callable[[SimulatedRun, float], None] | None = None) -> SimulatedRun:
        """Simulate the whole trace, and return the results.

        After each step, `progress` is called with the results so far and the simulated time in seconds. Raises
        RuntimeError if the scheduler leaves requests unfinished.
        """
        self._progress = progress or (lambda run, now: None)
        for _ in range(min(len(self._unstarted), self._settings.max_sessions or NO_LIMIT)):
            self._start_session()
        self._timeline.drive(self._loop, lambda: 0.0)
        if self._open:
            raise RuntimeError(
                f"the scheduler runs no request at {self._timeline.time:.3f} s, although unfinished requests remain"
            )
        self._run.num_computed_tokens = self._worker.num_prompt_tokens
        self._run.stats = stats(self._loop.state)
        return self._run

    # Requests

    def _start_session(self) -> None:
        index = self._unstarted.popleft()
        started_at = max(self._timeline.time, self._trace.sessions[index].start_s)
        self._timeline.at(started_at, self._arrive, _ActiveSession(index, started_at))

    def _arrive(self, session: _ActiveSession) -> None:
        source = self._trace.sessions[session.session]
        prompt, output = self._content.tokens(session.session, session.index)
        request = Request(
            request_id=f"{source.name}:{session.index}",
            tenant=self._settings.tenant(session.session, source.name),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(),
            max_tokens=len(output),
            session_id=source.name if self._belady else "",
        )
        if self._belady is not None:
            self._belady.last_index[source.name] = session.index
        try:
            sample = SampleRecord(0)  # which no client reads
            self._loop.submit(ActiveRequest(request, [sample], self._loop))
        except AdmissionError as error:
            if error.reason is not AdmissionReason.INVALID:
                raise
            self._run.num_rejected += 1
            self._continue_session(session)
            return
        traced = source.requests[session.index]
        self._run.num_needed_tokens += traced.num_needed_tokens
        session.alone_s += self._settings.speed.alone_s(traced.num_needed_tokens, traced.num_output_tokens)
        self._worker.outputs[sample.sequence_id] = output
        self._open[sample.sequence_id] = session

    def _continue_session(self, session: _ActiveSession) -> None:
        """Continue after a request of a session has ended: schedule the session's next request. If the session has no
        more requests, start another session."""
        session.index += 1
        requests = self._trace.sessions[session.session].requests
        if session.index < len(requests):
            think_s = self._settings.think_s(requests[session.index])
            session.alone_s += think_s
            self._timeline.after(think_s, self._arrive, session)
            return
        self._run.sessions.append(
            ServedSession(session.session, session.started_at, self._timeline.time, session.alone_s)
        )
        if self._unstarted:
            self._start_session()

    # Observer

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        self._run.gaps[round(seconds, 6)] += num_tokens  # distinguished to the microsecond

    def step_finished(self, result: StepResult, num_computed_prompt_tokens: int) -> None:
        self._run.num_steps += 1
        self._progress(self._run, self._timeline.time)
        self._timeline.catch_up()  # the next plan includes requests that arrive when others end

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        session = self._open.pop(end.sequence_id)
        del self._worker.outputs[end.sequence_id]
        if end.first_token_at is None or end.first_scheduled_at is None:
            raise RuntimeError(f"a request ended without a token: {end.reason.value} {end.message}")
        self._run.requests.append(
            ServedRequest(
                session.session,
                session.index,
                end.arrived_at,
                end.first_scheduled_at,
                end.first_token_at,
                now,
            )
        )
        self._continue_session(session)
