"""The numbers that requests may choose of how their tokens are sampled: one table, by their names in the public proto.

Requests and generation_config.json are checked against it. Where neither says anything, `API_DEFAULTS` holds.
"""

import math
from dataclasses import dataclass

from scheduler_service.core.plan import SamplingParams

MAX_SAMPLES = 16
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 16


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """Which values are legal, from `low` to `high`."""

    low: int
    high: float = math.inf
    excludes_low: bool = False
    is_filter: bool = False  # of a random choice; a beam search makes none, and takes the value that turns it off
    is_checkpoints: bool = False  # generation_config.json may say what requests mean that leave it unset

    def holds(self, value: float) -> bool:
        """Whether a value is legal, which NaN never is."""
        return self.low <= value <= self.high and not (self.excludes_low and value == self.low)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low}"
        return f"above {self.low} and at most {self.high}" if self.excludes_low else f"{self.low} to {self.high}"


SAMPLING_OPTIONS = {
    "n": SamplingOption(1, MAX_SAMPLES),
    "temperature": SamplingOption(0, 100, is_filter=True, is_checkpoints=True),
    "top_k": SamplingOption(0, 2**32 - 1, is_filter=True, is_checkpoints=True),
    "top_p": SamplingOption(0, 1, excludes_low=True, is_filter=True, is_checkpoints=True),
    "min_p": SamplingOption(0, 1, is_filter=True, is_checkpoints=True),
    "presence_penalty": SamplingOption(-2, 2),
    "frequency_penalty": SamplingOption(-2, 2),
    "repetition_penalty": SamplingOption(0, 100, excludes_low=True, is_checkpoints=True),
    "max_tokens": SamplingOption(1),
    "logprobs": SamplingOption(0, MAX_LOGPROBS),
    "prompt_logprobs": SamplingOption(0, MAX_LOGPROBS),
    "beam_width": SamplingOption(1, MAX_BEAM_WIDTH),
}
API_DEFAULTS = SamplingParams(temperature=1.0)
# By name, the values that turn filters off.
FILTERS_OFF = {name: getattr(SamplingParams(), name) for name, option in SAMPLING_OPTIONS.items() if option.is_filter}
