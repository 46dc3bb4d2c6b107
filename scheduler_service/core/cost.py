"""Measured costs in seconds: a swap's bytes against a recomputation's tokens, and a prompt's tokens to those who decode
beside it."""

from collections import deque
from enum import StrEnum
from itertools import accumulate
from statistics import median_low


class PreemptionMode(StrEnum):
    """How the blocks of a victim come back."""

    AUTO = "auto"  # whichever is cheaper
    SWAP = "swap"
    RECOMPUTE = "recompute"


# Steps that tell the prefill rate: most of their tokens are of prompts.
_MIN_PROMPT_SHARE = 0.75
_NUM_STEPS = 31  # the estimates look back on so many
# Tokens of prompts that any step may compute: with less, prompts would never end.
_MIN_PROMPT_TOKENS = 4


class CostModel:
    """The measured costs of one worker. Sizes are in bytes, rates per second; it knows no time but that of the steps it
    is told of."""

    def __init__(self, mode: PreemptionMode, block_bytes: int, swap_bandwidth: float) -> None:
        """`swap_bandwidth`: bytes per second each way, 0 where there is nowhere to swap to."""
        self._mode = mode
        self._block_bytes = block_bytes
        self._swap_bandwidth = swap_bandwidth
        self._has_warmed_up = False
        self._steps: deque[tuple[float, int]] = deque(maxlen=_NUM_STEPS)  # (tokens per second, tokens)
        self.prefill_rate: float | None = None  # tokens per second; None until it is known
        self._decode_seconds: deque[float] = deque(maxlen=_NUM_STEPS)  # of steps that only decoded

    def observe_step(self, num_tokens: int, num_prompt_tokens: int, duration_seconds: float) -> None:
        """A step took `duration_seconds` for `num_tokens`, of them `num_prompt_tokens` of prompts.

        The rate is the median of the last steps' rates, weighted by their tokens: a few outliers do not move it, and
        small prompts, whose steps cost about as much as larger ones, hardly count. The first step, in which a worker
        compiles and allocates, is left out.
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
        """Count the tokens of prompts that make a step take at most `slowdown` times as long as one that only decodes.

        They are at least 4. None while that is not known.
        """
        if self.prefill_rate is None or not self._decode_seconds:
            return None
        return max(_MIN_PROMPT_TOKENS, int((slowdown - 1.0) * median_low(self._decode_seconds) * self.prefill_rate))

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to move a victim's blocks out and in again rather than compute its `num_tokens` anew.

        Never where there is nowhere to swap to. While the prefill rate is unknown, "auto" swaps.
        """
        if not self._swap_bandwidth or self._mode is PreemptionMode.RECOMPUTE:
            return False
        return self._mode is PreemptionMode.SWAP or self._move_is_cheaper(2 * num_blocks, num_tokens)

    def prefers_load(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to move cached blocks in rather than compute their `num_tokens`. The mode binds preemption only."""
        return self._swap_bandwidth > 0 and self._move_is_cheaper(num_blocks, num_tokens)

    def _move_is_cheaper(self, num_moves: int, num_tokens: int) -> bool:
        if self.prefill_rate is None:
            return True
        return num_moves * self._block_bytes / self._swap_bandwidth < num_tokens / self.prefill_rate


def _weighted_median(values: list[tuple[float, int]]) -> float:
    """Find the first value at which half of the weight is reached, in a sorted list of (value, weight)."""
    total = sum(weight for _, weight in values)
    reached = accumulate(weight for _, weight in values)
    return next(value for (value, _), weight in zip(values, reached, strict=True) if 2 * weight >= total)
