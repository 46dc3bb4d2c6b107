"""Measures the scheduler core without a worker: microseconds of schedule() and complete() per sequence and step.

    python -m bench scheduler

Two plans are in flight, as in production: step N+1 is planned before the result of step N arrives. Results are created
in advance, and only the core's calls are timed. For comparison, a bare loop appends the same tokens to lists, and a
block id to the block table whenever a block is full. Nothing that keeps tokens and block tables can cost less.
Operations that happen once per request (add, admission, finish, abort) are reported separately. The raw numbers are
written to bench/results/scheduler.json.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.core import plan as plan_costs
from bench.goals import verdict
from pagewire.common.wire.messages import SamplingParams, StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.policy import POLICIES
from scheduler_service.core.request import Request, TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions

BLOCK_SIZE = 16
VOCAB_SIZE = 32000
SIZES = ((32, 512), (256, 512), (1024, 512), (4096, 512), (256, 8192), (1024, 8192))  # sequences, prompt tokens
GOAL_US = 1.0
GOAL_SIZES = (256, 1024)
NUM_LIFE_SEQUENCES = 256
NO_LIMIT = 1 << 30
LIFE_ROWS = (
    ("add", "add()"),
    ("admit_without_cache", "admit and open, prefix caching off"),
    ("admit", "admit and open, nothing of the prompt cached"),
    ("admit_cached", "admit and open, the whole prompt cached"),
    ("finish", "finish by length"),
    ("abort", "abort()"),
)
NOTE = (
    "elsewhere on this kind of machine, at 256 sequences of 512 tokens: vLLM 0.32's scheduler 7.7 us, a bare loop 0.07"
)


@dataclass(frozen=True, slots=True)
class Steps:
    """The seconds spent in the core's two calls, over the same steps."""

    schedule: float
    complete: float
    num_sequence_steps: int

    @property
    def us(self) -> float:
        return (self.schedule + self.complete) / self.num_sequence_steps * 1e6


