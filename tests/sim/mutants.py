"""Planted bugs of the core, each of which the simulator must catch.

`python -m tests.sim.mutants` runs all of them, or those whose names contain a given text. The planted bugs of outputs
are in `tests.sim.outputs.mutants`.
"""

import sys
from pathlib import Path

from tests.sim.known_seeds import KNOWN_SEEDS
from tests.sim.planting import Mutant, Patch, Planting, hunt_all, mutant

_NO_NEWS_WITHOUT_LINK = Patch(
    "PlanExchange.empty_inbox",
    "self._inbox.popleft()(self._clock.now())",
    "if self._link is None:\n    break\nself._inbox.popleft()(self._clock.now())",
)

MUTANTS = (
    # Blocks
    mutant("an aborted request keeps its blocks", "forget", "self.cache.release(sequence.allocation)", ""),
    mutant(
        "a swapped request's device blocks are freed twice",
        "swap_out",
        "[table.blocks for table in allocation.tables]",
        "[table.blocks.copy() for table in allocation.tables]",
    ),
    mutant("a fork takes no reference", "_share_tables", "self.pool.share(block)", ""),
    mutant("a sample writes to the tail it shares", "fork", "num_tokens % self.block_size == 0", "True"),
    mutant("a mean begins with what is cached", "may_match", "not self.group.must_compute_all", "True"),
    mutant("a prompt that reads later tokens is cut", "_startable", "worker.capacity.is_bidirectional", "False"),
    mutant("a prompt that reads later tokens is cached", "worker_joined", "not capacity.is_bidirectional", "True"),
    mutant(
        "the first beam writes to a tail that others hold",
        "_tails_to_copy",
        "holders if num_others else holders[1:]",
        "holders[1:]",
    ),
    mutant(
        "the tail of a beam is copied to a wrong place",
        "replace_tail",
        "return index, pairs",
        "return max(0, index - 1), pairs",
    ),
    mutant(
        "idle blocks that a request matches are free twice",
        "num_opening_blocks",
        "self.pool.ref_count(blocks[0]) > 0",
        "True",
    ),
    mutant("an admission is given one block too many", "can_allocate", "self.pool.num_free", "self.pool.num_free + 1"),
    mutant(
        "the watermark binds a request that is alone",
        "can_allocate",
        "0 if alone else self._num_watermark_blocks",
        "self._num_watermark_blocks",
    ),
    mutant(
        "a group that can never fit is admitted",
        "_num_distinct_blocks",
        "num_shared + request.num_rows * (num_blocks - num_shared)",
        "num_blocks",
    ),
    mutant(
        "a request that is too long is admitted",
        "rejection",
        "num_tokens > limits.max_sequence_tokens",
        "num_tokens > limits.max_sequence_tokens + 1",
    ),
    mutant(
        "the window frees a block a token early",
        "first_needed_block",
        "position - window + 1",
        "position - window + 2",
    ),
    mutant(
        "a fork takes blocks that fell out of the window",
        "num_forked_tokens",
        "table.num_freed <= self.cache.room.first_needed_block(table.window, num_tokens)",
        "True",
    ),
    mutant(
        "rows under a window are admitted for a block too few",
        "num_chunk_blocks",
        "(window + num_tokens + self.block_size - 3) // self.block_size + 1",
        "max(1, (window + num_tokens + self.block_size - 3) // self.block_size)",
    ),
    mutant(
        "a row that publishes nothing any more goes on publishing",
        "free_unread",
        "num_freed and num_freed >= allocation.num_published_blocks",
        "False",
    ),
    mutant(
        "a match holds a block too few",
        "num_passed",
        "min(first, num_blocks - 1)",
        "min(first + 1, num_blocks - 1)",
    ),
    # Leases
    mutant(
        "a lease goes on after the last token of a sequence",
        "PlanBuilder.lease",
        "any(row.last_step == step for row in due)",
        "False",
    ),
    mutant(
        "a lease has no blocks for its later steps",
        "PlanBuilder.lease",
        "self._append_next(row, step)",
        "",
    ),
    mutant(
        "a lease takes blocks that are not free",
        "PlanBuilder.lease",
        "num_blocks > self.cache.pool.num_free",
        "False",
    ),
    mutant(
        "a plan that ends a lease saves the state of a position that a row may not reach",
        "PlanBuilder._began_blocks",
        "not self.follows_lease",
        "True",
    ),
    mutant(
        "a plan that ends a lease preempts for blocks that are not needed yet",
        "Scheduler._make_room",
        "builder.ends_lease",
        "False",
    ),
    mutant(
        "a row is preempted for blocks that its results will free",
        "Scheduler._make_room",
        "row.next_position < row.allocation.num_computed_tokens",
        "False",
    ),
    mutant(
        "steps that a lease dropped count as computed",
        "WorkerState.drop_steps",
        "self.rows.repeat(row, dispatch.num_later_steps)",
        "",
    ),
    mutant(
        "one step of those that a lease dropped counts as dropped",
        "WorkerState.drop_steps",
        "self.rows.repeat(row, dispatch.num_later_steps)",
        "self.rows.repeat(row, 1)",
    ),
    mutant(
        "a position that a lease may drop is published",
        "Sequence.take_slot",
        "is_gated or may_be_leased or self.group.request.grammar is not None",
        "is_gated or self.group.request.grammar is not None",
    ),
    # Layer groups
    mutant(
        "a layer group keeps what its window has passed",
        "slide",
        "self._free_passed(allocation, table, num_passed)",
        "",
    ),
    mutant(
        "a hit takes a layer group whose window is incomplete",
        "_end_before_gap",
        "self.num_passed(group, num_blocks)",
        "num_blocks - 1",
    ),
    mutant("a hit takes what one layer group has", "num_usable", "min(ends, default=num_usable)", "num_usable"),
    mutant(
        "a hit on the device takes windows on the host",
        "CacheManager.match",
        "windows.num_usable(nodes[:num_device], on_device=True)",
        "windows.num_usable(nodes[:num_device])",
    ),
    mutant(
        "a layer group is forgotten in a swap",
        "swap_out",
        "host_blocks[block] if block else 0",
        "host_blocks[block] if block and table is allocation.tables[0] else 0",
    ),
    mutant(
        "a layer group is forgotten when a request is loaded",
        "swap_in",
        "blocks[host_block] if host_block else 0",
        "blocks[host_block] if host_block and table is allocation.tables[0] else 0",
    ),
    mutant(
        "a fork copies another layer group's tail",
        "CacheManager.fork",
        "zip(sources, [table.blocks[num_full] for table in allocation.tables], strict=True)",
        "zip(sources[::-1], [table.blocks[num_full] for table in allocation.tables], strict=True)",
    ),
    mutant(
        "a fork does not copy one layer group's tail",
        "CacheManager.fork",
        "list(zip(sources, [table.blocks[num_full] for table in allocation.tables], strict=True))",
        "list(zip(sources, [table.blocks[num_full] for table in allocation.tables], strict=True))[:1]",
    ),
    mutant(
        "a layer group is forgotten when a beam's tail is copied",
        "replace_tail",
        "allocation.tables",
        "allocation.tables[:1]",
    ),
    mutant(
        "a beam's tail is put into another layer group's table",
        "PlanBuilder.compute",
        "self.worker_rows.table(row.slot, group)",
        "self.worker_rows.table(row.slot, 0)",
    ),
    mutant(
        "a block is put into another layer group's table",
        "_append",
        "self.worker_rows.table(row.slot, group)",
        "self.worker_rows.table(row.slot, 0)",
    ),
    mutant(
        "an admission counts one layer group alone",
        "num_opening_blocks",
        "allocation.tables",
        "allocation.tables[:1]",
    ),
    mutant(
        "a step counts the blocks of one layer group alone",
        "Room.num_missing_blocks",
        "allocation.tables",
        "allocation.tables[:1]",
    ),
    mutant(
        "a resumed request counts one layer group alone",
        "num_swapped_blocks",
        "allocation.host_blocks",
        "allocation.tables[0].host_blocks if any(allocation.tables[0].host_blocks) else ()",
    ),
    mutant(
        "a request that one layer group has no room for is admitted",
        "max_request_blocks",
        "min(most, num_rows * min(num_blocks, self.num_chunk_blocks(window, 1)))",
        "0",
    ),
    Mutant(
        "a block is published as another layer group's content",
        (
            Patch("CacheManager.publish", "tables[0].blocks[i]", "tables[-1].blocks[i]"),
            Patch("CacheManager.publish", "tables[content.group].blocks[i]", "tables[-1 - content.group].blocks[i]"),
        ),
    ),
    mutant(
        "a demoted block becomes another layer group's content",
        "_record_copy",
        "self._index.add_host_copy(content, move.host_block)",
        "self._index.add_host_copy(content.node.contents[0], move.host_block)",
    ),
    mutant(
        "a waiting request does not hear that a window was lost",
        "_record_loss",
        "self.cursors.changed(content, is_gain=False)",
        "pass",
    ),
    mutant(
        "a waiting request does not hear that a window was cached",
        "_record_gain",
        "self.cursors.changed(content, is_gain=True)",
        "pass",
    ),
    mutant(
        "a waiting request watches the last block of its window alone",
        "is_changed_by",
        "self.windows.num_passed(content.group, known) < depth <= known",
        "depth == known",
    ),
    # States of sequences
    mutant("a state that a late row did not save is cached", "process", "worker.void_saves(sample.row)", ""),
    mutant(
        "a state is cached before the result of its plan",
        "WorkerState.dispatch",
        "tuple(save for _, save in builder.saves)",
        "tuple(self.cache.states.confirm(save) for _, save in builder.saves)[:0]",
    ),
    mutant(
        "a state is cached after another block",
        "save_prompt",
        "num_published * size > position",
        "num_published * size > position + size",
    ),
    mutant(
        "a state of a decoding row is cached after another block",
        "StatePool.confirm",
        "save.position // self._block_size - 1",
        "save.position // self._block_size",
    ),
    mutant(
        "a state is cached at a block that is not cached any more",
        "StatePool.confirm",
        "node is None or not node.is_cached",
        "node is None",
    ),
    mutant(
        "a fork writes the states of its parent",
        "branch",
        "beam_group.new_states.append((rows[beam].slot, *states))",
        "",
    ),
    mutant(
        "a hit takes blocks without the state after them",
        "Windows.num_usable",
        "range(self.num_spine, len(self.of_groups))",
        "range(self.num_spine, len(self.of_groups) - (self.of_groups[-1] == _STATE_WINDOW))",
    ),
    mutant(
        "a state is forgotten in a swap",
        "swap_out",
        "allocation.states.own and allocation.num_computed_tokens",
        "False",
    ),
    mutant(
        "a swapped state is not loaded",
        "swap_in",
        "self.moves.add(Move(step, states.own[0], states.host, False, None))",
        "",
    ),
    mutant(
        "rows with two states are swapped",
        "can_swap",
        "all(len(allocation.states.own) == 1 for allocation in allocations)",
        "True",
    ),
    mutant("a state is free while a row reads it", "_hold_source", "self._pool.share(state)", ""),
    mutant(
        "a state that a row reads is written in the same plan",
        "_plan_states",
        "self.read_states.append(allocation.states.source)",
        "self.cache.states.read([allocation.states.source])",
    ),
    mutant(
        "a new row starts with what the last owner of its state left",
        "_opening",
        "row.allocation.num_computed_tokens and states.own",
        "states.own",
    ),
    mutant(
        "a state outlives its worker",
        "_begin",
        "sequence.begin_epoch(self._new_allocation(group.request, sequence.token_ids))",
        "states = sequence.allocation.states\n"
        "sequence.begin_epoch(self._new_allocation(group.request, sequence.token_ids))\n"
        "sequence.allocation.states = states",
    ),
    mutant(
        "the states of a sequence that ended are lost",
        "CacheManager.release",
        "self.tiers.release_states(allocation)",
        "",
    ),
    mutant("a host state is lost", "CacheManager.release", "self.tiers.release_host_state(allocation)", ""),
    mutant("a request is admitted without its states", "has_room", "num_needed <= self._pool.num_free", "True"),
    mutant(
        "an admission does not count the state of its hit",
        "has_room",
        "num_needed += not states or self._pool.ref_count(states[0]) == 0",
        "pass",
    ),
    mutant(
        "a state that a row reads is put first in the eviction order",
        "StatePool.confirm",
        "self._pool.ref_count(previous.blocks[0]) == 0",
        "True",
    ),
    mutant(
        "a sample starts without the state of its prompt",
        "num_forked_tokens",
        "sequence.num_prompt_tokens - 1 if relative.allocation.states.fork else 0",
        "sequence.num_prompt_tokens - 1",
    ),
    mutant(
        "a sample reads a state of another position",
        "save_fork",
        "len(allocation.request.prompt_token_ids) - 1",
        "len(allocation.request.prompt_token_ids)",
    ),
    mutant("a row that may be late has one state", "_num_own", "is_gated or request.grammar is not None", "is_gated"),
    mutant(
        "a row does not start with the state that was loaded for it",
        "open",
        "allocation.states.source = blocks[state]",
        "pass",
    ),
    mutant(
        "a state is moved to a block",
        "allocate_for",
        "self.allocate_state() if content.is_state else self.allocate()",
        "self.allocate()",
    ),
    mutant(
        "a reused state is still found by its old content",
        "allocate_state",
        "self._contents[state] is not None",
        "False",
    ),
    mutant(
        "a beam that ends takes its states along",
        "branch",
        "self.cache.release(sequence.allocation, keeps_states=True)",
        "self.cache.release(sequence.allocation)",
    ),
    # The prefix cache
    mutant(
        "the last token of a block is not compared",
        "_token_bytes",
        "start + block_size",
        "start + max(1, block_size - 1)",
    ),
    mutant("the last token is matched too", "match", "len(allocation.token_ids) - 1", "len(allocation.token_ids)"),
    mutant("salts share content", "_new_allocation", "request.cache_salt", '""'),
    mutant(
        "a block is published before its tokens are known",
        "num_settled_tokens",
        "len(self.allocation.token_ids) - self.may_repeat",
        "len(self.allocation.token_ids) + self.num_in_flight - self.may_repeat",
    ),
    mutant("a reused block is still found by its old content", "Tiers.__init__", "index.forget", "lambda block: None"),
    mutant(
        "a reused host block is still found by its old content",
        "Tiers.__init__",
        "index.forget_host",
        "lambda block: None",
    ),
    mutant("bad blocks stay published", "_process_failures", "worker.cache.unpublish(bad.allocation)", ""),
    mutant(
        "what was computed on bad blocks is kept", "_process_failures", "self._state.recompute(other, worker, now)", ""
    ),
    mutant("copies of bad blocks on the host stay published", "forget_subtree", "self.forget_host(host_block)", ""),
    mutant(
        "a sample publishes on top of a block that is not held",
        "_share_tables",
        "allocation.tables[0].num_freed >= num_published",
        "allocation.tables[0].num_freed > num_published",
    ),
    mutant(
        "a preempted beam's bad blocks stay published",
        "_process_failures",
        "sequence.has_failed",
        "sequence.has_failed or row.is_dropped and not sequence.is_finished",
    ),
    Mutant(
        "a second bad row unpublishes what others wrote since the first",
        (
            Patch("_process_failures", "ends or bad.is_finished", "False"),
            Patch(
                "depends_on",
                "max(self.num_matched_blocks, self.num_published_blocks)",
                "self.num_matched_blocks",
            ),
        ),
    ),
    # Moves
    Mutant(
        "a swap's source is free before it was read",
        (
            Patch(
                "add",
                "self._device.pool_of(move.device_block).share(move.device_block)",
                "(not move.is_out or move.content is not None) and "
                "self._device.pool_of(move.device_block).share(move.device_block)",
            ),
            Patch(
                "acknowledge",
                "self._device.free(move.device_block, spare=move.content is not None, free_list=move.free_list)",
                "(not move.is_out or move.content is not None) and "
                "self._device.free(move.device_block, spare=move.content is not None, free_list=move.free_list)",
            ),
        ),
    ),
    Mutant(
        "a load's source is free before it was read",
        (
            Patch(
                "add",
                "self._host.pool_of(move.host_block).share(move.host_block)",
                "move.is_out and self._host.pool_of(move.host_block).share(move.host_block)",
            ),
            Patch(
                "acknowledge",
                "self._host.free(move.host_block, free_list=move.free_list)",
                "move.is_out and self._host.free(move.host_block, free_list=move.free_list)",
            ),
        ),
    ),
    mutant(
        "a group is swapped in before it was swapped out",
        "admit",
        "group.state is GroupState.SWAPPED and group.swapped_allocations",
        "group.state in (GroupState.SWAPPED, GroupState.SWAPPING_OUT) and group.swapped_allocations",
    ),
    mutant(
        "a group is opened before its blocks are there",
        "start_loaded",
        "worker.last_moved_step",
        "worker.last_acknowledged_step",
    ),
    mutant(
        "moves of the next step are taken for done",
        "acknowledge",
        "self._pending[0].step <= step",
        "self._pending[0].step <= step + 1",
    ),
    mutant(
        "a demoted block is on the host before it was copied",
        "_demote",
        "self.host.free(host_block)",
        "self.index.add_host_copy(content, host_block)\nself.host.free(host_block)",
    ),
    mutant(
        "what is loaded ahead is found while the block's earlier content still is",
        "_promote",
        "self.device.allocate_for(content)",
        "pool.allocate()",
    ),
    mutant(
        "what is loaded ahead is found before it has come",
        "_promote",
        "self.device.free(block)",
        "self.device.free(block)\nself.index.add_copy(content, block)",
    ),
    mutant("a cursor stays on content that is lost", "_record_loss", "self.cursors.move_back(node)", ""),
    mutant(
        "a cursor stops at what was published while it waited",
        "advance_waiting",
        "cursor.advance()",
        "cursor.node, cursor.num_blocks = node, cursor.num_blocks + 1\n"
        "node.num_cursors += 1\n"
        "node.cursors = {**(node.cursors or {}), cursor.next_bytes: {cursor: None}}",
    ),
    mutant(
        "a request is not ordered anew when its prefix is cached or lost",
        "update",
        "self._waiting.reorder(group, self.order(group))\nself._retention.waits(group)",
        "self._retention.waits(group)",
    ),
    mutant("a request that runs keeps its cursor", "leave", "group.cursor is not None", "False"),
    mutant(
        "a block that is taken from a free list still counts as its tenant's",
        "taken",
        "owner.num_blocks - 1",
        "owner.num_blocks",
    ),
    mutant(
        "a swap takes idle copies on the host for free",
        "num_swap_blocks",
        "copy == 0 or self.host_pool.ref_count(copy) == 0",
        "copy == 0",
    ),
    # States of groups
    mutant("a preempted group still stands among those that run", "_enter", "del self.running[index]", ""),
    mutant("a group that comes back still counts as swapped", "_enter", "del self.swapped[group]", ""),
    # Rows and results
    mutant(
        "a victim is resumed with a token in flight",
        "admit",
        "self._worker.last_acknowledged_step < group.planned_step",
        "False",
    ),
    mutant("a row that ended is not told", "vacate", "self.slots.end_row(row.slot)", ""),
    mutant("all samples draw as the first", "_opening", "sequence.sample_index", "0"),
    mutant(
        "a swapped beam is opened with nothing to compute",
        "rewind",
        "self.allocation.compute_again(len(self.allocation.token_ids) - 1)",
        "",
    ),
    mutant(
        "a plan computes more than its budget", "share_tokens", "num_free -= num_tokens", "num_free -= num_tokens // 2"
    ),
    mutant("tokens in flight outlive the end of their sequence", "process", "sample.row.is_dropped", "False"),
    mutant(
        "prompt log-probabilities outlive the end of their request",
        "process",
        "not planned.row.sequence.is_finished",
        "True",
    ),
    mutant("a sample that is made again counts twice", "drop", "self.is_dropped = True", ""),
    mutant(
        "samples of a row are taken for those of the row before",
        "Sequence.take_slot",
        "self.row = Row(self, self.allocation, slot, drops, is_gated, may_repeat, len(self.token_ids))",
        "is_dropped = self.row is not None and self.row.is_dropped\n"
        "self.row = Row(self, self.allocation, slot, drops, is_gated, may_repeat, len(self.token_ids), is_dropped)",
    ),
    mutant(
        "what a row matched in the last epoch is taken for bad with what is bad in this one",
        "_begin",
        "sequence.begin_epoch(self._new_allocation(group.request, sequence.token_ids))",
        "num_matched_blocks = sequence.allocation.num_matched_blocks\n"
        "sequence.begin_epoch(self._new_allocation(group.request, sequence.token_ids))\n"
        "sequence.allocation.num_matched_blocks = num_matched_blocks",
    ),
    mutant(
        "a stop text drops no tokens",
        "end",
        "del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]",
        "",
    ),
    mutant(
        "a result of an old epoch is accepted",
        "complete",
        "(result.epoch, result.step) != (worker.epoch, dispatch.step)",
        "result.step != dispatch.step",
    ),
    mutant(
        "a result of another step is accepted",
        "complete",
        "(result.epoch, result.step) != (worker.epoch, dispatch.step)",
        "result.epoch != worker.epoch",
    ),
    mutant(
        "what was in flight is still awaited in the next epoch",
        "begin_epoch",
        "self.allocation, self.row = allocation, None",
        "self.allocation = allocation",
    ),
    mutant(
        "a beam's score forgets the length penalty",
        "_score",
        "-self._params.length_penalty * math.log(num_tokens)",
        "-math.log(num_tokens)",
    ),
    mutant("a beam that forks keeps the tokens of the old one", "branch", "beam.token_ids[:] = parent.token_ids", ""),
    # Scheduling order
    mutant(
        "the first is the victim, not the last",
        "_make_room",
        "state.preempt(state.running[-1], worker, builder)",
        "state.preempt(next(iter(state.running)), worker, builder)",
    ),
    mutant(
        "the newest running group is served first",
        "_enter",
        "insort(self.running, group, key=_order)",
        "self.running.insert(0, group)",
    ),
    mutant("a group waits for blocks that do not come back", "_make_room", "moves.num_returning", "pool.num_blocks"),
    mutant(
        "no group is admitted in place of one that gave way to none",
        "schedule",
        "builder.is_empty or not builder.has_preempted",
        "not builder.has_preempted",
    ),
    Mutant(
        "groups that lack room for their samples wait for each other",
        (
            Patch(
                "allocate_samples", "not (builder.is_empty and worker.is_idle) or state.running[-1] is group", "True"
            ),
            Patch("_allocate_sample", "is_alone or (builder.is_empty and worker.is_idle)", "is_alone"),
        ),
    ),
    mutant(
        "a group of which nothing is swapped any more is swapped in",
        "admit",
        "group.swapped_allocations",
        "True",
    ),
    mutant("a plan that only opens a row is dropped", "is_empty", "self.openings", "False"),
    mutant("crashes are charged to no request", "crashed", "request.num_crashes += 1", ""),
    mutant("crashes are charged to requests that wait", "crashed", "len(causes) == 1", "len(causes) <= 2"),
    mutant("suspects are tried beside others", "admits", "not self._trial or request in self._trial", "True"),
    mutant("the cache is emptied under requests", "flush_cache", "not self._state.groups", "True"),
    # Grammars
    mutant(
        "a matcher is not rolled back",
        "SimulatedWorker._open",
        "row.matcher.consume(opening.token_ids[opening.num_prompt_tokens :])",
        "is_again = -opening.sequence_id - 1 in self.kv\n"
        "row.matcher = self.kv.setdefault(-opening.sequence_id - 1, row.matcher)\n"
        "row.matcher.consume(() if is_again else opening.token_ids[opening.num_prompt_tokens :])",
    ),
    mutant(
        "a row is masked by another one's grammar",
        "SimulatedWorker._answer",
        "matcher = row.matcher",
        "matcher = row.matcher and next((r.matcher for _, r in working if r.matcher is not None), None)",
    ),
    mutant("a fork goes on in its parent's state", "Row.fork", "self.matcher and self.matcher.copy()", "self.matcher"),
    mutant(
        "grammars outlive the epoch",
        "__init__",
        "self.grammars = NeededGrammars(prepares=self.has_worker)",
        "self.grammars = NeededGrammars(prepares=self.has_worker)\n"
        "if self.has_worker:\n"
        "    self.grammars = vars(NeededGrammars).get('kept') or self.grammars\n"
        "    NeededGrammars.kept = self.grammars",
    ),
    mutant(
        "a grammar is released while another request needs it",
        "need",
        "need.num_requests += 1",
        "need.num_requests = 1",
    ),
    mutant("a grammar that is not needed is never released", "give_up", "self.released.append(need.grammar_id)", ""),
    mutant(
        "a group that waits for a grammar holds up the queue",
        "admit",
        "group is None",
        "group is None or state.waiting.held",
    ),
    mutant("a grammar is named in no plan of its own", "is_empty", "self.added_grammars", "False"),
    mutant(
        "an end token is ignored with ignore_eos",
        "_new_sequence",
        "{*request.sampling.stop_token_ids, *group.end_token_ids}",
        "{*request.sampling.stop_token_ids}",
    ),
    mutant("an end token is ignored below min_tokens", "_may_stop", "token_id in group.end_token_ids", "False"),
    mutant("a beam dies at an end token below min_tokens", "_ranked", "not self._end_token_ids", "True"),
    mutant("a gated row with a grammar is planned once", "_process_sample", "worker.rows.active[row] = None", ""),
    mutant(
        "a row is gated as by the worker before",
        "take_slot",
        "gates = request.grammar is not None and self._gates_grammars",
        "WorkerRows.kept = vars(WorkerRows).get('kept') or {}\n"
        "gates = request.grammar is not None and WorkerRows.kept.setdefault(sequence, self._gates_grammars)",
    ),
    Mutant(
        "a grammar that cannot be read is taken for ready",
        (
            Patch("grammar_ready", "not error", "True"),
            Patch(
                "grammar_ready",
                "self._state.grammar_prepared(grammar, outputs, error)",
                "self._state.grammar_prepared(grammar, outputs, '')",
            ),
        ),
    ),
    mutant(
        "a row whose grammar failed goes on",
        "_process_failures",
        "sample.status in _GRAMMAR_FAILURES",
        "sample.status is RowStatus.GRAMMAR_FAILED",
    ),
    mutant("a grammar that crashes the worker is charged to no request", "Lifecycle.lose_worker", "preparing", "set()"),
    mutant("grammars of others are prepared beside suspects", "_may_prepare", "not quarantine.suspects", "True"),
    # Late rows
    mutant(
        "a late row counts as computed",
        "repeat",
        "self.allocation.compute_again(self._num_expected - 1)",
        "",
    ),
    mutant(
        "a late row that is planned by itself never goes on",
        "repeat",
        "row.slot >= 0 and row.num_uncomputed_tokens",
        "False",
    ),
    mutant(
        "a late row that was dropped is awaited",
        "num_in_flight",
        "0 if self.is_dropped else self.num_expected_tokens - len(self.allocation.token_ids)",
        "self.num_expected_tokens - len(self.allocation.token_ids)",
    ),
    mutant(
        "a sample shares what its late relative writes again",
        "num_forked_tokens",
        "min(sequence.num_prompt_tokens, sequence.num_tokens - 1, relative.next_position)",
        "min(sequence.num_prompt_tokens, sequence.num_tokens - 1)",
    ),
    mutant(
        "what a late row writes again is published",
        "Sequence.take_slot",
        "self.group.request.grammar is not None",
        "False",
    ),
    # Without a worker
    mutant(
        "a stream that has begun ends with the grace",
        "is_bound",
        "any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)",
        "False",
    ),
    mutant(
        "a request of which one sample has ended ends with the grace",
        "is_bound",
        "any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)",
        "self.live_sequences[0].first_token_at is not None",
    ),
    mutant("a beam search waits on after the grace", "is_bound", "self.beam is None", "True"),
    mutant(
        "a detached request ends with the grace",
        "is_bound",
        "self.request.output_mode is OutputMode.DETACHED",
        "False",
    ),
    mutant(
        "an output that is read as a whole waits on after the grace",
        "is_bound",
        "self.request.output_mode is OutputMode.DETACHED",
        "True",
    ),
    # Events and reports
    mutant(
        "a block's removal from the device is not told",
        "_record_loss",
        "self._changes.append((node, tier, False))",
        "tier is Tier.DEVICE or self._changes.append((node, tier, False))",
    ),
    # The step loop, and the path of its outputs
    Mutant(
        "what a closed link still tells reaches the next epoch",
        (Patch("PlanExchange._tell", "self._link is not None", "True"), _NO_NEWS_WITHOUT_LINK),
    ),
    Mutant(
        "what waits in the inbox outlives its epoch",
        (Patch("PlanExchange._leave_epoch", "self._inbox.clear()", ""), _NO_NEWS_WITHOUT_LINK),
    ),
    mutant(
        "a stream outlives its end",
        "Publisher.publish",
        "self.samples.pop(end.sequence_id)",
        "self.samples[end.sequence_id]",
    ),
    mutant(
        "plans are made before the news are read",
        "StepLoop.run_once",
        "self.exchange.empty_inbox()\nself.exchange.send_plans()",
        "self.exchange.send_plans()\nself.exchange.empty_inbox()",
    ),
    mutant("a stream that waits already waits twice", "enqueue", "if output.is_queued:\n    return", ""),
    mutant("tokens behind a stop text are delivered", "SampleRecord.finish", "del self._new_token_ids[num_kept:]", ""),
    mutant(
        "an end is lost behind tokens that are taken", "pop_plain_tokens", "self.published_end is not None", "False"
    ),
    mutant(
        "the patience with a lost worker goes on when the next one is there",
        "WorkerAvailability.worker_joined",
        "self.stop_timers()",
        "",
    ),
    mutant(
        "requests are refused though a worker has come back",
        "WorkerAvailability.worker_joined",
        "self._grace_has_ended = self._has_timed_out = False",
        "",
    ),
    # The session
    mutant(
        "the same epoch is accepted twice",
        "SessionRegister.hello",
        "hello.epoch <= self.last_epoch",
        "hello.epoch < self.last_epoch",
    ),
    mutant("plans of another epoch are carried out", "Session.plan", "epoch != self.epoch", "False"),
    mutant("a plan is carried out twice", "Session.plan", "step != self.last_planned_step + 1", "False"),
    mutant(
        "more plans than the pipeline takes are accepted",
        "Session.plan",
        "self.num_unfinished >= self.pipeline_depth",
        "self.num_unfinished > self.pipeline_depth",
    ),
)

PLANTING = Planting(
    MUTANTS,
    Path(__file__).with_name("found_by.json"),
    KNOWN_SEEDS,
    campaign="tests.sim.campaign",
    copied=("scheduler_service", "worker_service", "testing", "tests/sim"),
    planted_in=("scheduler_service/core", "scheduler_service/serving", "worker_service/rpc", "testing"),
)


if __name__ == "__main__":
    sys.exit(hunt_all(PLANTING, "python -m tests.sim.mutants"))
