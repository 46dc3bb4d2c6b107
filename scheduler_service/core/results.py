"""The processing of a step's result: tokens of samples, candidates of beams, and failed rows."""

from pagewire.common.wire.messages import RowStatus
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.plans import Dispatch, PlannedRow, ResolvedResult, SampledRow
from scheduler_service.core.request import EndReason, TokenLogprobs, TokenOutputs
from scheduler_service.core.sequence import Row, Sequence
from scheduler_service.core.worker_state import WorkerState

# The end of a request if the worker could not compute one of its rows.
_FAILURES = {
    RowStatus.NAN_LOGITS: (EndReason.NAN_LOGITS, "the model's logits, or hidden states, are not numbers"),
    RowStatus.OUT_OF_MEMORY: (
        EndReason.OUT_OF_MEMORY,
        "the worker ran out of memory while it computed this request alone, one token at a time: shorten the request, "
        "or lower the worker's --gpu-memory-utilization",
    ),
}


# The end of a request if its grammar failed. The blocks that its row computed are still valid.
_GRAMMAR_FAILURES = {
    RowStatus.GRAMMAR_FAILED: (
        EndReason.GRAMMAR_FAILED,
        "the request's grammar rejects a token that the server generated: this is a bug in the server",
    ),
    RowStatus.GRAMMAR_DEAD_END: (
        EndReason.GRAMMAR_DEAD_END,
        "the request's grammar requires text for which the tokenizer has no tokens: remove that text from the grammar",
    ),
    RowStatus.GRAMMAR_LIMIT: (
        EndReason.GRAMMAR_LIMIT,
        "the next tokens of the request's grammar cannot be computed within one step's limits: simplify the grammar",
    ),
}


