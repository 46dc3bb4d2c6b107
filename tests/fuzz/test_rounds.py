"""A short campaign. `make fuzz` runs long ones."""

import pytest

from testing.kernels.compiler import skip_without_compiler
from tests.fuzz import fuzz_round
from tests.fuzz.fuzz_round import CALM, run_round
from tests.fuzz.random_spelling import spell_randomly
from tests.fuzz.setting import WEIGHTS


@pytest.mark.parametrize("seed", [23])
async def test_concurrent_requests_equal_isolated_requests(seed: int) -> None:
    skip_without_compiler()
    report = await run_round(seed, 40)
    print(f"seed {seed}: {report}")
    assert not report.faults, "\n".join(report.faults)
    assert report.num_interrupted > 0
    assert report.num_over_http > 5
    assert report.num_tokens > 300


async def test_a_request_that_yields_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In company the model is computed in bfloat16, so that its outputs differ."""
    skip_without_compiler()
    with_weights = fuzz_round._with_weights
    monkeypatch.setattr(
        fuzz_round,
        "_with_weights",
        lambda flags, weights: with_weights(flags, weights if flags is CALM else WEIGHTS["bfloat16"]),
    )
    report = await run_round(30, 4)
    assert any(fault.startswith("request ") and "DrawnRequest(" in fault for fault in report.faults)


def test_random_texts_are_spelled_or_refused() -> None:
    print("seed 1")
    num_texts, faults = spell_randomly(1)
    assert num_texts > 100
    assert not faults, "\n".join(faults)
