"""Planted bugs: each must be caught by the simulator, or the simulator is not worth what it says.

The seed that last found a bug (`found_by.json`) is tried first, so that a run with few seeds looks at every bug too.
Where it finds it no more, because scenarios are drawn in another way or the simulator has become blind to it, those
that once found a defect of the core (`known_seeds.py`) are tried, and then as many as are asked for. A mutant is a
patch of the source as it stands. A snippet that is not there exactly once is an error, so that no mutant quietly
becomes a no-op when the code changes. Run all with `python -m tests.sim.mutants`, or some: give parts of names.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.sim.known_seeds import KNOWN_SEEDS

ROOT = Path(__file__).parents[2]
FOUND_BY = Path(__file__).with_name("found_by.json")
_COPIED = ("scheduler_service", "worker_service", "testing", "tests/sim")
_CORE = "scheduler_service/core/"
_SERVING = "scheduler_service/serving/"
_SESSION = "worker_service/rpc/session.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`patches`: (file, text as it is, text instead)."""

    name: str
    patches: tuple[tuple[str, str, str], ...]


def _mutant(name: str, file: str, *snippets: str) -> Mutant:
    """One file; `snippets` are old and new in turn."""
    path = file if file.endswith(".py") else f"{_CORE}{file}.py"
    return Mutant(name, tuple((path, old, new) for old, new in zip(snippets[::2], snippets[1::2], strict=True)))