class Results:
    """Processes the results of steps: appends sampled tokens to sequences, advances beam searches, and ends
    sequences."""

    def __init__(self, state: Lifecycle) -> None:
        self._state = state

    def process(self, worker: WorkerState, dispatch: Dispatch, resolved: ResolvedResult, now: float) -> TokenOutputs:
        """Process the result of a plan, and return the new tokens and the end events of sequences. `dispatch` is the
        record of the plan.

        Each entry is checked just before it is used, because the result for another sequence may have ended or
        interrupted its request in the meantime.
        """
        outputs = TokenOutputs()
        self._process_failures(worker, dispatch, resolved.samples, outputs, now)
        for planned, entries in resolved.prompt_logprobs:
            if not planned.row.sequence.is_finished:
                self._process_prompt_logprobs(planned, entries, outputs)
        for sample in resolved.samples:
            if sample.status is RowStatus.LATE:
                worker.void_saves(sample.row)  # also of a row that is dropped
            if sample.row.is_dropped:
                continue
            if sample.status is RowStatus.OK:
                self._process_sample(worker, sample, outputs, now)
            elif sample.status is RowStatus.LATE:
                worker.rows.repeat(sample.row)
        if resolved.decoded:
            self._process_decoded(worker, dispatch, resolved.decoded, outputs)
        return outputs

    def _process_prompt_logprobs(
        self, planned: PlannedRow, entries: list[TokenLogprobs], outputs: TokenOutputs
    ) -> None:
        """Add the log-probabilities of a sequence's prompt tokens to the outputs. Positions that the client has already
        received are left out."""
        sequence = planned.row.sequence
        new = entries[max(0, sequence.num_prompt_logprobs_sent - planned.start) :]
        if new:
            sequence.num_prompt_logprobs_sent += len(new)
            outputs.prompt_logprobs.setdefault(sequence.sequence_id, []).extend(new)

    def _process_failures(
        self, worker: WorkerState, dispatch: Dispatch, samples: list[SampledRow], outputs: TokenOutputs, now: float
    ) -> None:
        """End the requests for which the step failed. Make every other request that used the bad KV cache blocks
        compute their content again.

        A sequence fails if the worker could not compute it, or if its logits are NaN. The blocks that it wrote are bad,
        even if it has ended in the meantime. If only the grammar failed, the request ends, but its blocks are good.
        """
        for sample in samples:
            if sample.status in _GRAMMAR_FAILURES and not sample.row.is_dropped:
                reason, message = _GRAMMAR_FAILURES[sample.status]
                self._state.end_group(sample.row.sequence.group, reason, outputs, message=message)
        failed = {sample.row: sample.status for sample in samples if sample.status in _FAILURES}
        if not failed:
            return
        # The writer of a shared block was planned before the rows that matched the block. So the cause is handled
        # before its consequences.
        places = {planned.row: i for i, planned in enumerate(dispatch.rows)}
        for row in sorted(failed, key=lambda row: places.get(row, -1)):
            sequence = row.sequence
            if sequence.has_failed:
                continue
            # A preempted request recomputes this row, which may then succeed. The blocks that it wrote are bad in any
            # case.
            group, ends = sequence.group, not row.is_dropped
            written = group.sequences if ends else [sequence]
            for bad in written:
                # Other sequences may write the same content before its next result.
                bad.has_failed = ends or bad.is_finished
                worker.cache.unpublish(bad.allocation)
            for other in list(self._state.groups.values()):
                if (other is not group or not ends) and any(
                    one.allocation.depends_on(bad.allocation, worker.cache.block_size)
                    for one in other.sequences
                    for bad in written
                ):
                    self._state.recompute(other, worker, now)
            if ends:
                reason, message = _FAILURES[failed[row]]
                self._state.end_group(group, reason, outputs, message=message)

    def _process_sample(self, worker: WorkerState, sample: SampledRow, outputs: TokenOutputs, now: float) -> None:
        """Process the result of a sequence that was planned individually. The result is a token, the candidates for a
        beam, or an embedding."""
        row, sequence, token_id = sample.row, sample.row.sequence, sample.token_id
        if self._state.quarantine.charged:
            self._state.quarantine.cleared(sequence.group)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if sample.candidates is not None:
            self._process_candidates(worker, row, sample.candidates, outputs)
            return
        if sample.embedding is not None:
            self._state.end(sequence, EndReason.STOP, outputs, embedding=sample.embedding)
            return
        self._state.counters.num_generation_tokens += 1
        sequence.token_ids.append(token_id)
        outputs.sequence_ids.append(sequence.sequence_id)
        outputs.token_ids.append(token_id)
        if sample.logprobs is not None:
            outputs.logprobs[sequence.sequence_id] = sample.logprobs
        if token_id in sequence.stop_token_ids and _may_stop(sequence, token_id):
            self._state.end(sequence, EndReason.STOP, outputs, stop_token_id=token_id)
        elif sequence.num_tokens >= sequence.max_num_tokens:
            self._state.end(sequence, EndReason.LENGTH, outputs)
        elif row.slot >= 0:
            worker.cache.publish(row.allocation, row.num_settled_tokens)
            if row.is_gated:
                worker.rows.active[row] = None

    def _process_candidates(
        self, worker: WorkerState, row: Row, candidates: list[tuple[int, float]], outputs: TokenOutputs
    ) -> None:
        """Store the candidates for the next token of a beam. When all beams of the search have their candidates, choose
        the beams of the next step, or end the search."""
        group, beam = row.sequence.group, row.sequence.group.beam
        assert beam is not None
        row.reported()
        if not beam.report(row.sequence, candidates):
            return
        step = beam.select()
        if step.is_done:
            self._state.end_search(group, beam, outputs)
            return
        self._state.charge_search(group, beam, len(step.children))
        worker.branch(group, beam, step.children)

    def _process_decoded(
        self, worker: WorkerState, dispatch: Dispatch, token_ids: list[int], outputs: TokenOutputs
    ) -> None:
        """Append one token to each sequence that decodes one token in every step. This is the scheduler's hot loop.

        Normally, no other work is done per sequence, except for a check of the stop tokens. Each sequence is examined
        only if a sample was dropped or a first token was late since the plan was sent, or if a worker crash is recorded
        against any request.
        """
        columns, quarantine = dispatch.columns, self._state.quarantine
        if dispatch.num_drops != worker.rows.drops.num_drops or quarantine.charged:
            kept = [i for i, row in enumerate(columns.rows) if not row.is_dropped]
            columns, token_ids = columns.take(kept), [token_ids[i] for i in kept]
            for sequence in [row.sequence for row in columns.rows]:
                quarantine.cleared(sequence.group)
                if sequence.first_token_at is None:  # its first token was late
                    sequence.first_token_at = self._state.now
        for output, token_id in zip(columns.token_lists, token_ids, strict=True):
            output.append(token_id)
        self._state.counters.num_generation_tokens += len(token_ids)
        outputs.sequence_ids.extend(columns.sequence_ids)
        outputs.token_ids.extend(token_ids)
        if columns.any_stop.isdisjoint(token_ids):
            return
        for i in [i for i, stops in enumerate(columns.stop_sets) if token_ids[i] in stops]:
            sequence, token_id = columns.rows[i].sequence, token_ids[i]
            if _may_stop(sequence, token_id):
                self._state.end(sequence, EndReason.STOP, outputs, stop_token_id=token_id)


def _may_stop(sequence: Sequence, token_id: int) -> bool:
    group = sequence.group
    return sequence.num_output_tokens > group.request.sampling.min_tokens or token_id in group.end_token_ids
