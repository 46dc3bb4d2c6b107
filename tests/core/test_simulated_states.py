"""The states of the simulated worker: its rows follow the protocol, and a plan that breaks a rule is an error."""

import pytest

from pagewire.common.wire.messages import (
    FIRST_STATE_ID,
    AddedGrammar,
    GrammarKind,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepPlan,
    StepResult,
)
from testing.core.simulated_states import RowStates
from testing.core.simulated_worker import SimulatedWorker, digest_all, reference

VOCAB = 97
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13)
GRAMMAR = AddedGrammar(1, GrammarKind.REGEX, "7 100 none 0", (2,))


class Machine:
    """A simulated worker with six states, two of them in its host's memory, and the plans that it has executed."""

    def __init__(self, num_states: int = 6) -> None:
        self.worker = SimulatedWorker(20, 4, VOCAB, 4, 64, 8, num_states=num_states, num_host_states=2)

    def step(self, *, work=(), saves=(), outs=(), ins=(), apply_moves=True, **columns) -> StepResult:
        """Execute a plan: `work` has (slot, number of tokens), `saves` (slot, position, state), `outs` and `ins`
        (device state, host state)."""
        work_slots, work_num_tokens = zip(*work, strict=True) if work else ((), ())
        save_slots, save_positions, save_states = zip(*saves, strict=True) if saves else ((), (), ())
        plan = StepPlan(
            1,
            self.worker.last_step + 1,
            work_slots=work_slots,
            work_num_tokens=work_num_tokens,
            save_slots=save_slots,
            save_positions=save_positions,
            save_states=save_states,
            swap_out_device_blocks=tuple(FIRST_STATE_ID + device for device, _ in outs),
            swap_out_host_blocks=tuple(FIRST_STATE_ID + host for _, host in outs),
            swap_in_device_blocks=tuple(FIRST_STATE_ID + device for device, _ in ins),
            swap_in_host_blocks=tuple(FIRST_STATE_ID + host for _, host in ins),
            **columns,
        )
        return self.worker.execute(plan, apply_moves)

    def state(self, state: int, *, on_host: bool = False) -> list[int]:
        return (self.worker.host_kv if on_host else self.worker.kv)[FIRST_STATE_ID + state]


def opening(slot=0, *, read=0, own=(1,), computed=0, prompt=PROMPT, blocks=None, **fields) -> RowOpening:
    """Return the opening of a row whose blocks are those of its slot, if not given."""
    blocks = tuple(range(5 * slot + 1, 5 * slot + 6)) if blocks is None else blocks
    fields = {"sampling": SamplingParams(), **fields}
    return RowOpening(
        slot, slot, prompt, len(prompt), computed, blocks, seed=0, sample_index=0, read_state=read, own_states=own,
        **fields,
    )  # fmt: skip


def after(num_tokens: int, tokens=PROMPT) -> list[int]:
    """Return the content of the state after the first tokens."""
    return [num_tokens, digest_all(tokens[:num_tokens])]


def output(num: int) -> list[int]:
    return reference(PROMPT, num, seed=0, sample_index=0, vocab_size=VOCAB)


# What rows write


def test_row_with_one_state_computes_in_place_and_saves_on_the_way():
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 5)], saves=[(0, 4, 2), (0, 0, 3)])
    assert [machine.state(i) for i in (1, 2, 3)] == [after(5), after(4), after(0)]
    machine.step(work=[(0, 4)], saves=[(0, 5, 4), (0, 9, 5)])
    assert [machine.state(i) for i in (1, 4, 5)] == [after(9), after(5), after(9)]
    machine.step()  # a row that has sampled decodes one token
    assert machine.state(1) == after(10, (*PROMPT, *output(1)))


def test_row_with_two_states_keeps_the_state_before_its_last_position():
    machine = Machine()
    machine.step(openings=(opening(own=(2, 1)),), work=[(0, 5)])
    assert [machine.state(i) for i in (2, 1)] == [after(4), after(5)]
    machine.step(work=[(0, 4)])
    assert [machine.state(i) for i in (1, 2)] == [after(8), after(9)]
    machine.step()
    assert [machine.state(i) for i in (2, 1)] == [after(9), after(10, (*PROMPT, *output(1)))]


def test_row_with_two_states_copies_a_state_of_others_before_it_computes_one_token():
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 9)], saves=[(0, 8, 5)])
    machine.step(openings=(opening(1, read=5, own=(2, 3), computed=8, blocks=(1, 2, 8)),), work=[(0, 0), (1, 1)])
    assert [machine.state(i) for i in (5, 2, 3)] == [after(8), after(8), after(9)]


