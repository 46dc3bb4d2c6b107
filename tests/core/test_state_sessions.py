"""Conversations with a model whose sequences have states: a follow-up finds the state after its history."""

import pytest

from tests.core.system import System, prompt_of


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_output_tokens", range(5, 10))
def test_follow_up_computes_its_new_turn_and_at_most_one_block_with_its_last_answer(
    depth, block_size, num_output_tokens
):
    """The last token of an answer was never computed. Up to this token, less than one block is computed again."""
    system = System(num_states=24, num_blocks=400 // block_size, block_size=block_size, budget=16, depth=depth)
    system.join()
    history = prompt_of(30)
    for turn in range(4):
        (sequence_id,) = system.add(history, num_output_tokens)
        system.run()
        num_computed = len(history) - system.ended[sequence_id].num_cached_tokens
        assert num_computed == 30 if turn == 0 else num_computed <= 7 + block_size + 1
        history = [*history, *system.tokens[sequence_id], *prompt_of(7, turn + 1)]
    system.assert_exact()


def test_second_request_with_a_long_prefix_in_common_saves_the_state_where_they_part():
    system = System(num_states=24, num_blocks=200, budget=16)
    system.join()
    shared = prompt_of(22)
    num_cached = []
    for i in range(3):
        (sequence_id,) = system.add([*shared, *prompt_of(30, i + 1)], 4)
        system.run()
        num_cached.append(system.ended[sequence_id].num_cached_tokens)
    assert num_cached[0] == 0
    assert num_cached[2] == 20
    system.assert_exact()
