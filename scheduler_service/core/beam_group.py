"""A beam search while it runs: which row holds which beam, what they have reported, what the worker must be told."""

from dataclasses import dataclass, field

from scheduler_service.core.beam import BeamSearch, BeamState, BeamStep, Child
from scheduler_service.core.plans import PlanBuilder
from scheduler_service.core.sequence import Sequence, SequenceGroup
from scheduler_service.core.worker_state import WorkerState


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The search of a group, whose sequences are rows that beams move between, not beams."""

    search: BeamSearch
    output_ids: list[int]  # sequence ids that the hypotheses will have, best first
    beams: list[Sequence]  # rows of the live ones, best first
    # Candidates of the beams whose row has reported since the last selection: (token id, logprob), best first.
    candidates: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    # What the selection changed and no plan has told the worker yet.
    forks: list[tuple[int, int]] = field(default_factory=list)  # source slot, target slot
    appended: list[tuple[int, int]] = field(default_factory=list)  # slot, token id
    unborn_slots: set[int] = field(default_factory=set)  # targets of these forks that have no row yet
    num_tokens: int = 0  # that its beams have gone on with, all together

    def report(self, beam: Sequence, candidates: list[tuple[int, float]]) -> bool:
        """A beam's row has computed its candidates. Whether all have by now, so that `select` can choose among them."""
        self.candidates[beam] = candidates
        return len(self.candidates) == len(self.beams)

    def select(self) -> BeamStep:
        """Choose the beams that go on, among the candidates of all."""
        states = [BeamState(beam.cumulative_logprob, beam.token_ids[beam.num_prompt_tokens :]) for beam in self.beams]
        step = self.search.advance(states, [self.candidates[beam] for beam in self.beams])
        self.candidates.clear()
        return step

    def branch(self, group: SequenceGroup, children: list[Child], worker: WorkerState) -> None:
        """Let the group's rows hold the children: the first child of a beam stays in its row, the others move to rows
        whose beam has none."""
        parents, rows = self.beams, {row.sequence: row for row in group.open_rows}
        used = {parents[child.parent] for child in children}
        spare = [sequence for sequence in group.sequences if sequence not in used]
        for sequence in spare:
            worker.cache.release(sequence.holding)
        self.beams = []
        for child in children:
            parent = beam = parents[child.parent]
            if parent in self.beams:
                beam = spare.pop(0)
                beam.token_ids[:] = parent.token_ids
                worker.cache.branch(beam.holding, parent.holding)
                if beam not in rows:
                    rows[beam] = worker.take_slot(beam)
                    self.unborn_slots.add(rows[beam].slot)
                self.forks.append((rows[parent].slot, rows[beam].slot))
            self.beams.append(beam)
        for beam, child in zip(self.beams, children, strict=True):
            row = rows[beam]
            row.go_on_with(child.token_id)
            beam.cumulative_logprob = child.cumulative_logprob
            self.appended.append((row.slot, child.token_id))
            worker.active[row] = None
            worker.publish(row)

    def tell(self, builder: PlanBuilder) -> int:
        """Put what the last selection changed into the plan. How many rows that opens."""
        builder.forks.extend(self.forks)
        builder.appended_tokens.extend(self.appended)
        num_born = len(self.unborn_slots)
        self._forget_changes()
        return num_born

    def forget_step(self) -> None:
        """Forget the candidates that were reported since the last selection, and the changes of rows that no plan has
        named yet."""
        self.candidates.clear()
        self._forget_changes()

    def _forget_changes(self) -> None:
        self.forks.clear()
        self.appended.clear()
        self.unborn_slots.clear()
