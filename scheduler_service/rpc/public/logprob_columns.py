"""Log-probabilities that are kept for long: a few bytes each, where objects would take hundreds."""

from array import array
from collections.abc import Sequence

from scheduler_service.core.request import TokenLogprobs


class LogprobColumns:
    """A list of positions, each with its token and its most likely ones, that can be lengthened and read in slices."""

    def __init__(self) -> None:
        self._token_ids = array("I")
        self._logprobs = array("d")
        self._ranks = array("I")
        self._top_token_ids = array("I")
        self._top_logprobs = array("d")
        self._top_ends = array("I", [0])  # where the most likely tokens of each position end in these two

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        return 20 * len(self._token_ids) + 12 * len(self._top_token_ids)

    def extend(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            self._token_ids.append(entry.token_id)
            self._logprobs.append(entry.logprob)
            self._ranks.append(entry.rank)
            for token_id, logprob in entry.top:
                self._top_token_ids.append(token_id)
                self._top_logprobs.append(logprob)
            self._top_ends.append(len(self._top_token_ids))

    def __getitem__(self, positions: slice) -> list[TokenLogprobs]:
        return [self._entry(position) for position in range(*positions.indices(len(self)))]

    def _entry(self, position: int) -> TokenLogprobs:
        start, end = self._top_ends[position], self._top_ends[position + 1]
        top = tuple(zip(self._top_token_ids[start:end], self._top_logprobs[start:end], strict=True))
        return TokenLogprobs(self._token_ids[position], self._logprobs[position], self._ranks[position], top)
