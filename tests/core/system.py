"""The scheduler core with a simulated worker, driven step by step."""

import random
from collections import deque
from dataclasses import replace

from pagewire.common.wire.messages import LayerGroup, SamplingParams, StepResult, WorkerCapacity
from scheduler_service.core import explain
from scheduler_service.core.beam import BeamSearch, BeamState, FinishedHypothesis
from scheduler_service.core.request import BeamParams, EarlyStopping, EndReason, Request, TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from testing.core.simulated_worker import SimulatedWorker, candidates, digest_all, reference

VOCAB = 97


def capacity_of(
    num_blocks: int,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    num_host_blocks: int = 0,
    windows: tuple[int, ...] = (0,),
    num_states: int = 0,
    num_host_states: int = 0,
):
    return WorkerCapacity(
        worker_id="w",
        model_digest=b"m",
        vocab_size=VOCAB,
        max_model_len=256,
        block_size=block_size,
        num_device_blocks=num_blocks,
        block_bytes=1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        device="cpu",
        dtype="float32",
        attention_backend="none",
        num_host_blocks=num_host_blocks,
        swap_bandwidth=1e9 if num_host_blocks else 0.0,
        layer_groups=tuple(map(LayerGroup, windows)),
        num_device_states=num_states,
        num_host_states=num_host_states,
        state_bytes=int(num_states > 0),
        num_state_layers=int(num_states > 0),
    )


