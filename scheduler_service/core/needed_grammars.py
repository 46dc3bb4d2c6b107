"""The grammars of one epoch: those that the worker must prepare, has prepared, or may release."""

from collections.abc import Callable
from dataclasses import dataclass

from pagewire.common.wire.messages import AddedGrammar
from scheduler_service.core.request import Grammar

# The limit on the bytes of grammars in one plan. The first grammar of a plan may exceed it.
_MAX_PLAN_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _Need:
    """The record of a grammar that at least one unfinished request needs."""

    num_requests: int = 0
    grammar_id: int = 0  # 0 until a plan contains the grammar
    is_ready: bool = False  # if the worker cannot prepare it, its requests end


class NeededGrammars:
    """The grammars that unfinished requests need, and the id by which plans refer to each grammar.

    A grammar gets its id when it is first sent to the worker. Ids start at 1, rise, and are never reused within the
    epoch. If `prepares` is false, because no worker is connected, every grammar counts as ready at once.
    """

    def __init__(self, *, prepares: bool) -> None:
        self._prepares = prepares
        self._needs: dict[Grammar, _Need] = {}
        self.released: list[int] = []  # which no plan has said
        self.num_unreported = 0  # that are needed, and named by no plan
        self.last_id = 0

    def need(self, grammar: Grammar) -> bool:
        """Count one more request that needs a grammar. Return whether the worker has prepared the grammar already."""
        need = self._needs.get(grammar)
        if need is None:
            need = self._needs[grammar] = _Need(is_ready=not self._prepares)
            self.num_unreported += 1
        need.num_requests += 1
        return need.is_ready

    def give_up(self, grammar: Grammar) -> None:
        """Count one request less that needs a grammar. A later plan makes the worker release a grammar that no request
        needs."""
        need = self._needs[grammar]
        need.num_requests -= 1
        if not need.num_requests:
            del self._needs[grammar]
            if need.grammar_id:
                self.released.append(need.grammar_id)
            else:
                self.num_unreported -= 1

    def id_of(self, grammar: Grammar) -> int:
        """Return the id by which plans refer to a grammar, or 0 if the grammar has not been sent to the worker yet."""
        return self._needs[grammar].grammar_id

    def is_ready(self, grammar: Grammar) -> bool:
        return self._needs[grammar].is_ready

    def is_preparing(self, grammar: Grammar | None) -> bool:
        """Return whether the worker is preparing a grammar now: a plan has sent the grammar, and the worker has not
        reported that it is ready."""
        return grammar is not None and self.id_of(grammar) > 0 and not self.is_ready(grammar)

    def report(self, grammar_id: int, *, is_ready: bool) -> Grammar | None:
        """Record the worker's report that it has prepared a grammar, or has failed to prepare it.

        Return the grammar, or None if no request needs the grammar any more or the grammar is ready already.
        """
        for grammar, need in self._needs.items():
            if need.grammar_id == grammar_id and not need.is_ready:
                need.is_ready = is_ready
                return grammar
        return None

    def take_added(self, admits: Callable[[Grammar], bool]) -> list[AddedGrammar]:
        """Return the grammars that the next plan sends to the worker, up to the byte limit.

        The caller must send that plan. `admits` returns whether a grammar may be sent now.
        """
        added: list[AddedGrammar] = []
        num_bytes = 0
        for grammar, need in self._needs.items():
            if need.grammar_id or not admits(grammar):
                continue
            num_bytes += 4 * len(grammar.text)
            if added and num_bytes > _MAX_PLAN_BYTES:
                break
            self.last_id += 1
            need.grammar_id = self.last_id
            added.append(AddedGrammar(self.last_id, grammar.kind, grammar.text, grammar.end_token_ids))
        self.num_unreported -= len(added)
        return added
