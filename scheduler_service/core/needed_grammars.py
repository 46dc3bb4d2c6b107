"""The grammars of one epoch: those that the worker must prepare, has prepared, or may release."""

from collections.abc import Callable
from dataclasses import dataclass

from pagewire.common.wire.messages import AddedGrammar
from scheduler_service.core.request import Grammar

# The limit on the bytes of grammars in one plan. The first grammar of a plan may exceed it.
_MAX_PLAN_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _Need:
    """The record of a grammar that at least one unfinished request uses: how many requests use it, its id, and whether
    it is ready."""

    num_requests: int = 0
    grammar_id: int = 0  # 0 until a plan contains the grammar
    is_ready: bool = False  # if the worker cannot prepare it, its requests end


class NeededGrammars:
    """The grammars that unfinished requests use, with the number by which step plans refer to each grammar (its id).

    A grammar gets its id when it is first sent to the worker. Ids start at 1, rise, and are never used twice for one
    worker. If `prepares` is false, because no worker is connected, every grammar counts as ready at once.
    """

    def __init__(self, *, prepares: bool) -> None:
        self._prepares = prepares
        self._needs: dict[Grammar, _Need] = {}
        self.released: list[int] = []  # which no plan has said
        self.num_unreported = 0  # that are needed, and named by no plan
        self.last_id = 0

    def need(self, grammar: Grammar) -> bool:
        """Record that one more request uses a grammar. Return True if the grammar is ready on the worker, so that the
        request need not wait."""
        need = self._needs.get(grammar)
        if need is None:
            need = self._needs[grammar] = _Need(is_ready=not self._prepares)
            self.num_unreported += 1
        need.num_requests += 1
        return need.is_ready

    def give_up(self, grammar: Grammar) -> None:
        """Record that a request no longer uses its grammar. If it was the last such request, a later plan makes the
        worker release the grammar."""
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
        """Return whether the worker has received a grammar, but has not reported yet that it is ready."""
        return grammar is not None and self.id_of(grammar) > 0 and not self.is_ready(grammar)

    def report(self, grammar_id: int, *, is_ready: bool) -> Grammar | None:
        """Process the worker's message that it has prepared a grammar (`is_ready`), or has failed to prepare it.

        Return the grammar. Return None if no request uses the grammar any more, or if it was ready before.
        """
        for grammar, need in self._needs.items():
            if need.grammar_id == grammar_id and not need.is_ready:
                need.is_ready = is_ready
                return grammar
        return None

    def take_added(self, admits: Callable[[Grammar], bool]) -> list[AddedGrammar]:
        """Choose the grammars that the next plan sends to the worker, give them their ids, and return them. A byte
        limit applies to the grammars of one plan.

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