MUTANTS = (
    # Blocks
    _mutant(
        "an aborted request keeps its blocks",
        "epoch",
        "        for sequence in group.sequences:\n            self.cache.release(sequence)\n",
        "",
    ),
    _mutant(
        "a swapped request's device blocks are freed twice",
        "cache_manager",
        "            sequence.block_table.clear()\n            sequence.node, sequence",
        "            sequence.node, sequence",
    ),
    _mutant(
        "a fork takes no reference",
        "cache_manager",
        "            if block:\n                self.pool.share(block)\n            sequence.block_table.append(block)",
        "            sequence.block_table.append(block)",
    ),
    _mutant(
        "a sample writes to the tail it shares",
        "cache_manager",
        "        if num_tokens % self.block_size == 0:\n            return []\n",
        "        if True:\n            return []\n",
    ),
    _mutant(
        "a mean begins with what is cached",
        "cache_manager",
        " and not sequence.group.begins_anew\n",
        "\n",
    ),
    _mutant(
        "the first beam writes to a tail that others hold",
        "epoch",
        "copying.extend(holders if num_others else holders[1:])",
        "copying.extend(holders[1:])",
    ),
    _mutant(
        "the tail of a beam is copied to a wrong place",
        "cache_manager",
        "        return index, source, target  # the",
        "        return max(0, index - 1), source, target  # the",
    ),
    _mutant(
        "idle blocks that a request matches are free twice",
        "cache_manager",
        "- max(len(match.device), num_passed) + num_idle",
        "- max(len(match.device), num_passed)",
    ),
    _mutant(
        "an admission is given one block too many",
        "cache_manager",
        "return num_blocks + num_reserved <= self.pool.num_free\n",
        "return num_blocks + num_reserved <= self.pool.num_free + 1\n",
    ),
    _mutant(
        "the watermark binds a request that is alone",
        "cache_manager",
        "num_reserved = 0 if alone else self._num_watermark_blocks",
        "num_reserved = self._num_watermark_blocks",
    ),
    _mutant(
        "a group that can never fit is admitted",
        "cache_manager",
        "num_most = num_shared + num_rows * (num_blocks - num_shared) + num_copies",
        "num_most = num_blocks",
    ),
    _mutant(
        "a request that is too long is admitted",
        "admission",
        "if num_tokens > limits.max_sequence_tokens:",
        "if num_tokens > limits.max_sequence_tokens + 1:",
    ),
    _mutant(
        "the window frees a block a token early",
        "cache_manager",
        "return max(0, position - self.window + 1) // self.block_size if self.window else 0",
        "return max(0, position - self.window + 2) // self.block_size if self.window else 0",
    ),
    _mutant(
        "a fork takes blocks that fell out of the window",
        "cache_manager",
        "return num_tokens if relative.num_freed_blocks <= self._first_needed_block(num_tokens) else 0",
        "return num_tokens",
    ),
    _mutant(
        "rows under a window are admitted for a block too few",
        "cache_manager",
        "return (self.window + num_tokens + self.block_size - 3) // self.block_size + 1",
        "return max(1, (self.window + num_tokens + self.block_size - 3) // self.block_size)",
    ),
    _mutant(
        "a row that publishes nothing any more goes on publishing",
        "cache_manager",
        "if sequence.num_freed_blocks and sequence.num_freed_blocks >= sequence.num_published_blocks:",
        "if False:",
    ),
    _mutant(
        "a match holds a block too few",
        "cache_manager",
        "return max(0, min(self._first_needed_block(num_blocks * self.block_size), num_blocks - 1))",
        "return max(0, min(self._first_needed_block(num_blocks * self.block_size) + 1, num_blocks - 1))",
    ),
    # The prefix cache
    _mutant(
        "the last token of a block is not compared",
        "cache/prefix_index",
        "token_ids[start : start + self._block_size]",
        "token_ids[start : start + max(1, self._block_size - 1)]",
    ),
    _mutant(
        "the last token is matched too",
        "cache_manager",
        "max_blocks = (sequence.num_tokens - 1) // self.block_size",
        "max_blocks = sequence.num_tokens // self.block_size",
    ),
    _mutant(
        "salts share content",
        "lifecycle",
        "self._shared_key(request.tenant, request.cache_salt, self",
        'self._shared_key(request.tenant, "", self',
    ),
    _mutant(
        "a block is published before its tokens are known",
        "cache_manager",
        "num_known = sequence.num_tokens - sequence.may_repeat",
        "num_known = sequence.num_tokens + sequence.num_in_flight - sequence.may_repeat",
    ),
    _mutant(
        "a reused block is still found by its old content",
        "cache_manager",
        "        block = self.pool.allocate()\n        self.index.forget(block)\n",
        "        block = self.pool.allocate()\n",
    ),
    _mutant(
        "a reused host block is still found by its old content",
        "cache_manager",
        "        self.index.forget_host(host_block)\n        return host_block",
        "        return host_block",
    ),
    _mutant(
        "bad blocks stay published",
        "results",
        "                epoch.cache.unpublish(bad)\n",
        "",
    ),
    _mutant(
        "what was computed on bad blocks is kept",
        "results",
        "                    self._redo(epoch, other, now)\n",
        "                    pass\n",
    ),
    _mutant(
        "copies of bad blocks on the host stay published",
        "cache/prefix_index",
        "        for host_block in reversed(host_blocks):\n            self.forget_host(host_block)\n",
        "",
    ),
    _mutant(
        "a sample publishes on top of a block that is not held",
        "cache_manager",
        "if sequence.num_freed_blocks >= num_published:",
        "if sequence.num_freed_blocks > num_published:",
    ),
    _mutant(
        "a preempted beam's bad blocks stay published",
        "results",
        "            if sequence.has_failed:\n",
        "            if sequence.has_failed or not (sequence.counts(dispatch.step) or sequence.is_finished):\n",
    ),
    Mutant(
        "a second bad row unpublishes what others wrote since the first",
        (
            (f"{_CORE}results.py", "bad.has_failed = ends or bad.is_finished", "bad.has_failed = False"),
            (
                f"{_CORE}cache_manager.py",
                "max(sequence.num_matched_blocks, sequence.num_published_blocks) > other",
                "sequence.num_matched_blocks > other",
            ),
        ),
    ),
    # Moves
    _mutant(
        "a swap's source is free before it was read",
        "cache/moves",
        "        self._pool.share(move.device_block)\n",
        "        if not move.is_out or move.node is not None:\n            self._pool.share(move.device_block)\n",
        "            self._pool.free(move.device_block,",
        "            if not move.is_out or move.node is not None:\n              self._pool.free(move.device_block,",
    ),
    _mutant(
        "a load's source is free before it was read",
        "cache/moves",
        "        self._host_pool.share(move.host_block)\n",
        "        if move.is_out:\n            self._host_pool.share(move.host_block)\n",
        "            self._host_pool.free(move.host_block,",
        "            if move.is_out:\n              self._host_pool.free(move.host_block,",
    ),
    _mutant(
        "a group is swapped in before it was swapped out",
        "openings",
        "if group.state is GroupState.SWAPPED and any(",
        "if group.state in (GroupState.SWAPPED, GroupState.SWAPPING_OUT) and any(",
    ),
    _mutant(
        "a group is opened before its blocks are there",
        "openings",
        "if group.moved_step <= epoch.last_moved_step]",
        "if group.moved_step <= epoch.last_acknowledged_step]",
    ),
    _mutant(
        "moves of the next step are taken for done",
        "cache/moves",
        "self._pending[0].step <= step:",
        "self._pending[0].step <= step + 1:",
    ),
    _mutant(
        "a demoted block is on the host before it was copied",
        "cache_manager",
        "            self.moves.add(Move(step, node.blocks[0], host_block, True, node, free_list))\n",
        "            self.moves.add(Move(step, node.blocks[0], host_block, True, node, free_list))\n"
        "            self.index.add_host_copy(node, host_block)\n",
    ),
    _mutant(
        "what is loaded ahead is found while the block's earlier content still is",
        "cache_manager",
        "host_block, block = node.host_block, self._allocate()\n",
        "host_block, block = node.host_block, self.pool.allocate()\n",
    ),
    _mutant(
        "what is loaded ahead is found before it has come",
        "cache_manager",
        "                self.moves.add(Move(step, block, host_block, False, node, free_list))\n"
        "                self.pool.free(block, cached=False)  # the move holds it\n",
        "                self.moves.add(Move(step, block, host_block, False, node, free_list))\n"
        "                self.pool.free(block, cached=False)  # the move holds it\n"
        "                self.index.add_copy(node, block)\n",
    ),
    _mutant(
        "a cursor stays on content that is lost",
        "cache/prefix_index",
        "            self._repel_cursors(node)\n",
        "            pass\n",
    ),
    _mutant(
        "a cursor stops at what was published while it waited",
        "cache/prefix_index",
        "            self._advance(cursor)\n            self._moved_cursors[cursor] = None\n\n    def _repel",
        "            cursor.node, cursor.num_blocks = node, cursor.num_blocks + 1\n"
        "            node.num_cursors += 1\n"
        "            node.cursors = {**(node.cursors or {}), cursor.next_bytes: {cursor: None}}\n"
        "            self._moved_cursors[cursor] = None\n\n    def _repel",
    ),
    _mutant(
        "a request is not ordered anew when its prefix is cached or lost",
        "waiting",
        "                self._waiting.reorder(group, self.order(group))\n                self._retention",
        "                self._retention",
    ),
    _mutant(
        "a request that runs keeps its cursor",
        "waiting",
        "            if group.cursor is not None:\n                del",
        "            if False:\n                del",
    ),
    _mutant(
        "a block that is taken from a free list still counts as its tenant's",
        "cache/eviction",
        "        self._count(owner, owner.num_blocks - 1)\n",
        "        self._count(owner, owner.num_blocks)\n",
    ),
    _mutant(
        "a swap takes idle copies on the host for free",
        "cache_manager",
        "return len(copies), sum(copy == 0 or self.host_pool.ref_count(copy) == 0 for copy in copies)",
        "return len(copies), sum(copy == 0 for copy in copies)",
    ),
    # Where groups stand
    _mutant(
        "a preempted group still stands among those that run",
        "lifecycle",
        "            del self.running[index]\n",
        "",
    ),
    _mutant(
        "a group that comes back still counts as swapped",
        "lifecycle",
        "            del self.swapped[group]\n",
        "            pass\n",
    ),
    # Rows and results
    _mutant(
        "a victim is resumed with a token in flight",
        "openings",
        "if group is None or self._epoch.last_acknowledged_step < group.resume_step:",
        "if group is None:",
    ),
    _mutant(
        "a row that ended is not told",
        "epoch",
        "            self.slots.end_row(sequence.slot)\n            self.num_rows -= 1\n",
        "            self.num_rows -= 1\n",
    ),
    _mutant(
        "all samples draw as the first",
        "epoch",
        "sample_index=sequence.sample_index,",
        "sample_index=0,",
    ),
    Mutant(
        "a swapped beam is opened with nothing to compute",
        (
            (
                f"{_CORE}epoch.py",
                "                sequence.start_from(min(sequence.num_computed_tokens, sequence.num_tokens - 1))\n",
                "",
            ),
            (
                f"{_CORE}openings.py",
                "row.start_from(min(row.num_computed_tokens, row.num_tokens - 1))",
                "row.start_from(row.num_computed_tokens)",
            ),
        ),
    ),
    _mutant(
        "a plan computes more than its budget",
        "epoch",
        "                num_free -= num_tokens\n",
        "                num_free -= num_tokens // 2\n",
    ),
    _mutant(
        "tokens in flight outlive the end of their sequence",
        "results",
        "            if not sample.sequence.counts(step):\n                continue\n",
        "",
    ),
    _mutant(
        "prompt log-probabilities outlive the end of their request",
        "results",
        "            if not row.sequence.is_finished:\n",
        "            if True:\n",
    ),
    _mutant(
        "a sample that is made again counts twice",
        "sequence",
        "        self._first_step = step + 1\n",
        "",
    ),
    _mutant(
        "samples of the next epoch are taken for those of the last",
        "sequence",
        "        self._first_step = self.num_matched_blocks = 0\n",
        "        self.num_matched_blocks = 0\n",
    ),
    _mutant(
        "what a row matched in the last epoch is taken for bad with what is bad in this one",
        "sequence",
        "        self._first_step = self.num_matched_blocks = 0\n",
        "        self._first_step = 0\n",
    ),
    _mutant(
        "a stop text drops no tokens",
        "lifecycle",
        "            del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]\n",
        "            pass\n",
    ),
    _mutant(
        "a result of an old epoch is accepted",
        "scheduler",
        "if (result.epoch, result.step) != (epoch.number, dispatch.step):",
        "if result.step != dispatch.step:",
    ),
    _mutant(
        "a result of another step is accepted",
        "scheduler",
        "if (result.epoch, result.step) != (epoch.number, dispatch.step):",
        "if result.epoch != epoch.number:",
    ),
    _mutant(
        "what was in flight is still awaited in the next epoch",
        "sequence",
        "            sequence.forget_cache()\n            sequence.forget_epoch()\n",
        "            sequence.forget_cache()\n",
    ),
    _mutant(
        "a beam's score forgets the length penalty",
        "beam",
        "exponent = -self._params.length_penalty * math.log(num_tokens)",
        "exponent = -math.log(num_tokens)",
    ),
    _mutant(
        "a beam that forks keeps the tokens of the old one",
        "beam_group",
        "                row.token_ids = parent.token_ids.copy()\n",
        "",
    ),
    # Who is served
    _mutant(
        "the first is the victim, not the last",
        "scheduler",
        "                state.preempt(state.running[-1], epoch, draft)\n",
        "                state.preempt(next(iter(state.running)), epoch, draft)\n",
    ),
    _mutant(
        "the newest running group is served first",
        "lifecycle",
        "insort(self.running, group, key=_order)",
        "self.running.insert(0, group)",
    ),
    _mutant(
        "a group waits for blocks that do not come back",
        "scheduler",
        "if num_missing <= pool.num_free + moves.num_returning:",
        "if num_missing <= pool.num_free + pool.num_blocks:",
    ),
    _mutant(
        "no group is admitted in place of one that gave way to none",
        "scheduler",
        "if (draft.is_empty or not draft.has_preempted) and openings",
        "if not draft.has_preempted and openings",
    ),
    _mutant(
        "groups that lack room for their samples wait for each other",
        "openings",
        "if not (draft.is_empty and epoch.is_idle) or state.running[-1] is group:",
        "if True:",
        "        is_alone = is_alone or (draft.is_empty and epoch.is_idle)\n",
        "",
    ),
    _mutant(
        "a group of which nothing is swapped any more is swapped in",
        "openings",
        " and any(sequence.host_table for sequence in group.live_sequences):",
        ":",
    ),
    _mutant(
        "a plan that only opens a row is dropped",
        "plans/draft",
        "self.num_tokens or self.openings or",
        "self.num_tokens or",
    ),
    _mutant(
        "crashes are charged to no request",
        "quarantine",
        "            request.num_crashes += 1\n",
        "",
    ),
    _mutant(
        "crashes are charged to requests that wait",
        "quarantine",
        "            if len(causes) == 1:\n",
        "            if len(causes) <= 2:\n",
    ),
    _mutant(
        "suspects are tried beside others",
        "quarantine",
        "return not self._trial or request in self._trial",
        "return True",
    ),
    _mutant(
        "the cache is emptied under requests",
        "scheduler",
        "        if not self._state.groups:\n            self._state.epoch.cache.flush()",
        "        self._state.epoch.cache.flush()",
    ),
    # Grammars
    _mutant(
        "a matcher is not rolled back",
        "testing/simulated_worker.py",
        "            row.matcher.consume(opening.token_ids[opening.num_prompt_tokens :])\n",
        "            is_again = -opening.sequence_id - 1 in self.kv\n"
        "            row.matcher = self.kv.setdefault(-opening.sequence_id - 1, row.matcher)\n"
        "            row.matcher.consume(() if is_again else opening.token_ids[opening.num_prompt_tokens :])\n",
    ),
    _mutant(
        "a row is masked by another one's grammar",
        "testing/simulated_worker.py",
        "            matcher = row.matcher\n            status",
        "            matcher = row.matcher and next((r.matcher for _, r in working if r.matcher is not None), None)\n"
        "            status",
    ),
    _mutant(
        "a fork goes on in its parent's state",
        "testing/simulated_worker.py",
        "matcher=self.matcher and self.matcher.copy(),",
        "matcher=self.matcher,",
    ),
    _mutant(
        "grammars outlive the epoch",
        "epoch",
        "        self.grammars = NeededGrammars(prepares=self.has_worker)\n",
        "        self.grammars = NeededGrammars(prepares=self.has_worker)\n"
        "        if self.has_worker:\n"
        "            self.grammars = vars(NeededGrammars).get('kept') or self.grammars\n"
        "            NeededGrammars.kept = self.grammars\n",
    ),
    _mutant(
        "a grammar is released while another request needs it",
        "grammars",
        "need.num_requests += 1",
        "need.num_requests = 1",
    ),
    _mutant(
        "a grammar that is not needed is never released",
        "grammars",
        "            if need.grammar_id:\n                self._released.append(need.grammar_id)\n            else:\n",
        "            if not need.grammar_id:\n",
    ),
    _mutant(
        "a group that waits for a grammar holds up the queue",
        "openings",
        "        if group is None or self._epoch.last",
        "        if group is None or state.waiting.held or self._epoch.last",
    ),
    _mutant(
        "a grammar is named in no plan of its own",
        "plans/draft",
        " or self.openings or self.added_grammars or",
        " or self.openings or",
    ),
    _mutant(
        "an end token is ignored with ignore_eos",
        "lifecycle",
        "{*request.sampling.stop_token_ids, *group.end_token_ids}",
        "{*request.sampling.stop_token_ids}",
    ),
    _mutant(
        "an end token is ignored below min_tokens",
        "results",
        " or token_id in group.end_token_ids\n",
        "\n",
    ),
    _mutant(
        "a beam dies at an end token below min_tokens",
        "beam",
        "num_tokens <= self._min_tokens and not self._end_token_ids",
        "num_tokens <= self._min_tokens",
    ),
    _mutant(
        "a gated row with a grammar is planned once",
        "results",
        "            if sequence.is_gated:\n                epoch.active[sequence] = None\n",
        "",
    ),
    _mutant(
        "a row is gated as by the worker before",
        "lifecycle",
        "                sequence.is_gated = _is_gated(group.request, epoch)\n",
        "",
    ),
    _mutant(
        "a grammar that cannot be read is taken for ready",
        "scheduler",
        "is_ready=not error)",
        "is_ready=True)",
        "self._state.prepared(grammar, outputs, error)",
        "self._state.prepared(grammar, outputs, '')",
    ),
    _mutant(
        "a row whose grammar failed goes on",
        "results",
        "            if sample.status in _GRAMMAR_FAILURES and",
        "            if sample.status is RowStatus.GRAMMAR_FAILED and",
    ),
    _mutant(
        "a grammar that crashes the worker is charged to no request",
        "lifecycle",
        "if not group.is_finished), preparing)",
        "if not group.is_finished), set())",
    ),
    _mutant(
        "grammars of others are prepared beside suspects",
        "scheduler",
        "        return not quarantine.suspects or any(\n",
        "        return True or any(\n",
    ),
    # Late rows
    _mutant(
        "a late row counts as computed",
        "sequence",
        "        self._num_computed = min(self._num_computed, self._num_expected - 1)\n",
        "",
    ),
    _mutant(
        "a late row that is planned by itself never goes on",
        "epoch",
        "        elif sequence.slot >= 0 and sequence.num_uncomputed_tokens:\n",
        "        elif False:\n",
    ),
    _mutant(
        "a late row that no longer counts is counted",
        "results",
        "            elif sample.status is RowStatus.LATE:\n",
        "            elif False:\n",
        "            if not sample.sequence.counts(step):\n                continue\n",
        "            if sample.status is RowStatus.LATE:\n                epoch.repeat(sample.sequence)\n"
        "            if not sample.sequence.counts(step):\n                continue\n",
    ),
    _mutant(
        "a sample shares what its late relative writes again",
        "cache_manager",
        ", sequence.num_tokens - 1, relative.next_position)",
        ", sequence.num_tokens - 1)",
    ),
    _mutant(
        "what a late row writes again is published",
        "sequence",
        "return self.is_gated or self.group.request.grammar is not None",
        "return self.is_gated",
    ),
    # Without a worker
    _mutant(
        "a stream that has begun ends with the grace",
        "sequence",
        "return any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)",
        "return False",
    ),
    _mutant(
        "a request of which one sample has ended ends with the grace",
        "sequence",
        "return any(sequence.is_finished or sequence.first_token_at is not None for sequence in self.sequences)",
        "return self.live_sequences[0].first_token_at is not None",
    ),
    _mutant(
        "a beam search waits on after the grace",
        "sequence",
        "is OutputMode.STREAMED and self.beam is None:",
        "is OutputMode.STREAMED:",
    ),
    _mutant(
        "a detached request ends with the grace",
        "sequence",
        "        return self.request.output_mode is OutputMode.DETACHED\n",
        "        return False\n",
    ),
    _mutant(
        "an output that is read as a whole waits on after the grace",
        "sequence",
        "        return self.request.output_mode is OutputMode.DETACHED\n",
        "        return True\n",
    ),
    # What is told
    _mutant(
        "a block's removal from the device is not told",
        "cache/prefix_index",
        "            self._changes.append((node, Tier.DEVICE, False))\n",
        "            pass\n",
    ),
    # The step loop, and what carries its outputs on
    _mutant(
        "what a closed link still tells reaches the next epoch",
        f"{_SERVING}step_loop.py",
        "        if self._link is not None:\n            self._inbox.append(news)\n",
        "        if True:\n            self._inbox.append(news)\n",
        "        while self._inbox:\n",
        "        while self._inbox and self._link is not None:\n",
    ),
    _mutant(
        "what waits in the inbox outlives its epoch",
        f"{_SERVING}step_loop.py",
        "        self._inbox.clear()\n",
        "",
        "        while self._inbox:\n",
        "        while self._inbox and self._link is not None:\n",
    ),
    _mutant(
        "a stream outlives its end",
        f"{_SERVING}step_loop.py",
        "stream = self._streams.pop(end.sequence_id)",
        "stream = self._streams[end.sequence_id]",
    ),
    _mutant(
        "plans are made before the news are read",
        f"{_SERVING}step_loop.py",
        "        self._empty_inbox()\n        self._send_plans()\n",
        "        self._send_plans()\n        self._empty_inbox()\n",
    ),
    _mutant(
        "a stream that waits already waits twice",
        f"{_SERVING}token_stream.py",
        "        if stream.is_queued:\n            return\n",
        "",
    ),
    _mutant(
        "tokens behind a stop text are delivered",
        f"{_SERVING}token_stream.py",
        "        del self.token_ids[num_kept:]\n",
        "",
    ),
    _mutant(
        "an end is lost behind the tokens that are taken",
        f"{_SERVING}token_stream.py",
        "        if self.end is not None or self.logprobs",
        "        if self.logprobs",
    ),
    _mutant(
        "the patience with a lost worker goes on when the next one is there",
        f"{_SERVING}availability.py",
        "        self.stop_timers()\n        self._grace_has_ended",
        "        self._grace_has_ended",
    ),
    _mutant(
        "requests are refused though a worker has come back",
        f"{_SERVING}availability.py",
        "        self._grace_has_ended = self._has_timed_out = False\n        self._epoch_is",
        "        self._epoch_is",
    ),
    # The session
    _mutant(
        "the same epoch is accepted twice",
        _SESSION,
        "if hello.epoch <= self.last_epoch:",
        "if hello.epoch < self.last_epoch:",
    ),
    _mutant("plans of another epoch are carried out", _SESSION, "if epoch != self.epoch:", "if False:"),
    _mutant("a plan is carried out twice", _SESSION, "if step != self.last_planned_step + 1:", "if False:"),
    _mutant(
        "more plans than the pipeline takes are accepted",
        _SESSION,
        "if num_unfinished >= self.pipeline_depth:",
        "if num_unfinished > self.pipeline_depth:",
    ),
)


