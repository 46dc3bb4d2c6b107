"""Ownership of the core's state.

One function changes a group's state, according to a table. Each field is written by one module.
"""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from pagewire.common.wire.messages import SamplingParams
from scheduler_service.core.cache import Allocation
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.policy import create_policy
from scheduler_service.core.request import Request
from scheduler_service.core.retention import ReturnEstimate
from scheduler_service.core.sequence import TRANSITIONS, GroupState, Row, Sequence, SequenceGroup
from tests.core.system import System

CORE = Path(__file__).parents[2] / "scheduler_service" / "core"


def writes(name, owner):
    """Return, by module, the functions that assign an attribute `name`, if it may belong to the class `owner`."""
    found = {}
    for path in CORE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for function in ast.walk(node):
                if isinstance(function, ast.FunctionDef) and any(
                    isinstance(target, ast.Attribute)
                    and isinstance(target.ctx, ast.Store | ast.Del)
                    and target.attr == name
                    and (ast.unparse(target.value) != "self" or getattr(node, "name", "") == owner)
                    for target in ast.walk(function)
                ):
                    found.setdefault(path.relative_to(CORE).as_posix(), []).append(function.name)
    return found


def test_a_groups_state_is_changed_in_one_function():
    assert writes("state", "SequenceGroup") == {"lifecycle.py": ["_enter"]}
    assert "begin_epoch" in writes("row", "Sequence")["sequence.py"], "an assignment of several is not seen"


@pytest.mark.parametrize("record", [SequenceGroup, Sequence, Allocation, Row])
def test_no_field_is_written_by_two_modules(record):
    written = {field.name: writes(field.name, record.__name__) for field in fields(record)}
    assert sum(map(bool, written.values())) > 4
    assert not {name: found for name, found in written.items() if len(found) > 1}


def test_the_cache_knows_no_sequence():
    texts = [ast.unparse(ast.parse(path.read_text())) for path in (CORE / "cache").glob("*.py")]
    assert len(texts) > 4
    assert not [text for text in texts if "scheduler_service.core.sequence" in text]


def test_only_the_cache_accesses_block_tables():
    """Other modules ask the sequence's allocation.

    The invariants inspect it, and a plan sends a row's table to the worker.
    """
    tables = modules(lambda node: isinstance(node, ast.Attribute) and node.attr == "tables")
    assert {name for name in tables if not name.startswith("cache/")} == {"invariants.py", "worker_state.py"}


def test_in_flight_samples_of_a_row_count_until_dropped():
    system = System()
    [sequence_id] = system.add((1, 2, 3), 8)
    system.join()
    system.plan()
    state = system.scheduler.state
    sequence, drops = state.samples[sequence_id], state.worker.rows.drops
    row = sequence.open_row
    assert str(row) == f"slot 0 of sequence {sequence_id}: 3 of 4 tokens computed, decodes"
    state.worker.rows.vacate(row)
    assert (sequence.row, sequence.open_row, row.num_in_flight, row.is_dropped) == (row, None, 1, False)
    sequence.finish()
    sequence.finish()
    assert (sequence.row, row.num_in_flight, row.is_dropped, drops.num_drops) == (None, 0, True, 1)
    assert str(row) == f"slot -1 of sequence {sequence_id}: 3 of 4 tokens computed, vacated dropped"


def test_a_lost_worker_leaves_no_row_to_a_request():
    system = System()
    [sequence_id] = system.add((1, 2, 3), 8)
    system.join()
    system.plan()
    sequence = system.scheduler.state.samples[sequence_id]
    lost = sequence.allocation
    system.lose()
    assert lost.blocks
    assert (sequence.row, sequence.allocation.blocks, sequence.allocation.num_computed_tokens) == (None, set(), 0)


def test_groups_change_state_only_as_the_table_permits():
    lifecycle = Lifecycle(create_policy("priority"), ReturnEstimate)
    lifecycle.add(Request("a", "", (1, 2, 3), SamplingParams(), 4), 0.0)
    [group] = lifecycle.groups.values()
    with pytest.raises(AssertionError, match="a request that was waiting is swapped"):
        lifecycle._enter(group, GroupState.SWAPPED)


def test_the_table_leaves_every_state_a_way_to_the_end():
    assert {before for before, _ in TRANSITIONS} == set(GroupState) - {GroupState.FINISHED}
    assert {before for before, after in TRANSITIONS if after is GroupState.FINISHED} == {b for b, _ in TRANSITIONS}
    assert not [pair for pair in TRANSITIONS if pair[0] is pair[1]]


def modules(matches):
    """Return the modules of the core with an AST node for which `matches` is true."""
    trees = {path.relative_to(CORE).as_posix(): ast.parse(path.read_text()) for path in CORE.rglob("*.py")}
    return {name for name, tree in trees.items() if any(map(matches, ast.walk(tree)))}


def is_epoch(node):
    return getattr(node, "attr", getattr(node, "id", "")) in ("worker", "_worker")


def test_only_the_scheduler_asks_whether_a_worker_is_there():
    """Other modules get the worker as an argument, never None. `explain` describes the state without a worker."""
    asks = modules(lambda node: isinstance(node, ast.Attribute) and node.attr == "has_worker")
    assert asks == {"scheduler.py", "explain.py", "worker_state.py"}
    reads = modules(lambda node: isinstance(node, ast.Attribute) and is_epoch(node))
    assert reads == {"scheduler.py", "lifecycle.py", "explain.py", "invariants.py", "openings.py"}

    def takes_it_for_absent(node):
        if isinstance(node, ast.Compare):
            return is_epoch(node.left) and "None" in map(ast.unparse, node.comparators)
        if isinstance(node, ast.BoolOp):
            return any(map(is_epoch, node.values))
        return is_epoch(getattr(node, "test", None)) or is_epoch(getattr(node, "operand", None))

    assert takes_it_for_absent(ast.parse("x = 1 if state.worker else 2").body[0].value)
    assert not modules(takes_it_for_absent)
    assert not modules(lambda node: isinstance(node, ast.BinOp) and ast.unparse(node) == "WorkerState | None")
