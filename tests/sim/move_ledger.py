"""A ledger of the blocks that the scheduler may not use yet (S3, S4).

It is computed only from the messages that the scheduler sent and received. A move counts as in progress until the
scheduler has received its completion, so the ledger knows less than the worker.
"""

from collections.abc import Iterator

from pagewire.common.wire.messages import FIRST_STATE_ID, RowOpening, StepPlan


def blocks_of(opening: RowOpening, block_size: int, windows: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the blocks that an opened row will read, in all layer groups, and the blocks that it will write. The
    states that it reads and writes are included, as moves name them.

    Blocks outside the sliding window of their group are neither, and may belong to any row.
    """
    num_full = opening.num_computed_tokens // block_size
    read = [FIRST_STATE_ID + opening.read_state] if opening.read_state else []
    written = [FIRST_STATE_ID + state for state in opening.own_states]
    for table, window in zip(opening.block_tables, windows, strict=True):
        first = max(0, opening.num_computed_tokens - window + 1) // block_size if window else 0
        read += table[first:num_full]
        written += table[num_full:]
    return read, written


def saved_states(plan: StepPlan) -> Iterator[tuple[int, int]]:
    """Yield the slots of rows and the states that the plan writes for them besides those of openings, as moves name
    them."""
    for slots, states in (
        (plan.set_state_slots, plan.set_state_firsts),
        (plan.set_state_slots, plan.set_state_seconds),
        (plan.save_slots, plan.save_states),
    ):
        yield from ((slot, FIRST_STATE_ID + state) for slot, state in zip(slots, states, strict=True))


class MoveLedger:
    def __init__(self, block_size: int, windows: tuple[int, ...]) -> None:
        self._block_size = block_size
        self._windows = windows
        self._moves: dict[int, StepPlan] = {}  # unacknowledged plans with moves, by step
        self.num_out = self.num_in = 0  # moves in progress

    def moved(self, step: int) -> None:
        for number in [number for number in self._moves if number <= step]:
            plan = self._moves.pop(number)
            self.num_out -= len(plan.swap_out_device_blocks)
            self.num_in -= len(plan.swap_in_device_blocks)

    def check(self, plan: StepPlan) -> None:
        """Assert that a new plan uses no block of a move in progress, and record the plan's own moves."""
        has_moves = bool(plan.swap_out_device_blocks or plan.swap_in_device_blocks)
        if not self._moves and not has_moves:
            return
        read_device, written_device, read_host, written_host = self._named()
        assert written_device.isdisjoint(plan.swap_out_device_blocks), f"S4: a swap-out of unread blocks: {plan}"
        assert written_host.isdisjoint(plan.swap_in_host_blocks), f"S4: a swap-in before its swap-out is done: {plan}"
        targets_device, targets_host = plan.swap_in_device_blocks, plan.swap_out_host_blocks
        assert len({*targets_device}) == len(targets_device), f"S3: two moves to one device block: {plan}"
        assert len({*targets_host}) == len(targets_host), f"S3: two moves to one host block: {plan}"
        read_device.update(plan.swap_out_device_blocks)
        read_host.update(plan.swap_in_host_blocks)
        assert (read_device | written_device).isdisjoint(targets_device), f"S3: a swap-in to a block of a move: {plan}"
        assert (read_host | written_host).isdisjoint(targets_host), f"S3: a swap-out to a block of a move: {plan}"
        written_device.update(targets_device)
        written = [*plan.append_block_ids, *plan.copy_target_blocks, *(state for _, state in saved_states(plan))]
        read = [*plan.copy_source_blocks, *plan.set_block_ids]
        for opening in plan.openings:
            of_row = blocks_of(opening, self._block_size, self._windows)
            read += of_row[0]
            written += of_row[1]
        assert written_device.isdisjoint(read), f"S4: a block is read before its swap-in is done: {plan}"
        assert (read_device | written_device).isdisjoint(written), f"S3: a block of a move is written: {plan}"
        if has_moves:
            self._moves[plan.step] = plan
            self.num_out += len(plan.swap_out_device_blocks)
            self.num_in += len(plan.swap_in_device_blocks)

    def _named(self) -> tuple[set[int], set[int], set[int], set[int]]:
        read_device: set[int] = set()
        written_device: set[int] = set()
        read_host: set[int] = set()
        written_host: set[int] = set()
        for plan in self._moves.values():
            read_device.update(plan.swap_out_device_blocks)
            written_host.update(plan.swap_out_host_blocks)
            read_host.update(plan.swap_in_host_blocks)
            written_device.update(plan.swap_in_device_blocks)
        return read_device, written_device, read_host, written_host
