"""Grammars defined by a few numbers.

The tokens that they allow are a function of these numbers and of the tokens so far. The text of a grammar is "seed
length fault step". Outputs have at most `length` tokens before the end token. With the fault "unreadable" the grammar
cannot be read. With "deadly" the process that reads the grammar must crash. With "failed", "dead_end" or "limit" an
output gets no token from position `step` on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pagewire.common.wire.messages import RowStatus, SamplingParams

_FAULTS = {
    "failed": RowStatus.GRAMMAR_FAILED,
    "dead_end": RowStatus.GRAMMAR_DEAD_END,
    "limit": RowStatus.GRAMMAR_LIMIT,
}


@dataclass(slots=True)
class ToyMatcher:
    """The state of a grammar after the tokens of one output."""

    state: int
    length: int
    fault: str
    fault_step: int
    end_token_ids: tuple[int, ...]
    vocab_size: int
    num_tokens: int = 0
    end_token_id: int | None = None

    def copy(self) -> "ToyMatcher":
        return replace(self)

    def consume(self, token_ids: Iterable[int]) -> None:
        """Advance the state by the tokens. Tokens after the first end token are ignored."""
        for token_id in token_ids:
            if self.end_token_id is not None:
                return
            assert token_id in self.allowed(), f"the grammar does not allow {token_id} at {self.num_tokens}"
            self.state = hash((self.state, token_id))
            self.num_tokens += 1
            if token_id in self.end_token_ids:
                self.end_token_id = token_id

    def allowed(self) -> list[int]:
        """Return the tokens that may come next, in rising order.

        Sometimes it is only one token, and sometimes only the end tokens.
        """
        if self.end_token_id is not None:
            return [self.end_token_id]
        kind = hash((self.state, 3)) % 12
        if self.num_tokens >= self.length or kind == 0:
            return list(self.end_token_ids)
        num = 1 if kind == 1 else 1 + hash((self.state, 4)) % 6
        found = {hash((self.state, 5, i)) % (self.vocab_size - 1) for i in range(num)}
        if kind < 4:
            found.update(self.end_token_ids)
        return sorted(found)

    @property
    def status(self) -> RowStatus:
        """The status of a row that samples now."""
        fails = self.end_token_id is None and self.num_tokens >= self.fault_step
        return _FAULTS.get(self.fault, RowStatus.OK) if fails else RowStatus.OK


def read(text: str, end_token_ids: tuple[int, ...], vocab_size: int) -> ToyMatcher:
    """Return the matcher of a grammar before any token."""
    seed, length, fault, step = text.split()
    return ToyMatcher(hash((int(seed), 7)), int(length), fault, int(step), end_token_ids, vocab_size)


def is_deadly(text: str) -> bool:
    """Return whether the process that reads the grammar must crash."""
    return text.split()[2] == "deadly"


def is_readable(text: str) -> bool:
    return text.split()[2] != "unreadable"


def constrained_token(matcher: ToyMatcher, sampling: SamplingParams, prefix: int, seed: int, index: int) -> int:
    """Return the token that a row samples, one of the allowed tokens.

    Below `min_tokens` it is not a stop token, unless only stop tokens are allowed.
    """
    allowed = matcher.allowed()
    if matcher.num_tokens < sampling.min_tokens:
        allowed = [token_id for token_id in allowed if token_id not in sampling.stop_token_ids] or allowed
    return allowed[hash((prefix, seed, index)) % len(allowed)]


def constrained_candidates(
    matcher: ToyMatcher, sampling: SamplingParams, entries: list[tuple[int, float]], num: int
) -> list[tuple[int, float]]:
    """Return the `num` most likely entries that the grammar allows, or fewer if fewer are allowed."""
    allowed = matcher.allowed()
    if matcher.num_tokens < sampling.min_tokens:
        allowed = [token_id for token_id in allowed if token_id not in sampling.stop_token_ids] or allowed
    return [entry for entry in entries if entry[0] in allowed][:num]
