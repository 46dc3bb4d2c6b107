"""The number of KV cache blocks that requests need, from their lengths and the model's sliding windows."""

from collections.abc import Sequence
from dataclasses import dataclass

from testing.serving.received import Received
from tests.fuzz.drawn_request import DrawnRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a request in tokens, and the number of its rows: its samples or its beams.

    `max_output` is the length that admission counts; `num_output` is the length that one row really reaches.
    """

    num_prompt: int
    num_output: int
    max_output: int
    num_rows: int

    @classmethod
    def of(cls, request: DrawnRequest, num_prompt: int, received: Received) -> "Lengths":
        """Return the lengths of a request whose whole output is `received`."""
        if request.is_embedding or not received.samples:
            return cls(num_prompt, 0, 0, 1)
        sampling = request.arguments["sampling"]
        num_output = max(len(sample.token_ids) for sample in received.samples.values())
        return cls(num_prompt, num_output, sampling.options["max_tokens"], request.num_rows)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a worker's KV cache.

    Attributes:
        block_size: tokens per block.
        windows: the sliding window of each layer group, in tokens; 0: none.
        chunk: the largest number of tokens that one step computes.
        max_rows: the largest number of rows that run at once.
        has_states: whether the model has states besides K and V.
    """

    block_size: int
    windows: tuple[int, ...]
    chunk: int
    max_rows: int
    has_states: bool = False

    def num_blocks(self, request: Lengths, num_output: int) -> int:
        """Return how many blocks a request needs at most at one time if each row has `num_output` tokens of output.

        The rows share the full blocks of the prompt. In a layer group with a window, a row needs no more blocks than
        it reads and writes in one step.
        """
        num_tokens = request.num_prompt + num_output
        # Beams may share nothing if a window has passed the prompt, or if the state after the prompt is lost.
        shares = request.num_rows > 1 and not any(self.windows) and not self.has_states
        num_shared = request.num_prompt // self.block_size if shares else 0
        num_copies = int(request.num_rows > 1)  # a beam may need one more block for a copy
        num_own = -(-num_tokens // self.block_size) - num_shared + num_copies
        total = 0
        for window in self.windows:
            num_full = num_shared + request.num_rows * num_own
            in_window = (window + self.chunk + self.block_size - 3) // self.block_size + 1 + num_copies
            total += min(num_full, request.num_rows * in_window) if window else num_full
        return total

    def num_needed(self, requests: Sequence[Lengths], num_at_once: int) -> int:
        """Return how many blocks `num_at_once` average requests need, but no more requests than have rows at once."""
        rows = sum(request.num_rows for request in requests) / len(requests)
        blocks = sum(self.num_blocks(request, request.num_output) for request in requests) / len(requests)
        return round(blocks * min(num_at_once, self.max_rows / rows))

    def num_device_blocks(self, requests: Sequence[Lengths], num_at_once: int, share: float) -> int:
        """Return the given share of `num_needed`, but enough blocks for each request alone."""
        largest = max(self.num_blocks(request, request.max_output) for request in requests)
        return max(largest, round(share * self.num_needed(requests, num_at_once)))