class Pipeline:
    """A scheduler core with a simulated worker, which returns random tokens. Every row samples in every step."""

    def __init__(
        self, policy: str, num_sequences: int, max_model_len: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerOptions(
                max_num_seqs=num_sequences,
                max_num_batched_tokens=NO_LIMIT,
                max_model_len=max_model_len,
                max_waiting_requests=NO_LIMIT,
                max_waiting_tokens=NO_LIMIT,
                enable_prefix_caching=enable_prefix_caching,
                policy=policy,
            )
        )
        self.scheduler.worker_joined(capacity(num_sequences, max_model_len), time.time_ns() // 1_000_000 << 20, 0.0)
        self._rng = random.Random(0)
        self._num_rows = 0
        self._in_flight: list[StepResult] = []

    def add(self, prompt: tuple[int, ...], request_id: str, max_tokens: int) -> None:
        self.scheduler.add(Request(request_id, "", prompt, SamplingParams(), max_tokens), 0.0)

    def plan(self) -> tuple[float, StepPlan | None]:
        start = time.perf_counter()
        plan = self.scheduler.schedule(0.0)
        seconds = time.perf_counter() - start
        self.scheduler.take_kv_events()  # as the step loop does
        if plan is not None:
            self._num_rows += len(plan.openings) - len(plan.released_slots)
            tokens = tuple(self._rng.choices(range(VOCAB_SIZE), k=self._num_rows))
            self._in_flight.append(StepResult(plan.epoch, plan.step, token_ids=tokens))
        return seconds, plan

    def take(self) -> tuple[float, TokenOutputs]:
        result = self._in_flight.pop(0)
        start = time.perf_counter()
        outputs = self.scheduler.complete(result, 0.0)
        seconds = time.perf_counter() - start
        self.scheduler.take_kv_events()
        return seconds, outputs

    def fill(self, num_sequences: int) -> None:
        """Plan steps until `num_sequences` rows run, with one plan in flight."""
        while self._num_rows < num_sequences:
            self.plan()
            if len(self._in_flight) > 1:
                self.take()

    def steps(self, num_steps: int) -> Steps:
        """Time steps in which every row only decodes."""
        schedule = complete = 0.0
        for _ in range(num_steps):
            seconds, plan = self.plan()
            assert plan is not None
            assert not plan.openings
            schedule += seconds
            seconds, outputs = self.take()
            assert len(outputs.token_ids) == self._num_rows
            complete += seconds
        return Steps(schedule, complete, num_steps * self._num_rows)

    def run_to_completion(self) -> None:
        """Plan steps until every request has ended."""
        while self.scheduler.has_requests or self._in_flight:
            self.plan()
            self.take()


def capacity(num_sequences: int, max_model_len: int) -> WorkerCapacity:
    """Return a worker capacity with blocks for twice the sequences, to avoid preemption and keep cached prompts."""
    return WorkerCapacity(
        worker_id="bench",
        model_digest=b"",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        num_device_blocks=2 * num_sequences * (max_model_len // BLOCK_SIZE + 1),
        block_bytes=1,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=NO_LIMIT,
        device="",
        dtype="",
        attention_backend="",
    )


def prompts(seed: int, num_prompts: int, length: int) -> Iterator[tuple[int, ...]]:
    """Yield random prompts of similar length. The lengths vary so that sequences reach block boundaries at different
    steps."""
    rng = random.Random(seed)
    for i in range(num_prompts):
        yield tuple(rng.choices(range(VOCAB_SIZE), k=length + i % BLOCK_SIZE))


# Steady decoding.


def measure_decode(policy: str, num_sequences: int, length: int, num_steps: int, num_rounds: int) -> dict:
    """Return medians over rounds of consecutive steps, in microseconds per sequence and step."""
    max_tokens = num_steps * (num_rounds + 1) + BLOCK_SIZE
    pipeline = Pipeline(policy, num_sequences, length + BLOCK_SIZE + max_tokens)
    bare = BareLoop(length, num_sequences, num_steps * (num_rounds + 1))
    for i, prompt in enumerate(prompts(1, num_sequences, length)):
        pipeline.add(prompt, str(i), max_tokens)
    pipeline.fill(num_sequences)
    pipeline.steps(num_steps)
    bare.steps(num_steps)
    rounds = []
    for _ in range(num_rounds):
        steps, bare_us = pipeline.steps(num_steps), bare.steps(num_steps)
        per_us = 1e6 / steps.num_sequence_steps
        rounds.append(
            {
                "us": steps.us,
                "schedule_us": steps.schedule * per_us,
                "complete_us": steps.complete * per_us,
                "bare_us": bare_us,
            }
        )
    medians = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
    least = min(figures["us"] for figures in rounds)
    sizes = {"num_sequences": num_sequences, "num_prompt_tokens": length}
    return {**sizes, **medians, "least_us": least, "rounds": rounds}


class BareLoop:
    """The baseline: a loop that keeps tokens and block tables in plain lists."""

    def __init__(self, length: int, num_sequences: int, num_steps: int) -> None:
        self._tokens = [[0] * (length + i % BLOCK_SIZE) for i in range(num_sequences)]
        self._tables = [[0] * (len(tokens) // BLOCK_SIZE + 1) for tokens in self._tokens]
        self._free = list(range(num_sequences * (num_steps // BLOCK_SIZE + 1)))
        self._rng = random.Random(0)

    def steps(self, num_steps: int) -> float:
        """Return the microseconds per sequence and step."""
        total, free = 0.0, self._free
        for _ in range(num_steps):
            sampled = tuple(self._rng.choices(range(VOCAB_SIZE), k=len(self._tokens)))
            start = time.perf_counter()
            for tokens, table, token_id in zip(self._tokens, self._tables, sampled, strict=True):
                tokens.append(token_id)
                if len(tokens) % BLOCK_SIZE == 0:
                    table.append(free.pop())
            total += time.perf_counter() - start
        return total / (num_steps * len(self._tokens)) * 1e6


# Operations that happen once per request.


def measure_life(policy: str, length: int, num_rounds: int) -> dict:
    """Return medians in microseconds per request of one sequence. The requests of a round start and end together."""
    caching = Pipeline(policy, NUM_LIFE_SEQUENCES, length + 8 * BLOCK_SIZE)
    bare = Pipeline(policy, NUM_LIFE_SEQUENCES, length + 8 * BLOCK_SIZE, enable_prefix_caching=False)
    columns: dict[str, list[float]] = {key: [] for key, _ in LIFE_ROWS}
    for index in range(num_rounds + 1):
        batch = list(prompts(index, NUM_LIFE_SEQUENCES, length))
        figures = one_life(caching, batch, "cold")
        figures["admit_cached"] = one_life(caching, batch, "cached")["admit"]
        figures["admit_without_cache"] = one_life(bare, batch, "bare")["admit"]
        figures["abort"] = one_abort(caching, batch)
        if index:  # the first warms up
            for key, seconds in figures.items():
                columns[key].append(seconds / NUM_LIFE_SEQUENCES * 1e6)
    medians = {key: statistics.median(values) for key, values in columns.items()}
    return {"num_sequences": NUM_LIFE_SEQUENCES, "num_prompt_tokens": length, **medians, "rounds": columns}


def one_life(pipeline: Pipeline, batch: list[tuple[int, ...]], name: str) -> dict[str, float]:
    """Return the seconds of each operation for the whole batch. All sequences end by length in the same step."""
    start = time.perf_counter()
    for i, prompt in enumerate(batch):
        pipeline.add(prompt, f"{name}-{i}", 4)
    add = time.perf_counter() - start
    admit, plan = pipeline.plan()
    assert plan is not None
    assert len(plan.openings) == len(batch)
    completes = []
    for _ in range(3):
        pipeline.plan()
        completes.append(pipeline.take()[0])
    finish, outputs = pipeline.take()
    assert len(outputs.ended) == len(batch)
    release, plan = pipeline.plan()
    assert plan is None or not plan.openings
    pipeline.run_to_completion()
    return {"add": add, "admit": admit, "finish": finish - min(completes[1:]) + release}


def one_abort(pipeline: Pipeline, batch: list[tuple[int, ...]]) -> float:
    """Return the seconds to abort the whole batch while it decodes, with two steps in flight."""
    for i, prompt in enumerate(batch):
        pipeline.add(prompt, str(i), 64)
    pipeline.plan()
    pipeline.plan()
    start = time.perf_counter()
    for i in range(len(batch)):
        pipeline.scheduler.abort("", str(i), 0.0)
    seconds = time.perf_counter() - start
    pipeline.take()
    pipeline.take()
    pipeline.run_to_completion()
    return seconds


# Reporting.


def measure(arguments: argparse.Namespace) -> dict:
    decode = []
    for num_sequences, length in SIZES:
        if num_sequences > arguments.max_sequences:
            continue
        decode.append(measure_decode(arguments.policy, num_sequences, length, arguments.steps, arguments.rounds))
        print(f"{num_sequences} sequences of {length} tokens: {decode[-1]['us']:.2f} us", flush=True)
    return {
        "load": {
            "policy": arguments.policy,
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "block_size": BLOCK_SIZE,
            "pipeline_depth": 2,
        },
        "decode": decode,
        "life": measure_life(arguments.policy, 512, arguments.rounds),
        "plans": [plan_costs.measure(num_sequences) for num_sequences in (32, 1024)],
    }


def report(figures: dict) -> None:
    print("schedule() + complete(), us per decoding sequence and step")
    print(
        f"  {'sequences':>9} {'prompt':>6} {'both':>7} {'least':>7} "
        f"{'schedule':>9} {'complete':>9} {'bare loop':>10}   growth"
    )
    before = None
    for row in figures["decode"]:
        growth = "" if before is None else f"x{row['us'] / before['us']:.2f}"
        goal = verdict(row["us"], GOAL_US, at_least=False) if row["num_sequences"] in GOAL_SIZES else ""
        print(
            f"  {row['num_sequences']:9,} {row['num_prompt_tokens']:6,} {row['us']:7.3f} {row['least_us']:7.3f} "
            f"{row['schedule_us']:9.3f} {row['complete_us']:9.3f} {row['bare_us']:10.3f}   {growth:6s} {goal}".rstrip()
        )
        before = row
    print(f"  ({NOTE})")
    life = figures["life"]
    print(f"once per request of {life['num_prompt_tokens']} tokens, {life['num_sequences']} at a time, us")
    for key, name in LIFE_ROWS:
        print(f"  {name:48s} {life[key]:8.1f}")
    small, large = figures["plans"]
    print("a steady plan on the wire")
    for steady in (small, large):
        print(
            f"  {steady['num_sequences']:5,} sequences: median {steady['median_bytes']:.0f}, at most "
            f"{steady['max_bytes']} bytes, {steady['encode_us']:.0f} us to encode, {steady['decode_us']:.0f} to decode"
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=128, help="steps of a round (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each row (default: 5)")
    most = max(num_sequences for num_sequences, _ in SIZES)
    parser.add_argument(
        "--max-sequences", type=int, default=most, help="skip rows with more sequences (default: skip none)"
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default=POLICIES[0], help="scheduling policy (default: %(default)s)"
    )
