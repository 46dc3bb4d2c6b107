"""The numbers that requests may choose of how their tokens are sampled, by their names in the public proto.

`SamplingParams`, requests on the wire and generation_config.json are checked against this one table.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Which values are legal, from `low` to `high`."""

    low: int
    high: float = math.inf
    excludes_low: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is legal, which NaN never is."""
        return self.low <= value <= self.high and not (self.excludes_low and value == self.low)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low}"
        return f"above {self.low} and at most {self.high}" if self.excludes_low else f"{self.low} to {self.high}"


MAX_SAMPLES = 16
UINT32, UINT64 = Range(0, 2**32 - 1), Range(0, 2**64 - 1)
LOGPROBS = Range(0, 20)
LOGIT_BIAS = Range(-100, 100)
RANGES = {
    "n": Range(1, MAX_SAMPLES),
    "temperature": Range(0, 100),
    "top_k": UINT32,
    "top_p": Range(0, 1, excludes_low=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, excludes_low=True),
    "max_tokens": Range(1),
    "min_tokens": UINT32,
    "seed": UINT64,
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "beam_width": Range(1, 16),
}