def recorded_seeds() -> dict[str, int]:
    """Return the seed that finds each bug, by the bug's name."""
    return json.loads(FOUND_BY.read_text())


def misplaced(mutant: Mutant) -> str:
    """Why the mutant cannot be planted, or nothing."""
    for file, old, _ in mutant.patches:
        num_found = (ROOT / file).read_text().count(old)
        if num_found != 1:
            return f"{mutant.name}: {file} has this {num_found} times, not once:\n{old}\n"
    return ""


def _plant(mutant: Mutant, folder: Path) -> None:
    """A copy of what the simulator needs, with the bug in it."""
    for part in _COPIED:
        # Python writes modules' code under another name first.
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    (folder / "tests" / "__init__.py").touch()
    for file, old, new in mutant.patches:
        path = folder / file
        path.write_text(path.read_text().replace(old, new))


@dataclass(frozen=True, slots=True)
class _Catch:
    """The first seed that failed, which of the seeds that were tried it was, and how."""

    seed: int
    number: int
    error: str


def _hunt(mutant: Mutant, recorded: int | None, num_seeds: int, first: int) -> _Catch | str:
    """Try the seed that is known to find it, those that found other bugs, and then `num_seeds`, from `first` on. Why it
    could not be tried is a text, which is empty if none found it."""
    seeds = [*([] if recorded is None else [recorded]), *KNOWN_SEEDS, *range(first, first + num_seeds)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _plant(mutant, folder)
        program = (
            "import json\n"
            "from tests.sim.campaign import run_seed\n"
            f"for number, seed in enumerate({seeds}, start=1):\n"
            "    for error in run_seed(seed).failures.values():\n"
            "        print(json.dumps([seed, number, error]))\n"
            "        raise SystemExit\n"
        )
        environment = {**os.environ, "PYTHONPATH": name}
        run = subprocess.run(
            [sys.executable, "-"],
            input=program,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            return f"could not run: {run.stderr[-1000:]}"
        return _Catch(*json.loads(run.stdout)) if run.stdout else ""


def _verdict(catch: _Catch | str, recorded: int | None) -> str:
    stale = "" if recorded is None else f"seed {recorded} finds it no more"
    if not isinstance(catch, _Catch):
        remedy = "; does the simulator still look for it? more SEEDS may find another seed, which ARGS=--record writes"
        return catch or f"NOT CAUGHT: {stale or 'no seed is recorded'}{remedy}"
    error = f"caught by seed {catch.seed}, number {catch.number}: {catch.error[:100]}".replace("\n", " ")
    return (
        error if catch.seed == recorded else f"{error}; {stale or 'it was not recorded'}: ARGS=--record writes this one"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of mutants; all by default")
    parser.add_argument("--seeds", type=int, default=5000, help="at most so many seeds each (default 5000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--record", action="store_true", help=f"write the seeds that found them to {FOUND_BY.name}")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or any(name in m.name for name in arguments.names)]
    if faults := "".join(map(misplaced, chosen)):
        raise SystemExit(faults)
    found_by, started, num_caught = recorded_seeds(), time.perf_counter(), 0
    caught_by = dict(found_by)

    def hunt(mutant: Mutant) -> _Catch | str:
        return _hunt(mutant, found_by.get(mutant.name), arguments.seeds, arguments.first)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutant, catch in zip(chosen, pool.map(hunt, chosen), strict=True):
            print(f"{mutant.name}: {_verdict(catch, found_by.get(mutant.name))}", flush=True)
            if isinstance(catch, _Catch):
                num_caught += 1
                caught_by[mutant.name] = catch.seed
    if arguments.record:
        kept = {mutant.name: caught_by[mutant.name] for mutant in MUTANTS if mutant.name in caught_by}
        FOUND_BY.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{num_caught} of {len(chosen)} caught in {time.perf_counter() - started:.0f} s")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
