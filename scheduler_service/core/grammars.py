"""The grammars of an epoch: which the worker must prepare, which it has, and which nobody needs any more."""

from enum import Enum

from scheduler_service.core.plan import AddedGrammar, Grammar

# Bytes of grammars that one plan may carry.
_MAX_PLAN_BYTES = 4 * 1024 * 1024


class GrammarState(Enum):
    """How far the worker is with a grammar."""

    UNTOLD = "untold"  # no plan has named it
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"  # those that need it end


class NeededGrammars:
    """Every grammar that a request needs has a number in the epoch, from 1, which is never given again."""

    def __init__(self) -> None:
        self._ids: dict[Grammar, int] = {}
        self._states: dict[int, GrammarState] = {}
        self._num_needing: dict[int, int] = {}  # requests
        self._released: list[int] = []  # which no plan has said
        self.last_id = 0

    def need(self, grammar: Grammar) -> bool:
        """Count a request that needs a grammar. Returns whether that is ready."""
        grammar_id = self._ids.get(grammar)
        if grammar_id is None:
            self.last_id += 1
            grammar_id = self._ids[grammar] = self.last_id
            self._states[grammar_id] = GrammarState.UNTOLD
            self._num_needing[grammar_id] = 0
        self._num_needing[grammar_id] += 1
        return self._states[grammar_id] is GrammarState.READY

    def give_up(self, grammar: Grammar) -> None:
        """A request that needed a grammar is gone. The worker forgets what nobody needs."""
        grammar_id = self._ids[grammar]
        self._num_needing[grammar_id] -= 1
        if not self._num_needing[grammar_id]:
            del self._ids[grammar], self._num_needing[grammar_id]
            if self._states.pop(grammar_id) is not GrammarState.UNTOLD:
                self._released.append(grammar_id)

    def id_of(self, grammar: Grammar) -> int:
        """The number of a grammar that somebody needs."""
        return self._ids[grammar]

    def is_ready(self, grammar: Grammar) -> bool:
        return self._states[self._ids[grammar]] is GrammarState.READY

    def num_needing(self, grammar: Grammar) -> int:
        """Count the requests that need a grammar."""
        return self._num_needing[self._ids[grammar]] if grammar in self._ids else 0

    def report(self, grammar_id: int, *, is_ready: bool) -> Grammar | None:
        """The worker has prepared a grammar, or cannot. Returns it, or None if nobody needs it any more or the worker
        has told of it before."""
        if self._states.get(grammar_id) is not GrammarState.PREPARING:
            return None
        self._states[grammar_id] = GrammarState.READY if is_ready else GrammarState.FAILED
        return next(grammar for grammar, known in self._ids.items() if known == grammar_id)

    def take_added(self) -> list[AddedGrammar]:
        """Return the grammars that the next plan names, as many as fit into it; that plan must be sent."""
        added: list[AddedGrammar] = []
        num_bytes = 0
        if self.last_id and GrammarState.UNTOLD in self._states.values():
            for grammar, grammar_id in self._ids.items():
                if self._states[grammar_id] is not GrammarState.UNTOLD:
                    continue
                num_bytes += 4 * len(grammar.text)
                if added and num_bytes > _MAX_PLAN_BYTES:
                    break
                self._states[grammar_id] = GrammarState.PREPARING
                added.append(AddedGrammar(grammar_id, grammar.kind, grammar.text, grammar.end_token_ids))
        return added

    def take_released(self) -> tuple[int, ...]:
        """Return the numbers that the next plan releases; that plan must be sent."""
        released, self._released = tuple(self._released), []
        return released
