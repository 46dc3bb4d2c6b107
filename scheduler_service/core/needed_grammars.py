"""The grammars of an epoch: which the worker must prepare, which it has, and which are needed no more."""

from collections.abc import Callable
from dataclasses import dataclass

from pagewire.common.wire.messages import AddedGrammar
from scheduler_service.core.request import Grammar

# Bytes of grammars that one plan may carry.
_MAX_PLAN_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _Need:
    """A grammar that requests need."""

    num_requests: int = 0
    grammar_id: int = 0  # from the plan on that names it
    is_ready: bool = False  # a worker that cannot prepare it ends those that need it


class NeededGrammars:
    """Every grammar that a plan names has a number in the epoch, from 1, rising, which is never given again. Where
    nothing `prepares` grammars, nobody waits for one."""

    def __init__(self, *, prepares: bool) -> None:
        self._prepares = prepares
        self._needs: dict[Grammar, _Need] = {}
        self._released: list[int] = []  # which no plan has said
        self._num_untold = 0
        self.last_id = 0

    def need(self, grammar: Grammar) -> bool:
        """Count a request that needs a grammar. Returns whether that is ready."""
        need = self._needs.get(grammar)
        if need is None:
            need = self._needs[grammar] = _Need(is_ready=not self._prepares)
            self._num_untold += 1
        need.num_requests += 1
        return need.is_ready

    def give_up(self, grammar: Grammar) -> None:
        """A request that needed a grammar is gone. The worker forgets what is not needed."""
        need = self._needs[grammar]
        need.num_requests -= 1
        if not need.num_requests:
            del self._needs[grammar]
            if need.grammar_id:
                self._released.append(need.grammar_id)
            else:
                self._num_untold -= 1

    def id_of(self, grammar: Grammar) -> int:
        """The number of a grammar that is needed; 0: no plan has named it."""
        return self._needs[grammar].grammar_id

    def is_ready(self, grammar: Grammar) -> bool:
        return self._needs[grammar].is_ready

    def is_preparing(self, grammar: Grammar | None) -> bool:
        """Whether the worker has been told of a grammar that is needed, and has not told what came of it."""
        return grammar is not None and self.id_of(grammar) > 0 and not self.is_ready(grammar)

    def report(self, grammar_id: int, *, is_ready: bool) -> Grammar | None:
        """The worker has prepared a grammar, or cannot. Returns it, or None if it is not needed any more or the worker
        has told of it before."""
        for grammar, need in self._needs.items():
            if need.grammar_id == grammar_id and not need.is_ready:
                need.is_ready = is_ready
                return grammar
        return None

    def take_added(self, admits: Callable[[Grammar], bool]) -> list[AddedGrammar]:
        """Return the grammars that the next plan names, as many as fit into it; that plan must be sent. `admits`:
        whether one may be named now."""
        added: list[AddedGrammar] = []
        num_bytes = 0
        if self._num_untold:
            for grammar, need in self._needs.items():
                if need.grammar_id or not admits(grammar):
                    continue
                num_bytes += 4 * len(grammar.text)
                if added and num_bytes > _MAX_PLAN_BYTES:
                    break
                self.last_id += 1
                need.grammar_id = self.last_id
                added.append(AddedGrammar(self.last_id, grammar.kind, grammar.text, grammar.end_token_ids))
            self._num_untold -= len(added)
        return added

    def take_released(self) -> list[int]:
        """Return the numbers that the next plan releases; that plan must be sent."""
        released, self._released = self._released, []
        return released