def test_late_row_starts_again_from_the_state_before_its_last_position():
    machine = Machine()
    machine.worker.is_late = lambda num_tokens, step: step in (2, 3)
    machine.step(added_grammars=(GRAMMAR,))
    assert machine.worker.prepare(1) == ""
    row = opening(own=(1, 2), grammar_id=1)
    result = machine.step(openings=(row,), work=[(0, 9)], saves=[(0, 9, 3)])
    assert result.statuses == (RowStatus.LATE,)
    assert machine.worker.rows[0].states.read == 1
    result = machine.step(saves=[(0, 10, 4)])  # the scheduler does not know yet that the row was late
    assert result.statuses == (RowStatus.LATE,)
    assert machine.worker.rows[0].states.read == 1
    assert machine.step().token_ids
    assert [machine.state(i) for i in (1, 2, 3)] == [after(8), after(9), after(9)]
    assert FIRST_STATE_ID + 4 not in machine.worker.kv


def test_fork_reads_the_state_of_its_parent_and_writes_its_own():
    machine = Machine()
    beam = SamplingParams(num_candidates=2)
    machine.step(openings=(opening(own=(1, 2), sampling=beam),), work=[(0, 9)])
    machine.step(
        fork_source_slots=(0,),
        fork_target_slots=(1,),
        set_state_slots=(1,),
        set_state_firsts=(3,),
        set_state_seconds=(4,),
        copy_source_blocks=(3,),
        copy_target_blocks=(8,),
        set_block_tables=(1,),
        set_block_indexes=(2,),
        set_block_ids=(8,),
        append_token_slots=(0, 1),
        append_token_ids=(20, 21),
        work=[(0, 1), (1, 1)],
    )
    assert [machine.state(i) for i in (2, 1)] == [after(9), after(10, (*PROMPT, 20))]
    assert [machine.state(i) for i in (3, 4)] == [after(9), after(10, (*PROMPT, 21))]


def test_states_move_to_the_host_and_back():
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 8)])
    machine.step(released_slots=(0,), outs=[(1, 2)])
    machine.step(ins=[(3, 2)])
    assert machine.state(2, on_host=True) == machine.state(3) == after(8)
    result = machine.step(openings=(opening(1, read=3, computed=8, blocks=(1, 2, 3)),), work=[(1, 1)])
    assert result.token_ids == tuple(output(1))


def test_state_after_invalid_tokens_makes_the_rows_that_read_it_invalid():
    machine = Machine()
    machine.worker.bad_sequences = {0: RowStatus.NAN_LOGITS}
    machine.step(openings=(opening(),), work=[(0, 8)])
    assert machine.step(work=[(0, 1)], saves=[(0, 9, 2)]).statuses == (RowStatus.NAN_LOGITS,)
    longer = opening(1, read=2, own=(3,), computed=9, prompt=(*PROMPT, 1), blocks=(1, 2, 3))
    assert machine.step(released_slots=(0,), openings=(longer,), work=[(1, 1)]).statuses == (RowStatus.NAN_LOGITS,)


# Plans that break a rule


def refuses(machine: Machine, message: str, **plan) -> None:
    with pytest.raises(AssertionError, match=message):
        machine.step(**plan)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (opening(own=()), "a row has 0 states"),
        (opening(own=(1, 2, 3)), "a row has 3 states"),
        (opening(own=(7,)), "no such state"),
        (opening(own=(0,)), "no such state"),
        (opening(own=(1, 1)), "two rows write state 1"),
        (opening(computed=4), "has computed 4 tokens, and reads state 0"),
        (opening(read=3, computed=4), "reads state 3, which was never written"),
    ],
)
def test_opening_with_wrong_states_is_refused(row, message):
    machine = Machine()
    machine.step(openings=(opening(3, own=(6,)),), work=[(3, 4)])
    if row.block_ids and row.num_computed_tokens:
        machine.worker.kv[1] = machine.worker.kv[16]  # the row finds its K and V
    refuses(machine, message, openings=(row,), work=[(0, 1), (3, 0)])


def test_states_of_a_model_without_states_are_refused():
    refuses(Machine(num_states=0), "a row has states, but the model has none", openings=(opening(),), work=[(0, 1)])


