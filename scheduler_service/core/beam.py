"""Beam search: selects the continuations that a search keeps at each step.

The result equals `_beam_search` of transformers 5.23 (`generation/utils.py`) for one prompt. Beams that transformers
keeps with a score of -1e9 are left out here. The search keeps two separate lists. *Running* beams are the best
unfinished continuations. The candidates are ordered by cumulative log-probability, and the first `beam_width` of them
that do not finish become the running beams. *Finished* hypotheses are the candidates among the first `beam_width` that
finish, by a stop token or at the last token allowed. The `beam_width` finished hypotheses with the best score are kept.
Score: cumulative log-probability / number of tokens ** length penalty. The stop token counts as a token.

This module works on tokens and numbers only. It does not depend on blocks or on the scheduler's sequences.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from scheduler_service.core.request import BeamParams, EarlyStopping

_MAX_EXPONENT = 700.0  # exp overflows at 709.8


@dataclass(frozen=True, slots=True)
class BeamState:
    """The state of one beam in a beam search: its output tokens so far, and their cumulative log-probability."""

    cumulative_logprob: float
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Child:
    """A beam of the next step: one of the current beams, extended by one token. `parent` is the index of the current
    beam."""

    parent: int
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The result of one step of a beam search: the beams with which the search continues, best first.

    If `is_done` is true, the search has ended, and the caller ignores `children`.
    """

    children: list[Child]
    is_done: bool


@dataclass(frozen=True, slots=True)
class FinishedHypothesis:
    """A finished output of a beam search. At the end, the search returns the finished outputs with the best scores."""

    token_ids: tuple[int, ...]  # includes the stop token
    cumulative_logprob: float
    score: float
    stop_token_id: int | None  # None: the output ended at the token limit


class BeamSearch:
    """A beam search over one prompt. It does not run the model: the worker reports candidate tokens, and the search
    chooses the best beams among them.

    Call `advance` with the candidates of every step until the search is done. Then call `best`.
    """

    def __init__(
        self,
        params: BeamParams,
        stop_token_ids: frozenset[int],
        min_tokens: int,
        max_output_tokens: int,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Create a search with at most `max_output_tokens` output tokens.

        An output of fewer than `min_tokens` tokens cannot end: the search ignores candidates that are stop tokens
        there, even if the worker reports them. `end_token_ids` are the end tokens of a grammar, and they are a subset
        of the stop tokens. With a grammar, its end tokens end an output at any length. The other stop tokens then do
        not end an output below `min_tokens`, but continue it.
        """
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._max_output_tokens = max_output_tokens
        self._finished: list[FinishedHypothesis] = []  # best first, at most beam_width

    def advance(self, beams: Sequence[BeamState], candidates: Sequence[Sequence[tuple[int, float]]]) -> BeamStep:
        """Choose the running beams of the next step.

        `beams` are the children of the last step, in the same order. The first step has one beam with no output.
        `candidates[i]` are the most likely (token id, log-probability) pairs after beam i, best first. A list of
        `beam_width + len(stop_token_ids)` candidates is enough, or the whole vocabulary if it is smaller. Candidates of
        equal cumulative log-probability rank by beam, then in the given order.
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
        """Return the `n` finished hypotheses with the best scores, best first.

        A search that is done normally has `beam_width` hypotheses. It may have fewer if the vocabulary without the stop
        tokens is smaller than the beam width. The result may then be shorter than `n`.
        """
        return self._finished[:n]

    def _ranked(
        self, beams: Sequence[BeamState], candidates: Sequence[Sequence[tuple[int, float]]], num_tokens: int
    ) -> Iterator[tuple[float, int, int]]:
        """Iterate over the candidate tokens of all beams, best first, as (negated cumulative log-probability, index of
        the parent beam, token id)."""
        # For a row with a grammar, the worker reports stop tokens here only if the grammar allows no other token.
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
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of two equals the older stays first
        del self._finished[self._params.beam_width :]

    def _cannot_improve(self, best_running: float, num_tokens: int) -> bool:
        """Return whether the beam search should end now, because no running beam can still beat the finished hypotheses
        under the request's `early_stopping` rule.

        `best_running` is the best cumulative log-probability of the running beams.
        """
        params = self._params
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is EarlyStopping.FIRST:
            return True
        longest = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
        length = self._max_output_tokens if longest else num_tokens
        return self._score(best_running, length) <= self._finished[-1].score

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """Return the score of an output: its cumulative log-probability divided by num_tokens ** length_penalty.

        The penalty may be any finite number. The exponent of the computation is limited, because the power could
        overflow.
        """
        exponent = -self._params.length_penalty * math.log(num_tokens)
        return cumulative_logprob * math.exp(min(exponent, _MAX_EXPONENT))
