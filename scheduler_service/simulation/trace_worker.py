"""A worker that computes nothing, but answers plans with the tokens of a trace after a modelled time.

Rates are in tokens of the trace. Steps and blocks are in tokens of the core, each of which represents `scale` tokens of
the trace.
"""

import math
from dataclasses import dataclass

from pagewire.common.wire.messages import StepPlan, StepResult
from scheduler_service.serving.step_loop import StepLoop
from scheduler_service.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """The speed of a simulated worker: how fast it computes tokens and moves KV cache blocks.

    The worker computes prompts one after another. At the same time, it decodes any number of sequences at one fixed
    rate, and transfers blocks between device and host.
    """

    prefill_rate: float  # prompt tokens per second
    decode_rate: float  # tokens per second of each row
    transfer_rate: float  # tokens per second, each way
    scale: int
    step_overhead_s: float = 0.0  # of a step that computes prompts, in addition to the time of their tokens
    max_num_batched_tokens: int | None = None  # of a step; None: the prompt tokens that fit into one decode step

    @property
    def max_step_tokens(self) -> int:
        """The largest number of tokens in a simulated step, including the tokens of decoding sequences.

        The default is the number of prompt tokens that the worker can compute in the time in which it decodes one
        token.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(1, round((1 / self.decode_rate - self.step_overhead_s) * self.prefill_rate))

    def prompt_s(self, num_tokens: float) -> float:
        """Return how many seconds the simulated worker needs to compute `num_tokens` prompt tokens of the trace, if
        each step computes as many tokens as allowed."""
        return num_tokens / self.prefill_rate + math.ceil(num_tokens / self.max_step_tokens) * self.step_overhead_s

    def step_s(self, num_prompt_tokens: int, num_decoding_rows: int) -> float:
        """Return the duration of a simulated step in seconds. It is the time to compute the step's prompt tokens.

        If any sequence decodes in the step, the duration is at least the time to decode one simulated token.
        """
        prompt_s = self.prompt_s(num_prompt_tokens * self.scale)
        return max(prompt_s, self.scale / self.decode_rate) if num_decoding_rows else prompt_s

    def transfer_s(self, num_tokens: int) -> float:
        """Return how many seconds the simulated worker needs to move the KV cache of `num_tokens` simulated tokens from
        the device to the host, or back."""
        return num_tokens * self.scale / self.transfer_rate

    def alone_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Return how many seconds a request would take if the simulated worker computed no other request.

        The lengths are in tokens of the trace. The first output token is sampled in the step that computes the last
        prompt token.
        """
        return self.prompt_s(num_prompt_tokens) + (num_output_tokens - 1) / self.decode_rate


@dataclass(slots=True)
class TraceRow:
    """The simulated worker's state of one running sequence: how many tokens it still has to compute before it samples,
    and the output to return, which is known from the trace."""

    output: list[int]
    num_sampled: int
    num_left: int  # tokens to compute before it samples
    work: int = 0  # tokens that it computes in each step, until a plan changes it


class TraceWorker:
    """A simulated worker. It runs no model: it answers each plan with output tokens from the trace, after a time
    computed from its speed settings. Requests must have one sample each.

    Block transfers between device and host run at the same time as computation. The transfers of a plan start after the
    transfers of the preceding plan.
    """

    def __init__(self, speed: WorkerSpeed, block_size: int, timeline: Timeline, loop: StepLoop) -> None:
        self._speed = speed
        self._block_size = block_size
        self._timeline = timeline
        self._loop = loop
        self.num_prompt_tokens = 0  # computed so far, including recomputed tokens
        self._rows: dict[int, TraceRow] = {}  # by slot
        self.outputs: dict[int, list[int]] = {}  # the output of each sequence
        self._moves_end_at = 0.0

    def send(self, plan: StepPlan) -> None:
        """Receive a plan from the scheduler, and simulate it. The result reaches the step loop after the simulated
        duration of the step.

        Raises NotImplementedError if the plan has forks, block copies or beams. Requests with one sample do not need
        them.
        """
        if plan.fork_target_slots or plan.copy_source_blocks or plan.append_token_slots:
            raise NotImplementedError("the simulated worker supports neither forks nor beams")
        self._patch(plan)
        num_prompt_tokens = num_decoding_rows = 0
        token_ids = []
        for slot in sorted(self._rows):
            row = self._rows[slot]
            if not row.work:
                continue
            if row.num_left == 1 and row.num_sampled:
                num_decoding_rows += 1
            else:
                num_prompt_tokens += row.work
            row.num_left -= row.work
            if not row.num_left:
                token_ids.append(row.output[row.num_sampled])
                row.num_sampled += 1
                row.num_left = row.work = 1
        duration_s = self._speed.step_s(num_prompt_tokens, num_decoding_rows)
        result = StepResult(plan.epoch, plan.step, token_ids=tuple(token_ids), duration_us=round(duration_s * 1e6))
        self.num_prompt_tokens += num_prompt_tokens
        self._move(plan)
        self._timeline.after(duration_s, self._loop.exchange.result, result)

    def close(self, reason: str) -> None:
        """Raise RuntimeError with `reason`. The scheduler closes a worker that violates the protocol, and only a bug in
        the simulation can cause that."""
        raise RuntimeError(reason)

    def _patch(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            del self._rows[slot]
        for opening in plan.openings:
            num_tokens = len(opening.token_ids)
            self._rows[opening.slot] = TraceRow(
                self.outputs[opening.sequence_id],
                num_sampled=num_tokens - opening.num_prompt_tokens,
                num_left=num_tokens - opening.num_computed_tokens,
            )
        for slot, num_tokens in zip(plan.work_slots, plan.work_num_tokens, strict=True):
            self._rows[slot].work = num_tokens

    def _move(self, plan: StepPlan) -> None:
        """Simulate the block transfers of a plan. Transfers to the host and to the device run at the same time. They
        start after the transfers of earlier plans."""
        num_blocks = max(len(plan.swap_out_device_blocks), len(plan.swap_in_device_blocks))
        if num_blocks:
            self._moves_end_at = max(self._moves_end_at, self._timeline.time)
            self._moves_end_at += self._speed.transfer_s(num_blocks * self._block_size)
            self._timeline.at(self._moves_end_at, self._loop.exchange.moved, plan.step)