class System:
    """A scheduler, a simulated worker, and the outputs that the clients have received."""

    def __init__(
        self,
        *,
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        budget=64,
        depth=2,
        poisoned=(),
        num_host_blocks=0,
        windows=(0,),
        num_states=0,
        num_host_states=0,
        delays_moves=False,
        **limits,
    ):
        options = SchedulerOptions(max_num_seqs, budget, 256, depth, **{"policy": "priority"} | limits)
        self.scheduler = Scheduler(options)
        self.capacity = capacity_of(
            num_blocks, block_size, max_num_seqs, budget, num_host_blocks, windows, num_states, num_host_states
        )
        self.delays_moves = delays_moves
        self.hypotheses = {}
        self.poisoned = frozenset(poisoned)
        self.now = 0.0
        self.epoch = 0
        self.worker: SimulatedWorker | None = None
        self.results: deque[StepResult] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, EndReason] = {}
        self.ended = {}
        self.prompt_logprobs: dict[int, list] = {}
        self.sequences: dict[int, tuple[Request, int]] = {}
        self.num_plans = 0

    def take(self, outputs: TokenOutputs) -> None:
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            assert sequence_id not in self.ends, "S6: a token after the end"
            self.tokens[sequence_id].append(token_id)
        for sequence_id, entries in outputs.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(sequence_id, []).extend(entries)
        for hypothesis in outputs.hypotheses:
            self.tokens[hypothesis.sequence_id] = list(hypothesis.token_ids)
            self.hypotheses[hypothesis.sequence_id] = hypothesis
        for end in outputs.ended:
            assert end.sequence_id not in self.ends, "S6: two ends"
            self.ends[end.sequence_id] = end.reason
            self.ended[end.sequence_id] = end
            assert list(end.pauses) == sorted(end.pauses)
            assert end.num_output_tokens == len(self.tokens[end.sequence_id]) or end.reason is EndReason.STOP

    def add_beams(
        self, prompt, max_tokens=8, *, width=3, n=1, stop=(), penalty=1.0, early=EarlyStopping.HEURISTIC, **fields
    ):
        beam = BeamParams(width, penalty, early)
        num_candidates = min(VOCAB, max(2, 1 + len(stop)) * width)
        return self.add(
            prompt, max_tokens, n=n, stop=stop, beam=beam, sampling={"num_candidates": num_candidates}, **fields
        )

    def add(self, prompt, max_tokens=8, *, request_id=None, n=1, seed=0, stop=(), **fields):
        sampling = SamplingParams(stop_token_ids=tuple(stop), **fields.pop("sampling", {}))
        request = Request(
            request_id or f"r{len(self.sequences)}",
            fields.pop("tenant", ""),
            tuple(prompt),
            sampling,
            max_tokens,
            seed,
            n,
            **fields,
        )
        ids = self.scheduler.add(request, self.now)
        for index, sequence_id in enumerate(ids):
            self.sequences[sequence_id] = (request, index)
            self.tokens[sequence_id] = []
        return ids

    def join(self) -> None:
        self.epoch += 1
        self.results.clear()
        self.worker = SimulatedWorker.of(self.capacity, poisoned=self.poisoned)
        self.take(self.scheduler.worker_joined(self.capacity, self.epoch, self.now))

    def lose(self) -> None:
        self.worker = None
        self.results.clear()
        self.take(self.scheduler.worker_lost(self.now))

    def plan(self):
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.num_plans += 1
            self.results.append(self.worker.execute(plan, apply_moves=not self.delays_moves))
        return plan

    def complete(self) -> None:
        result = self.results.popleft()
        self.scheduler.moved(result.last_moved_step, self.now)
        self.take(self.scheduler.complete(result, self.now))

    def timed_step(self, decode_seconds: float) -> int:
        """Compute a step and return its number of prompt tokens.

        The step takes as long as on a worker that computes 1,000 prompt tokens per second, or `decode_seconds` if the
        step has no prompt tokens.
        """
        self.plan()
        [dispatch] = self.scheduler.state.worker.unacknowledged
        seconds = dispatch.num_prompt_tokens / 1000 or decode_seconds
        self.results.append(replace(self.results.popleft(), duration_us=int(seconds * 1e6)))
        self.complete()
        return dispatch.num_prompt_tokens

    def finish_move(self) -> None:
        """Finish the oldest move that the worker holds back."""
        self.worker.finish_moves(1)
        self.scheduler.moved(self.worker.last_moved_step, self.now)

    def run(self) -> None:
        """Run until all requests have ended.

        The number of steps is bounded by invariant L1: the first running sequence gets the first tokens of every plan
        and is never preempted. So each sequence needs at most one plan per token once it is first. A later request with
        a better priority can cost a preempted sequence its progress once, and so can each failed row.
        """
        live = [sequence for group in self.scheduler.state.groups.values() for sequence in group.sequences]
        num_restarts = 2 + sum(VOCAB - 1 in sequence.token_ids for sequence in live)
        max_steps = 4 * num_restarts * sum(sequence.max_num_tokens + 4 for sequence in live) + 1
        max_steps += len(self.worker.pending)
        for _ in range(max_steps):
            while self.plan():
                self.scheduler.check()
            if self.results:
                self.complete()
                self.scheduler.check()
            if self.worker.pending:
                self.finish_move()
                self.scheduler.check()
            if not self.results and not self.worker.pending and not self.scheduler.has_requests:
                break
        assert not self.scheduler.has_requests, "L1: requests did not end"
        assert not self.scheduler.state.samples
        assert not len(self.scheduler.state.waiting)
        assert not len(self.scheduler.state.running)
        assert explain.stats(self.scheduler.state).num_held_blocks == 0, "S8"

    def expected(self, sequence_id: int) -> list[int]:
        request, index = self.sequences[sequence_id]
        if request.beam is not None:
            return list(beam_reference(request)[index].token_ids)
        tokens = reference(
            request.prompt_token_ids, request.max_tokens, seed=request.seed, sample_index=index, vocab_size=VOCAB
        )
        for i, token_id in enumerate(tokens):
            if token_id in request.sampling.stop_token_ids and i >= request.sampling.min_tokens:
                return tokens[: i + 1]
        return tokens

    def assert_exact(self) -> None:
        for sequence_id, tokens in self.tokens.items():
            if self.ends[sequence_id] in (EndReason.STOP, EndReason.LENGTH):
                assert tokens == self.expected(sequence_id)
            else:
                assert tokens == self.expected(sequence_id)[: len(tokens)]


def beam_reference(request: Request) -> list[FinishedHypothesis]:
    """Return the hypotheses that an undisturbed beam search finds."""
    search = BeamSearch(
        request.beam, frozenset(request.sampling.stop_token_ids), request.sampling.min_tokens, request.max_tokens
    )
    beams = [BeamState(0.0, ())]
    while True:
        entries = [
            candidates(
                digest_all((*request.prompt_token_ids, *beam.output_token_ids)), request.sampling.num_candidates, VOCAB
            )
            for beam in beams
        ]
        step = search.advance(beams, entries)
        if step.is_done:
            return search.best(request.n)
        beams = [
            BeamState(child.cumulative_logprob, (*beams[child.parent].output_token_ids, child.token_id))
            for child in step.children
        ]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(length)]
