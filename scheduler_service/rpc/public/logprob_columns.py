"""Log-probabilities that are kept for long: a few bytes each, where objects would take hundreds."""

from array import array
from collections.abc import Iterable

from scheduler_service.core.request import TokenLogprobs


class LogprobColumns:
    """A list of positions that can be lengthened and read in slices."""

    def __init__(self) -> None:
        self._ranks = array("I")  # by position
        self._starts = array("I", [0])  # where those of each position begin below, and where the last end
        self._token_ids = array("I")  # of a position, its own token comes first
        self._logprobs = array("d")

    @property
    def num_bytes(self) -> int:
        return 8 * len(self._ranks) + 12 * len(self._token_ids)

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._ranks.append(entry.rank)
            self._token_ids.append(entry.token_id)
            self._logprobs.append(entry.logprob)
            for token_id, logprob in entry.top:
                self._token_ids.append(token_id)
                self._logprobs.append(logprob)
            self._starts.append(len(self._token_ids))

    def __getitem__(self, positions: slice) -> list[TokenLogprobs]:
        return [self._entry(position) for position in range(*positions.indices(len(self._ranks)))]

    def _entry(self, position: int) -> TokenLogprobs:
        start, end = self._starts[position], self._starts[position + 1]
        (token_id, *top_token_ids), (logprob, *top_logprobs) = self._token_ids[start:end], self._logprobs[start:end]
        top = tuple(zip(top_token_ids, top_logprobs, strict=True))
        return TokenLogprobs(token_id, logprob, self._ranks[position], top)
