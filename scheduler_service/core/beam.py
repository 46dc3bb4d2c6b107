"""The choice among the continuations of a beam search.

It equals `_beam_search` of transformers 5.23 (`generation/utils.py`) for one prompt, with the beams that transformers
keeps at -1e9 left out. Two lists are kept apart. *Running* beams are the best continuations that go on: among the
candidates in order of their cumulative log-probability, the first `beam_width` that do not finish. *Finished*
hypotheses are the candidates among the first `beam_width` that finish, by a stop token or at the last token allowed;
the `beam_width` of the best score are kept. Score: cumulative log-probability / number of tokens ** length penalty,
the stop token counted.

It knows tokens and numbers only, no blocks and no sequences.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from scheduler_service.core.request import BeamParams, EarlyStopping

_MAX_EXPONENT = 700.0  # exp overflows at 709.8


@dataclass(frozen=True, slots=True)
class BeamState:
    """A beam that runs: its output so far, and how likely that is."""

    cumulative_logprob: float
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Child:
    """A beam of the next step: the beam at `parent`, and one more token."""

    parent: int
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The outcome of one step of a beam search: the next beams, best first. None of them is needed once the search is
    done."""

    children: list[Child]
    is_done: bool


@dataclass(frozen=True, slots=True)
class FinishedHypothesis:
    """An output that a search may return."""

    token_ids: tuple[int, ...]  # with the stop token
    cumulative_logprob: float
    score: float
    stop_token_id: int | None  # None: it ended at the last token allowed


class BeamSearch:
    """A search from its prompt to its hypotheses. Give every step's candidates to `advance` until it is done, then take
    `best`."""

    def __init__(
        self,
        params: BeamParams,
        stop_token_ids: frozenset[int],
        min_tokens: int,
        max_output_tokens: int,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Below `min_tokens` no output ends: stop tokens are no candidates there, whatever the worker says. With a
        grammar, whose `end_token_ids` are among the stop tokens, these end an output there too, and other stop tokens
        go on."""
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._max_output_tokens = max_output_tokens
        self._finished: list[FinishedHypothesis] = []  # best first, at most beam_width

    def advance(self, beams: Sequence[BeamState], candidates: Sequence[Sequence[tuple[int, float]]]) -> BeamStep:
        """Choose the next beams.

        `beams` are those of the last step's children, in their order; the first step has one, with no output.
        `candidates[i]` are the most likely (token id, log-probability) after beam i, best first. Any
        `beam_width + len(stop_token_ids)` of them are enough, or the whole vocabulary where that is smaller.
        Candidates of equal cumulative log-probability rank by beam, then as given.
        """
        width = self._params.beam_width
        num_tokens = len(beams[0].output_token_ids) + 1
        children: list[Child] = []
        for rank, (loss, parent, token_id) in enumerate(self._ranked(beams, candidates, num_tokens)):
            stops = token_id in (self._stop_token_ids if num_tokens > self._min_tokens else self._end_token_ids)
            if stops or num_tokens >= self._max_output_tokens:
                if rank < width:
                    self._finish(beams[parent], token_id, -loss, stops)
            elif len(children) < width:
                children.append(Child(parent, token_id, -loss))
            if rank + 1 >= width and (len(children) == width or num_tokens >= self._max_output_tokens):
                break
        return BeamStep(children, not children or self._cannot_improve(children[0].cumulative_logprob, num_tokens))

    def best(self, n: int) -> list[FinishedHypothesis]:
        """The n hypotheses of the best score, best first.

        A search that is done has `beam_width` of them, unless the vocabulary (less the stop tokens) is smaller than
        the beam: then fewer may exist, and fewer are returned.
        """
        return self._finished[:n]

    def _ranked(
        self, beams: Sequence[BeamState], candidates: Sequence[Sequence[tuple[int, float]]], num_tokens: int
    ) -> Iterator[tuple[float, int, int]]:
        """Merge the candidates of all beams, best first: (negated cumulative log-probability, parent, token id)."""
        # A worker names stop tokens of a row with a grammar there only if that allows no others.
        barred = self._stop_token_ids if num_tokens <= self._min_tokens and not self._end_token_ids else frozenset()
        columns = [
            [
                (-(beam.cumulative_logprob + logprob), parent, token_id)
                for token_id, logprob in entries
                if logprob > -math.inf and token_id not in barred
            ]
            for parent, (beam, entries) in enumerate(zip(beams, candidates, strict=True))
        ]
        return merge(*columns)

    def _finish(self, beam: BeamState, token_id: int, cumulative_logprob: float, stops: bool) -> None:
        token_ids = (*beam.output_token_ids, token_id)
        score = self._score(cumulative_logprob, len(token_ids))
        self._finished.append(FinishedHypothesis(token_ids, cumulative_logprob, score, token_id if stops else None))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the older of two equals stays first
        del self._finished[self._params.beam_width :]

    def _cannot_improve(self, best_running: float, num_tokens: int) -> bool:
        """Whether the search ends though beams still run; `best_running` is their best cumulative log-probability."""
        params = self._params
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is EarlyStopping.FIRST:
            return True
        longest = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
        length = self._max_output_tokens if longest else num_tokens
        return self._score(best_running, length) <= self._finished[-1].score

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """Divide by num_tokens ** length_penalty, for any finite penalty: the power itself may overflow."""
        exponent = -self._params.length_penalty * math.log(num_tokens)
        return cumulative_logprob * math.exp(min(exponent, _MAX_EXPONENT))
