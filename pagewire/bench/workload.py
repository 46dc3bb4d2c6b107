"""Draws random requests. It is pure: everything follows from the seed."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A range of lengths in tokens, both ends included, all equally likely."""

    min: int
    max: int

    @classmethod
    def around(cls, length: int, ratio: float) -> "LengthRange":
        """Returns the range from length * (1 - ratio) to length * (1 + ratio), rounded outwards but to at least 1.

        Source: vLLM's random dataset.
        """
        # 160 * 1.6 must be 256, whatever the last bit of the product says.
        low, high = round(length * (1 - ratio), 6), round(length * (1 + ratio), 6)
        return cls(max(1, math.floor(low)), max(1, math.ceil(high)))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.min, self.max)


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes the requests to send. Lengths are in tokens and `input_len` comes after the `prefix_len` that all
    prompts share."""

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
        """Returns the requests. Lengths and tokens are drawn independently."""
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
    """A request. `seed` is that of its sampling."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    seed: int
