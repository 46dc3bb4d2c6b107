"""Draws random requests and the times to send them at. It is pure: everything follows from the seed."""

import math
import random
from dataclasses import dataclass
from itertools import accumulate


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
    prompts share.

    `request_rate` is in requests per second; infinite sends all at once. `burstiness` 1 is a Poisson process, infinite
    a fixed rate, and any value between draws the gaps from a gamma distribution of that shape.
    """

    num_prompts: int
    input_len: LengthRange
    output_len: LengthRange
    prefix_len: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0

    @property
    def max_prompt_len(self) -> int:
        return self.prefix_len + self.input_len.max

    @property
    def max_sequence_len(self) -> int:
        return self.max_prompt_len + self.output_len.max

    def requests(self, vocab_size: int) -> list["PlannedRequest"]:
        """Returns the requests in the order of their times. Lengths, tokens and times are drawn independently."""
        lengths, tokens = (random.Random(f"{self.seed} {name}") for name in ("lengths", "tokens"))
        token_ids = range(vocab_size)
        prefix = tuple(tokens.choices(token_ids, k=self.prefix_len))
        planned = []
        for index, send_at in enumerate(self.times()):
            num_prompt_tokens, num_output_tokens = self.input_len.draw(lengths), self.output_len.draw(lengths)
            prompt = (*prefix, *tokens.choices(token_ids, k=num_prompt_tokens))
            planned.append(PlannedRequest(prompt, num_output_tokens, send_at, seed=self.seed + index))
        return planned

    def times(self) -> list[float]:
        """Returns when to send each request, in seconds from the start of the run."""
        rng = random.Random(f"{self.seed} times")
        return arrival_times(self.num_prompts, self.request_rate, self.burstiness, rng)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request. `send_at` is in seconds from the start of the run; `seed` is that of its sampling.

    The prompt is token ids, or a `text` and its tokens as far as they are known before the server counts them.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    send_at: float
    seed: int
    text: str | None = None
    num_text_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) if self.text is None else self.num_text_tokens


def arrival_times(num_requests: int, request_rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Returns when to send each request, in seconds from the start of the run.

    The times are scaled so that the last is num_requests / request_rate: runs of different seeds offer the same load.
    Source: vLLM's `get_request`.
    """
    if math.isinf(request_rate):
        return [0.0] * num_requests
    times = list(accumulate(_gap(request_rate, burstiness, rng) for _ in range(num_requests)))
    scale = num_requests / request_rate / times[-1]
    return [time * scale for time in times]


def _gap(request_rate: float, burstiness: float, rng: random.Random) -> float:
    if math.isinf(burstiness):
        return 1 / request_rate
    return rng.gammavariate(burstiness, 1 / (request_rate * burstiness))
