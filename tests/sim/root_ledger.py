"""A ledger of each block's owner, computed from the plans alone: tenants and cache salts share nothing (S7)."""

from collections.abc import Mapping
from typing import Any

from pagewire.common.wire.messages import StepPlan, WorkerCapacity
from tests.sim.client import Client
from tests.sim.move_ledger import blocks_of, saved_states


class RootLedger:
    def __init__(self, capacity: WorkerCapacity) -> None:
        self._block_size = capacity.block_size
        self._windows = capacity.windows
        self._max_num_seqs = capacity.max_num_seqs
        self._device: dict[int, Any] = {}  # by block: the root of its last written content
        self._host: dict[int, Any] = {}
        self._rows: dict[int, Any] = {}  # by slot: the root of the row

    def check(self, plan: StepPlan, client_of: Mapping[int, Client]) -> None:
        """Assert that every row is allocated only on content of its own root."""
        device, host = self._device, self._host
        if plan.swap_out_device_blocks or plan.swap_in_device_blocks:
            outs = [device.get(block) for block in plan.swap_out_device_blocks]
            ins = [host.get(block) for block in plan.swap_in_host_blocks]
            host.update(zip(plan.swap_out_host_blocks, outs, strict=True))
            device.update(zip(plan.swap_in_device_blocks, ins, strict=True))
        openings = []
        for opening in plan.openings:
            request = client_of[opening.sequence_id].request
            root = self._rows[opening.slot] = (request.tenant, request.cache_salt)
            read, written = blocks_of(opening, self._block_size, self._windows)
            openings.append((root, read))
            for block in written:  # a row may write the state that it reads
                if block not in read:
                    device[block] = root
        for source, target in zip(plan.fork_source_slots, plan.fork_target_slots, strict=True):
            self._rows[target] = self._rows[source]
        for table, block in zip(plan.append_tables, plan.append_block_ids, strict=True):
            device[block] = self._rows[table % self._max_num_seqs]
        for table, block in zip(plan.set_block_tables, plan.set_block_ids, strict=True):
            device[block] = self._rows[table % self._max_num_seqs]
        for slot, state in saved_states(plan):
            device[state] = self._rows[slot]
        for root, blocks in openings:  # checked last: the blocks may be computed by a row of this very plan
            for block in blocks:
                owner = device.get(block)
                assert owner == root, f"S7: block {block} of {owner} is read by {root}: {plan}"
