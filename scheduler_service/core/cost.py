"""Estimates of costs in seconds, from measured steps.

The scheduler uses them to choose between a swap and a recomputation, and to limit how much prefill slows decoding.
"""

from collections import deque
from enum import StrEnum
from itertools import accumulate
from statistics import median_low


class PreemptionMode(StrEnum):
    """The way in which a preempted request keeps or recovers its KV cache: it is swapped to the host and back, or it is
    computed again."""

    AUTO = "auto"  # the cheaper of the two
    SWAP = "swap"
    RECOMPUTE = "recompute"


# A step counts for the prefill rate only if at least this share of its tokens are prompt tokens.
_MIN_PROMPT_SHARE = 0.75
_NUM_STEPS = 31  # number of recent steps that the estimates use
# Prompt tokens that any step may compute. With no lower bound, a prefill might never end.
_MIN_PROMPT_TOKENS = 4


class CostModel:
    """A model of one worker's speed, from measured step durations: how fast the worker computes prompts and decode
    steps, and how fast it moves KV cache blocks.

    Sizes are in bytes, rates are per second. The model reads no clock.
    """

    def __init__(self, mode: PreemptionMode, block_bytes: int, swap_bandwidth: float) -> None:
        """Create a cost model without measurements.

        `block_bytes` is the size of a KV cache block. `swap_bandwidth` is in bytes per second for each direction
        between device and host. It is 0 if there is no host memory to swap to.
        """
        self._mode = mode
        self._block_bytes = block_bytes
        self._swap_bandwidth = swap_bandwidth
        self._has_warmed_up = False
        self._steps: deque[tuple[float, int]] = deque(maxlen=_NUM_STEPS)  # (tokens per second, tokens)
        self.prefill_rate: float | None = None  # tokens per second; None until measured
        self._decode_seconds: deque[float] = deque(maxlen=_NUM_STEPS)  # of steps without prompt tokens

    def observe_step(self, num_tokens: int, num_prompt_tokens: int, duration_seconds: float) -> None:
        """Record that a step computed `num_tokens` tokens in `duration_seconds`.

        `num_prompt_tokens` of these tokens belong to prompts. The prefill rate is the median of the recent steps'
        rates, weighted by their tokens. So a few outliers do not change the rate. Small prompts hardly count: their
        steps take about as long as steps with larger prompts. The first step is left out, because a worker compiles
        kernels and allocates memory in it.
        """
        if duration_seconds <= 0 or not num_tokens:
            return
        if not num_prompt_tokens:
            self._decode_seconds.append(duration_seconds)
        if num_prompt_tokens < _MIN_PROMPT_SHARE * num_tokens:
            return
        if not self._has_warmed_up:
            self._has_warmed_up = True
            return
        self._steps.append((num_tokens / duration_seconds, num_tokens))
        self.prefill_rate = _weighted_median(sorted(self._steps))

    def max_prompt_tokens(self, slowdown: float) -> int | None:
        """Return how many prompt tokens a step may compute if the step may take at most `slowdown` times as long as a
        decode step.

        The result is at least 4. It is None until the durations of prompts and of decode steps have been measured.
        """
        if self.prefill_rate is None or not self._decode_seconds:
            return None
        return max(_MIN_PROMPT_TOKENS, int((slowdown - 1.0) * median_low(self._decode_seconds) * self.prefill_rate))

    def num_steps_in(self, seconds: float) -> int:
        """Return how many decode steps fit into a time, at least 1. It is 1 until decode steps have been measured."""
        if not self._decode_seconds:
            return 1
        return max(1, int(seconds / median_low(self._decode_seconds)))

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether a preempted request should be swapped out and in again, rather than compute its `num_tokens`
        tokens a second time.

        The result is False if there is no host memory to swap to. In mode "auto" it is True until the prefill rate has
        been measured.
        """
        if not self._swap_bandwidth or self._mode is PreemptionMode.RECOMPUTE:
            return False
        return self._mode is PreemptionMode.SWAP or self._move_is_cheaper(2 * num_blocks, num_tokens)

    def prefers_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether loading `num_blocks` cached KV blocks from the host takes less time than computing their
        `num_tokens` tokens again. The preemption mode has no effect on the result."""
        return self._swap_bandwidth > 0 and self._move_is_cheaper(num_blocks, num_tokens)

    def _move_is_cheaper(self, num_moves: int, num_tokens: int) -> bool:
        if self.prefill_rate is None:
            return True
        return num_moves * self._block_bytes / self._swap_bandwidth < num_tokens / self.prefill_rate


def _weighted_median(values: list[tuple[float, int]]) -> float:
    """Return the weighted median of a sorted list of (value, weight) pairs: the first value at which the cumulative
    weight reaches half of the total weight."""
    total = sum(weight for _, weight in values)
    reached = accumulate(weight for _, weight in values)
    return next(value for (value, _), weight in zip(values, reached, strict=True) if 2 * weight >= total)
