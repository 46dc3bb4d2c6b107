"""The sampler compared with a simple implementation of each parameter, one row at a time, in float64."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagewire.common.wire.messages import Candidates, Logprobs, SamplingParams
from pagewire.kernels.cpu import NATIVE
from pagewire.kernels.cpu.sampler import CpuSampler, TorchSampler
from pagewire.kernels.sampling import _in_order, _lowest_of_equals, logprob_columns, most_likely
from testing.kernels.variants import load_variant
from testing.worker import drawing
from testing.worker.drawing import Draws, SamplingRow

VOCAB_SIZE = 60


_samplers: list[CpuSampler | TorchSampler] = [TorchSampler()]


@pytest.fixture(autouse=True, params=["torch", "c"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the sampler that `draw` uses."""
    if request.param == "c":
        monkeypatch.setitem(globals(), "_samplers", [CpuSampler(load_variant(NATIVE).library)])


def row(
    index: int, sampling: SamplingParams, tokens: Sequence[int] = (1, 2), prompt: int = 1, seed: int = 0
) -> SamplingRow:
    return SamplingRow(index, sampling, np.array(tokens, np.int32), prompt, seed, 0)


def random_logits(seed: int, num_rows: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    print("seed", seed)
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, *rows: SamplingRow) -> Draws:
    return drawing.draw(logits, rows, *_samplers)


# Greedy


def test_greedy_takes_the_highest_and_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(3, 9)
    logits[0, 4] = logits[0, 7] = 1.0
    logits[2, 8] = 0.5
    assert draw(logits) == Draws([4, 0, 8], [False] * 3, Logprobs(), Candidates())


def test_nan_fails_its_row_only() -> None:
    logits = random_logits(1, 4)
    expected = draw(logits, row(2, SamplingParams(temperature=1.0, num_logprobs=1))).token_ids
    broken = logits.clone()
    broken[1, 17] = float("nan")
    broken[3] = float("nan")
    special = [row(i, SamplingParams(temperature=1.0, top_p=0.9, num_logprobs=1)) for i in (1, 3)]
    samples = draw(broken, special[0], row(2, SamplingParams(temperature=1.0, num_logprobs=1)), special[1])
    assert samples.is_nan == [False, True, False, True]
    assert samples.token_ids == [expected[0], 0, expected[2], 0]
    assert len(samples.logprobs.chosen) == 1


def test_infinite_bias_is_not_nan() -> None:
    logits = random_logits(2, 2)
    forced = SamplingParams(
        logit_bias_token_ids=(5, 6), logit_bias_values=(math.inf, -math.inf), num_logprobs=0, temperature=0.5
    )
    samples = draw(logits, row(0, forced), row(1, replace(forced, temperature=0.0)))
    assert samples.token_ids == [5, 5]
    assert samples.is_nan == [False, False]
    assert samples.logprobs.chosen == (0.0, 0.0)


# Adjustments


def test_logit_bias_is_added() -> None:
    logits = torch.zeros(1, 9)
    biased = SamplingParams(logit_bias_token_ids=(3, 4), logit_bias_values=(1.0, 1.5))
    assert draw(logits, row(0, biased)).token_ids == [4]


def test_stop_tokens_cannot_be_chosen_before_min_tokens() -> None:
    logits = torch.zeros(1, 9)
    logits[0, 3], logits[0, 4] = 5.0, 4.0
    sampling = SamplingParams(min_tokens=2, stop_token_ids=(3, 2**31))
    assert draw(logits, row(0, sampling, tokens=(1, 7), prompt=1)).token_ids == [4]
    assert draw(logits, row(0, sampling, tokens=(1, 7, 7), prompt=1)).token_ids == [3]


def adjusted_by_hand(logits: torch.Tensor, special: SamplingRow) -> torch.Tensor:
    values, sampling = logits.double().clone(), special.sampling
    for token_id, bias in zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True):
        values[token_id] += bias
    if special.num_output_tokens < sampling.min_tokens:
        values[list(sampling.stop_token_ids)] = -math.inf
    output = special.output_token_ids.tolist()
    for token_id in set(special.token_ids.tolist()):
        penalty = sampling.repetition_penalty
        values[token_id] = values[token_id] / penalty if values[token_id] > 0 else values[token_id] * penalty
    for token_id in set(output):
        values[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token_id)
    return values


def random_row(index: int, rng: random.Random) -> SamplingRow:
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
    biased = tuple(rng.sample(range(VOCAB_SIZE), rng.randrange(4)))
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 1, 5, VOCAB_SIZE, 1000]),
        top_p=rng.choice([1.0, 0.9, 0.3, 0.001]),
        min_p=rng.choice([0.0, 0.05, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.5, 0.7]),
        presence_penalty=rng.choice([0.0, 0.8, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.4, -0.2]),
        logit_bias_token_ids=biased,
        logit_bias_values=tuple(rng.uniform(-3, 3) for _ in biased),
        min_tokens=rng.choice([0, 20]),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 2)),
        num_logprobs=rng.choice([None, 0, 3, 100]),
    )
    return SamplingRow(index, sampling, np.array(tokens, np.int32), rng.randrange(1, len(tokens) + 1), index, 0)