@pytest.mark.parametrize(
    ("position", "message"),
    [(4, "which is after 4 tokens"), (9, "which is after 9 tokens"), (8, "of other tokens")],
)
def test_row_reads_only_the_state_after_its_own_computed_tokens(position, message):
    """The second row has the K and V of its own first 8 tokens, and the state of the first row."""
    machine = Machine()
    prompt = PROMPT if position != 8 else (4, *PROMPT[1:])
    machine.step(openings=(opening(),), work=[(0, 9)], saves=[(0, position, 2)])
    machine.step(openings=(opening(1, own=(3,), prompt=prompt),), work=[(0, 0), (1, 9)])
    reader = opening(2, read=2, own=(4,), computed=8, prompt=prompt, blocks=(6, 7, 11))
    refuses(machine, message, openings=(reader,), work=[(1, 0), (2, 1)])


def test_row_that_begins_does_not_read_what_the_last_owner_of_its_state_left():
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 9)])
    refuses(
        machine, "has computed 0 tokens, and reads state 1, which is after 9", released_slots=(0,),
        openings=(opening(1, read=1),), work=[(1, 9)],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("saves", "message"),
    [
        ([(0, 3, 2)], "computes 4 to 8, and does not pass 3"),
        ([(0, 9, 2)], "computes 4 to 8, and does not pass 9"),
        ([(0, 8, 1)], "a save writes state 1, which a row writes"),
        ([(0, 8, 2), (0, 4, 2)], "two saves write state 2"),
        ([(0, 8, 3)], "a save writes state 3, which a row reads"),
        ([(2, 4, 2)], "a save of slot 2, which computes nothing"),
        ([(0, 8, 7)], "no such state"),
    ],
)
def test_wrong_save_is_refused(saves, message):
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 4)], saves=[(0, 4, 3)])
    reader = opening(1, read=3, own=(4,), computed=4, blocks=(1, 7, 8))
    idle = opening(2, own=(5,))
    refuses(machine, message, openings=(reader, idle), work=[(0, 4), (1, 4)], saves=saves)


def test_row_does_not_read_a_state_in_the_plan_in_which_it_is_saved():
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 8)])
    reader = opening(1, read=2, own=(3,), computed=8, blocks=(1, 2, 8))
    refuses(
        machine, "a save writes state 2, which a row reads", openings=(reader,), work=[(0, 1), (1, 1)],
        saves=[(0, 8, 2)],
    )  # fmt: skip


def test_row_does_not_read_a_state_that_another_row_writes():
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 8)])
    reader = opening(1, read=1, own=(2,), computed=8, blocks=(1, 2, 8))
    refuses(machine, "slot 1 reads state 1, which slot 0 writes", openings=(reader,), work=[(0, 1), (1, 1)])


def test_fork_does_not_share_the_states_of_its_parent():
    machine = Machine()
    machine.step(openings=(opening(own=(1, 2), sampling=SamplingParams(num_candidates=2)),), work=[(0, 9)])
    fork = {"fork_source_slots": (0,), "fork_target_slots": (1,)}
    refuses(machine, "two rows write state [12]", **fork, append_token_slots=(0,), append_token_ids=(1,), work=[(0, 1)])


def test_row_that_was_not_forked_gets_no_other_states():
    machine = Machine()
    states = {"set_state_slots": (0,), "set_state_firsts": (1,), "set_state_seconds": (2,)}
    refuses(machine, "slot 0 gets other states, and is not forked", openings=(opening(),), **states)


def test_late_row_needs_two_states():
    with pytest.raises(AssertionError, match="a row is late and has one state"):
        RowStates(1, (1,)).go_back()


def test_states_of_unfinished_moves_are_neither_written_nor_read_too_early():
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 8)])
    machine.step(outs=[(1, 1)], work=[(0, 0)], apply_moves=False)
    with pytest.raises(AssertionError, match="S3"):
        machine.step(work=[(0, 1)], apply_moves=False)
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 8)])
    machine.step(outs=[(1, 1)], work=[(0, 0)])
    machine.step(ins=[(2, 1)], apply_moves=False)
    reader = opening(1, read=2, own=(3,), computed=8, blocks=(1, 2, 8))
    with pytest.raises(AssertionError, match="S4"):
        machine.step(openings=(reader,), work=[(1, 1)], apply_moves=False)


@pytest.mark.parametrize(("device", "host"), [(0, 1), (7, 1), (1, 0), (1, 3), (-FIRST_STATE_ID + 1, 1)])
def test_move_of_a_state_that_does_not_exist_is_refused(device, host):
    machine = Machine()
    machine.step(openings=(opening(),), work=[(0, 8)])
    refuses(machine, "no such|one end is a block, the other a state", outs=[(device, host)])
