"""Log-probabilities as columns of numbers: a few bytes each, where objects would take hundreds."""

from array import array
from collections.abc import Iterable, Iterator

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import TokenLogprobs


class LogprobColumns:
    """Positions in order, each with its token, that token's rank, and the most likely tokens."""

    def __init__(self) -> None:
        self._ranks = array("I")  # by position
        self._starts = array(
            "I", [0]
        )  # where those of each position begin below, and where the last end
        self._token_ids = array("I")  # of a position, its own token comes first
        self._logprobs = array("d")

    def __len__(self) -> int:
        return len(self._ranks)

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

    def clear(self) -> None:
        del self._ranks[:], self._starts[1:], self._token_ids[:], self._logprobs[:]

    def messages(self, start: int, stop: int) -> Iterator[scheduler_pb2.TokenLogprobs]:
        """Those of positions [start, stop), as far as there are some."""
        for position in range(start, min(stop, len(self))):
            first, end = self._starts[position], self._starts[position + 1]
            top = zip(self._token_ids[first + 1 : end], self._logprobs[first + 1 : end], strict=True)
            yield scheduler_pb2.TokenLogprobs(
                token_id=self._token_ids[first],
                logprob=self._logprobs[first],
                rank=self._ranks[position],
                top=[scheduler_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top],
            )