@pytest.mark.parametrize("seed", range(8))
def test_logprobs_are_of_the_adjusted_logits(seed: int) -> None:
    rng = random.Random(seed)
    logits = random_logits(seed, 12)
    rows = [random_row(index, rng) for index in range(12)]
    samples = draw(logits, *rows)
    position = top = 0
    for special in rows:
        num_logprobs = special.sampling.num_logprobs
        if num_logprobs is None:
            continue
        expected = adjusted_by_hand(logits[special.index], special).log_softmax(0)
        token_id = samples.token_ids[special.index]
        assert samples.logprobs.chosen[position] == pytest.approx(expected[token_id].item(), abs=1e-4)
        assert samples.logprobs.ranks[position] == int((expected > expected[token_id]).sum()) + 1
        end = top + min(num_logprobs, VOCAB_SIZE)
        values = expected.sort(descending=True).values[: end - top]
        assert list(samples.logprobs.top_logprobs[top:end]) == pytest.approx(values.tolist(), abs=1e-4)
        assert len(set(samples.logprobs.top_token_ids[top:end])) == end - top
        position, top = position + 1, end
    assert (position, position) == (len(samples.logprobs.chosen), len(samples.logprobs.ranks))
    assert (top, top) == (len(samples.logprobs.top_token_ids), len(samples.logprobs.top_logprobs))


@pytest.mark.parametrize("seed", range(4))
def test_most_likely_tokens_do_not_depend_on_other_rows(seed: int) -> None:
    """Equal logits are ordered by token id, impossible tokens included, whatever other rows ask for."""
    logits = random_logits(seed, 3).round()
    logits[:, ::3] = -math.inf
    expected = logits[1].sort(descending=True, stable=True).indices.tolist()
    for num_tops, num_others in itertools.product((1, 7, VOCAB_SIZE), (None, 0, 1, 40, VOCAB_SIZE)):
        rows = [row(1, SamplingParams(num_logprobs=num_tops)), row(2, SamplingParams(num_logprobs=num_others))]
        top_token_ids = draw(logits, *rows).logprobs.top_token_ids
        assert list(top_token_ids[:num_tops]) == expected[:num_tops]


@pytest.mark.parametrize("num_top", [0, 1, 5, 40, VOCAB_SIZE])
def test_rows_with_ties_and_without_are_ordered_alike(num_top: int) -> None:
    """Ties are ordered by token id, also on a device, where all rows are checked for ties."""
    logits = random_logits(3, 6)
    logits[::2] = logits[::2].round()
    logits[1, 3:] = -math.inf
    expected = logits.sort(descending=True, stable=True).indices[:, :num_top]
    assert torch.equal(most_likely(logits, num_top), expected)
    if num_top:
        found = logits.topk(num_top)
        in_order = _in_order(found.values, found.indices)
        assert torch.equal(_lowest_of_equals(logits, in_order, found.values[:, -1:]), expected)


def test_logprob_columns_count_ranks_from_one() -> None:
    logprobs = torch.tensor([[0.1, 0.4, 0.4, 0.1]]).log()
    _, ranks, top_token_ids, _ = logprob_columns(logprobs.expand(3, 4), torch.tensor([1, 2, 3]), 2)
    assert ranks.tolist() == [1, 1, 3]
    assert top_token_ids.tolist() == [[1, 2]] * 3


# Draws


def kept_by_hand(values: torch.Tensor, sampling: SamplingParams) -> set[int]:
    """Return the tokens that temperature, top-k, top-p and min-p keep. `values` has no ties."""
    order = (values / sampling.temperature).sort(descending=True)
    num_kept = min(sampling.top_k or len(values), len(values))
    probabilities = order.values[:num_kept].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    if sampling.top_p < 1.0:
        num_kept = max(1, int((before < sampling.top_p).sum()))
    ratio = (order.values[:num_kept] - order.values[0]).exp()
    return {int(token) for token, part in zip(order.indices[:num_kept], ratio, strict=True) if part >= sampling.min_p}


@pytest.mark.parametrize("seed", range(6))
def test_draws_are_of_what_the_filters_leave(seed: int) -> None:
    rng = random.Random(100 + seed)
    logits = random_logits(seed, 1)
    special = random_row(0, rng)
    special = replace(special, sampling=replace(special.sampling, temperature=1.2))
    kept = kept_by_hand(adjusted_by_hand(logits[0], special), special.sampling)
    rows = [replace(special, index=i, seed=i) for i in range(600)]
    drawn = set(draw(logits.expand(600, -1), *rows).token_ids)
    assert drawn <= kept
    assert len(drawn) >= min(len(kept), 5)


