"""The cost model that chooses between swapping and recomputation."""

import pytest

from scheduler_service.core.cost import CostModel, PreemptionMode

BLOCK_BYTES = 1000
BANDWIDTH = 1e6  # bytes per second: moving a block takes 1 ms in one direction


def model(mode: PreemptionMode = PreemptionMode.AUTO, rates: tuple[float, ...] = (), bandwidth: float = BANDWIDTH):
    """Return a cost model that has observed a first step, and then a step of 100 prompt tokens at each rate.

    `rates` and `bandwidth`: tokens and bytes per second.
    """
    cost = CostModel(mode, BLOCK_BYTES, bandwidth)
    for rate in (1.0, *rates):
        cost.observe_step(100, 100, 100 / rate)
    return cost


def test_first_step_and_decode_steps_do_not_change_the_rate() -> None:
    cost = model()
    assert cost.prefill_rate is None
    cost.observe_step(100, 74, 0.1)
    cost.observe_step(100, 100, 0.0)
    cost.observe_step(0, 0, 0.1)
    assert cost.prefill_rate is None
    cost.observe_step(100, 75, 0.1)
    assert cost.prefill_rate == pytest.approx(1000.0)


def test_outliers_do_not_move_the_rate() -> None:
    assert model(rates=(1000.0, 1100.0, 5.0, 1050.0, 9e9)).prefill_rate == pytest.approx(1050.0)


def test_small_prompts_hardly_count() -> None:
    cost = model(rates=(1000.0,))
    for _ in range(10):
        cost.observe_step(5, 5, 0.1)
    assert cost.prefill_rate == pytest.approx(1000.0)


def test_the_rate_follows_what_the_worker_does_now() -> None:
    cost = model(rates=(1000.0,) * 100 + (500.0,) * 20)
    assert cost.prefill_rate == pytest.approx(500.0)


def test_auto_takes_the_cheaper() -> None:
    cost = model(rates=(1000.0,))  # computing a token takes 1 ms
    assert cost.prefers_swap(num_blocks=4, num_tokens=9)
    assert not cost.prefers_swap(num_blocks=4, num_tokens=7)
    assert cost.prefers_load(num_blocks=4, num_tokens=5)
    assert not cost.prefers_load(num_blocks=4, num_tokens=3)


def test_while_the_rate_is_unknown_auto_moves() -> None:
    assert model().prefers_swap(100, 1)
    assert model().prefers_load(100, 1)


def test_the_mode_forces() -> None:
    assert model(PreemptionMode.SWAP, (1000.0,)).prefers_swap(100, 1)
    assert not model(PreemptionMode.RECOMPUTE, (1000.0,)).prefers_swap(1, 100)
    assert model(PreemptionMode.RECOMPUTE, (1000.0,)).prefers_load(1, 100)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_without_host_blocks_nothing_moves(mode: PreemptionMode) -> None:
    cost = model(mode, bandwidth=0.0)
    assert not cost.prefers_swap(1, 100)
    assert not cost.prefers_load(1, 100)


def test_prompt_token_budget_beside_decoding_rows() -> None:
    cost = model(rates=(1000.0,))
    assert cost.max_prompt_tokens(2.0) is None
    for seconds in (0.030, 0.030, 0.9, 0.030):
        cost.observe_step(8, 0, seconds)
    assert cost.max_prompt_tokens(2.0) == 30
    assert cost.max_prompt_tokens(1.8) == 24
    assert cost.max_prompt_tokens(1.0) == 4  # never 0: a prompt must make progress
    assert model().max_prompt_tokens(2.0) is None
