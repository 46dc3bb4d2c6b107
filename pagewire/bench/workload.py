"""Random workloads. All functions are pure: the seed determines every request."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A range of prompt or output lengths in tokens, with both ends included. All lengths are equally likely."""

    min: int
    max: int

    @classmethod
    def around(cls, length: int, ratio: float) -> "LengthRange":
        """Return the range of lengths from length * (1 - ratio) to length * (1 + ratio), rounded outwards and at least
        1.

        Source: vLLM's random dataset.
        """
        # 160 * 1.6 must give 256 in spite of floating-point rounding.
        low, high = round(length * (1 - ratio), 6), round(length * (1 + ratio), 6)
        return cls(max(1, math.floor(low)), max(1, math.ceil(high)))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.min, self.max)


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of a random benchmark workload. Lengths are in tokens.

    Each prompt is a common prefix of `prefix_len` tokens, followed by `input_len` random tokens.
    """

    num_prompts: int
    input_len: LengthRange
    output_len: LengthRange
    prefix_len: int = 0
    seed: int = 0

    @property
    def max_prompt_len(self) -> int:
        return self.prefix_len + self.input_len.max

    @property
    def max_sequence_len(self) -> int:
        return self.max_prompt_len + self.output_len.max

    def requests(self, vocab_size: int) -> list["PlannedRequest"]:
        """Draw the random requests of the workload. Lengths and tokens come from independent random sequences."""
        lengths, tokens = (random.Random(f"{self.seed} {name}") for name in ("lengths", "tokens"))
        token_ids = range(vocab_size)
        prefix = tuple(tokens.choices(token_ids, k=self.prefix_len))
        planned = []
        for index in range(self.num_prompts):
            num_prompt_tokens, num_output_tokens = self.input_len.draw(lengths), self.output_len.draw(lengths)
            prompt = (*prefix, *tokens.choices(token_ids, k=num_prompt_tokens))
            planned.append(PlannedRequest(prompt, num_output_tokens, seed=self.seed + index))
        return planned


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that a benchmark is going to send. `seed` is the random seed for sampling the output tokens."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    seed: int