def test_tokens_of_equal_logits_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    rows = [row(i, SamplingParams(temperature=1.0, top_k=2), seed=i) for i in range(300)]
    assert set(draw(logits.expand(300, -1), *rows).token_ids) == {0, 1, 2, 3}


def test_draws_follow_the_distribution() -> None:
    """Chi-square of 20,000 draws over 20 tokens: 19 degrees of freedom, 43.8 is exceeded once in a thousand."""
    logits = random_logits(3, 1, vocab_size=20) / 3
    num_draws = 20_000
    rows = [row(i, SamplingParams(temperature=0.8), tokens=(1,) * (1 + i % 7), seed=i // 7) for i in range(num_draws)]
    counts = np.bincount(draw(logits.expand(num_draws, -1), *rows).token_ids, minlength=20)
    expected = num_draws * (logits[0].double() / 0.8).softmax(0).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


def test_row_draws_the_same_alone_and_in_a_batch() -> None:
    rng = random.Random(5)
    logits = random_logits(5, 30)
    rows = [random_row(index, rng) for index in range(30)]
    together = draw(logits, *rows)
    for special in rows:
        alone = draw(logits[special.index : special.index + 1], replace(special, index=0))
        assert alone.token_ids[0] == together.token_ids[special.index]


def test_tiny_temperature_is_greedy() -> None:
    logits = random_logits(6, 1)
    assert draw(logits, row(0, SamplingParams(temperature=1e-40))).token_ids == draw(logits).token_ids


def test_special_rows_leave_the_others_alone() -> None:
    logits = random_logits(7, 5)
    plain = draw(logits).token_ids
    mixed = draw(logits, row(2, SamplingParams(temperature=5.0, repetition_penalty=1.2), seed=3)).token_ids
    assert mixed[:2] + mixed[3:] == plain[:2] + plain[3:]


# Beams


@pytest.mark.parametrize("seed", range(6))
def test_candidates_are_the_most_likely_tokens_by_the_adjusted_logits(seed: int) -> None:
    rng = random.Random(200 + seed)
    logits = random_logits(seed, 8)
    rows = [random_row(index, rng) for index in range(8)]
    nums = [rng.choice([None, 1, 2, 8, VOCAB_SIZE, 1000]) for _ in rows]
    rows = [
        replace(special, sampling=replace(special.sampling, num_candidates=num))
        for special, num in zip(rows, nums, strict=True)
    ]
    samples = draw(logits, *rows)
    others = [special for special in rows if special.sampling.num_candidates is None]
    expected_ids: list[int] = []
    expected_logprobs: list[float] = []
    expected_counts: list[int] = []
    for special in rows:
        if special.sampling.num_candidates is not None:
            logprobs = adjusted_by_hand(logits[special.index], special).log_softmax(0)
            best = logprobs.topk(min(special.sampling.num_candidates, VOCAB_SIZE))
            # Suppressed tokens are no candidates.
            possible = best.values.isfinite()
            expected_counts.append(int(possible.sum()))
            expected_ids += best.indices[possible].tolist()
            expected_logprobs += best.values[possible].tolist()
    assert list(samples.candidates.token_ids) == expected_ids
    assert list(samples.candidates.counts) == expected_counts
    assert list(samples.candidates.logprobs) == pytest.approx(expected_logprobs, abs=1e-4)
    # The other rows' results contain nothing of a beam.
    alone = draw(logits, *others)
    assert samples.logprobs == alone.logprobs
    assert [samples.token_ids[special.index] for special in others] == [
        alone.token_ids[special.index] for special in others
    ]


def test_candidates_equal_plain_log_softmax() -> None:
    logits = random_logits(8, 3, vocab_size=4000)
    beams = [row(index, SamplingParams(num_candidates=8)) for index in (0, 2)]
    best = logits[[0, 2]].log_softmax(1).topk(8, dim=1)
    candidates = draw(logits, *beams).candidates
    assert list(candidates.token_ids) == best.indices.flatten().tolist()
    assert list(candidates.logprobs) == best.values.flatten().tolist()


def test_beam_without_log_probabilities_fails_alone() -> None:
    logits = random_logits(9, 5)
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[4, 3] = math.inf
    beams = [row(index, SamplingParams(num_candidates=2)) for index in range(4)]
    samples = draw(logits, *beams)
    assert samples.is_nan == [False, True, True, False, False]
    assert samples.token_ids[4] == 3  # without log-probabilities, an infinite logit is the highest
    expected = logits[[0, 3]].log_softmax(1).topk(2, dim=1).indices.flatten().tolist()
    assert list(samples.candidates.token_ids) == expected
