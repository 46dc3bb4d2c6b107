"""A recording of a random history, with all kinds of requests and a worker that delays moves and is sometimes lost."""

import random
from pathlib import Path

from pagewire.common.wire.messages import (
    GrammarKind,
    LayerGroup,
    SamplingParams,
    StepPlan,
    WorkerCapacity,
    WorkerProtocolError,
)
from scheduler_service.core.policy import POLICIES
from scheduler_service.core.request import (
    AdmissionError,
    BeamParams,
    EarlyStopping,
    Grammar,
    OutputMode,
    Request,
    TokenOutputs,
)
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.serving.recording import Recorder, record
from testing.core.simulated_worker import SimulatedWorker

VOCAB = 97
DEFAULTS = SchedulerOptions(
    max_num_seqs=6,
    max_num_batched_tokens=48,
    max_model_len=128,
    pipeline_depth=2,
    max_waiting_requests=24,
    max_waiting_tokens=500,
    max_tenant_waiting_requests=16,
    enable_prefix_caching=True,
    watermark=0.01,
    policy="priority",
    preemption="auto",
    grammar_version="g",
)
_WINDOWS = [(0,), (0, 8), (12, 6, 6)]  # of the layer groups, by seed


class RecordedHistory:
    """A random history of events and its recording.

    `run` generates the events. `num_plans`, `num_tokens` and `num_refused` count their results.
    """

    def __init__(self, path: Path, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.options = SchedulerOptions(
            max_num_seqs=6,
            max_num_batched_tokens=rng.choice([16, 48]),
            max_model_len=128,
            pipeline_depth=rng.choice([1, 2]),
            max_waiting_requests=24,
            max_waiting_tokens=500,
            max_tenant_waiting_requests=rng.choice([None, 16]),
            enable_prefix_caching=rng.random() < 0.8,
            watermark=0.01,
            policy=rng.choice(POLICIES),
            preemption=rng.choice(["auto", "swap", "recompute"]),
            retention=rng.choice(["lru", "learned"]),
            grammar_version="g",
        )
        self.windows = _WINDOWS[seed % len(_WINDOWS)]
        self.recorder = Recorder(str(path), self.options)
        self.recorder.open()
        self.core = Scheduler(self.options)
        self.scheduler = record(self.core, self.recorder)
        self.worker: SimulatedWorker | None = None
        self.plans: list[StepPlan] = []
        self.preparing: list[int] = []
        self.num_plans = 0
        self.num_tokens = 0
        self.num_refused = 0
        self.now = 100.0
        self.epoch = 0
        self.sequence_ids: list[int] = []
        self.requests: list[Request] = []

    def run(self, num_events: int) -> None:
        """Generate `num_events` random events, run all remaining requests to their end, and close the recording."""
        for _ in range(num_events):
            self.now += self.rng.random() * 0.01
            if self.worker is None:
                self.join()
            self.rng.choices([self.add, self.step, self.end_one, self.lose], [20, 75, 4, 1])[0]()
        while self.core.has_requests:
            if self.worker is None:
                self.join()
            self.step()
        self.recorder.close()

    def join(self) -> None:
        self.epoch += 1
        capacity = WorkerCapacity(
            worker_id="w",
            model_digest=b"\x00m",
            vocab_size=VOCAB,
            max_model_len=128,
            block_size=4,
            num_device_blocks=self.rng.choice([36, 48]),
            block_bytes=1000,
            max_num_seqs=6,
            max_num_batched_tokens=48,
            device="cpu",
            dtype="float32",
            attention_backend="none",
            num_host_blocks=20,
            swap_bandwidth=1e6,
            grammar_version="g",
            layer_groups=tuple(map(LayerGroup, self.windows)),
        )
        self.worker = SimulatedWorker(
            capacity.num_device_blocks, 4, VOCAB, 6, 48, num_host_blocks=20, windows=self.windows
        )
        self.take(self.scheduler.worker_joined(capacity, self.epoch, self.now))

    def add(self) -> None:
        rng = self.rng
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.7]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 2]))),
            num_logprobs=rng.choice([None, 0]),
            logit_bias_token_ids=(3,),
            logit_bias_values=(0.1,),
        )
        beam, n = None, rng.choice([1, 1, 2, 3])
        if rng.random() < 0.3:
            beam = BeamParams(3, rng.choice([0.5, 1.0]), rng.choice(list(EarlyStopping)))
            num_candidates = 3 * (1 + len(sampling.stop_token_ids))
            sampling = SamplingParams(stop_token_ids=sampling.stop_token_ids, num_candidates=num_candidates)
        request = Request(
            request_id=f"r{len(self.requests)}é",
            tenant=rng.choice("ab"),
            prompt_token_ids=tuple([7] * rng.choice([0, 8]) + [rng.randrange(4) for _ in range(rng.randint(1, 24))]),
            sampling=sampling,
            max_tokens=rng.randint(1, 16),
            seed=rng.getrandbits(63),
            n=n,
            priority=rng.randrange(2),
            beam=beam,
            deadline=rng.choice([None, self.now + 1]),
            output_mode=rng.choice(list(OutputMode)),
            grammar=rng.choice([None, None, Grammar(GrammarKind.CHOICE, f"{rng.randrange(3)} 9 none 0", (5,))]),
            session_id=rng.choice(["", "s"]),
            will_return=rng.choice([None, False, True]),
            retention_seconds=rng.choice([None, 1, 300]),
        )
        self.requests.append(request)
        try:
            self.sequence_ids += self.scheduler.add(request, self.now)
        except AdmissionError:
            self.num_refused += 1

    def step(self) -> None:
        if self.worker is None:
            return
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.preparing += [added.grammar_id for added in plan.added_grammars]
            self.num_plans += 1
        elif self.plans:
            result = self.worker.execute(self.plans.pop(0), apply_moves=False)
            self.worker.finish_moves(self.rng.randint(0, len(self.worker.pending)))
            self.scheduler.moved(self.worker.last_moved_step, self.now)
            self.now += 0.001
            self.take(self.scheduler.complete(result, self.now))
            self.prepare()
        else:
            self.worker.finish_moves(len(self.worker.pending))
            self.scheduler.moved(self.worker.last_moved_step, self.now)

    def prepare(self) -> None:
        """Prepare the grammars that the worker has received. One in five cannot be read."""
        while self.preparing and self.preparing[0] <= self.worker.last_grammar_id:
            grammar_id = self.preparing.pop(0)
            if self.worker.prepare(grammar_id) is not None:
                error = "" if self.rng.random() < 0.8 else "unreadable"
                self.take(self.scheduler.grammar_ready(grammar_id, error, self.now))

    def end_one(self) -> None:
        try:
            if self.rng.random() < 0.5 and self.requests:
                request = self.rng.choice(self.requests)
                self.take(self.scheduler.abort(request.tenant, request.request_id, self.now))
            elif self.sequence_ids:
                self.take(self.scheduler.stop(self.rng.choice(self.sequence_ids), 0, self.now))
        except KeyError:
            self.num_refused += 1

    def lose(self) -> None:
        if self.rng.random() < 0.5 and self.plans:
            result = self.worker.execute(self.plans[0])
            try:
                self.scheduler.complete(result.__class__(result.epoch, result.step + 1), self.now)
            except WorkerProtocolError:
                self.num_refused += 1
        self.take(self.scheduler.worker_lost(self.now))
        self.worker = None
        self.plans.clear()
        self.preparing.clear()
        if self.rng.random() < 0.4:
            self.take(self.scheduler.worker_grace_ended(self.now))
        if self.rng.random() < 0.2:
            self.take(self.scheduler.worker_timed_out(self.now))

    def take(self, outputs: TokenOutputs) -> None:
        self.num_tokens += len(outputs.token_ids) + sum(len(found.token_ids) for found in outputs.hypotheses)
