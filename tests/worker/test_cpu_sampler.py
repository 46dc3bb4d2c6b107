"""The sampler in C gives the same tokens as the one in plain torch, for any parameters and every kernel variant."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.common.wire.messages import RowOpening, SamplingParams
from pagewire.kernels.cpu import CpuKernels
from pagewire.kernels.cpu.library import VARIANTS
from pagewire.kernels.cpu.sampler import CpuSampler, TokenHistory, TorchSampler, choose
from pagewire.kernels.sampling import LARGEST, SampledTokens, SamplingColumns
from testing.kernels.variants import load_variant
from testing.seeds import seeded
from worker_service.rows.sampling import SamplingTable

pytestmark = pytest.mark.one_of_each

MAX_NUM_TOKENS = 60
SPECIAL = (math.nan, math.inf, -math.inf, LARGEST, -LARGEST)


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.0, 1e-40, 50.0]),
        top_k=rng.choice([0, 0, 1, 5, 50, vocab_size, 2 * vocab_size]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3, 0.001, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0, 1e-30]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.5, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 0.8, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4, -0.2]),
    )


def with_edits(params: SamplingParams, rng: random.Random, vocab_size: int) -> SamplingParams:
    biased = tuple(rng.sample(range(vocab_size), rng.randrange(min(4, vocab_size))))
    return replace(
        params,
        logit_bias_token_ids=biased,
        logit_bias_values=tuple(rng.choice([1.5, -1.5, math.inf, -math.inf]) for _ in biased),
        min_tokens=rng.choice([0, 20]),
        stop_token_ids=(rng.randrange(vocab_size), vocab_size),
        num_logprobs=rng.choice([None, 0, 3]),
    )


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Return logits, some with ties or invalid values, as rows of a wider tensor, as for a padded vocabulary."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(num_rows, vocab_size + 3, generator=generator)[:, :vocab_size]
    logits *= rng.choice([0.0, 0.01, 1.0, 3.0, 20.0])
    if rng.random() < 0.3:
        logits.round_()
    if rng.random() < 0.2:
        logits[rng.randrange(num_rows), rng.randrange(vocab_size)] = rng.choice(SPECIAL)
    if rng.random() < 0.1:
        logits[rng.randrange(num_rows)] = -math.inf
    if rng.random() < 0.1:
        logits[:, ::2] = -math.inf
    return logits


def opened(rows: list[SamplingParams], rng: random.Random, vocab_size: int, num_prompt_tokens: int) -> SamplingTable:
    table = SamplingTable(len(rows), vocab_size)
    for slot, params in enumerate(rows):
        seed, sample_index = rng.randrange(1 << 64), rng.randrange(1 << 32)
        table.open(RowOpening(slot, slot, (), num_prompt_tokens, 0, (), params, seed, sample_index))
    return table


def random_history(rng: random.Random, num_rows: int, vocab_size: int, num_prompt_tokens: int) -> TokenHistory:
    tokens = np.random.default_rng(rng.randrange(1 << 30)).integers(0, vocab_size, (num_rows, MAX_NUM_TOKENS))
    return TokenHistory(tokens.astype(np.int32), np.full(num_rows, num_prompt_tokens))


def with_masks(columns: SamplingColumns, rng: random.Random, vocab_size: int) -> SamplingColumns:
    """Return columns in which some rows permit only some tokens: few, half or most of them."""
    num_rows, num_masks = len(columns.seeds), 3
    draws = np.random.default_rng(rng.randrange(1 << 30))
    is_allowed = draws.random((num_masks, vocab_size)) < np.array([[0.01], [0.5], [0.98]])
    is_allowed[np.arange(num_masks), draws.integers(0, vocab_size, num_masks)] = True
    masks = np.zeros((num_masks, -(-vocab_size // 32) * 32), np.bool_)
    masks[:, :vocab_size] = is_allowed
    words = np.packbits(masks, axis=1, bitorder="little").view(np.int32)
    lines = draws.integers(-1, num_masks, num_rows).astype(np.int32)
    return columns._replace(masks=torch.from_numpy(words), mask_lines=torch.from_numpy(lines))


def assert_same(found: SampledTokens, expected: SampledTokens) -> None:
    assert found.is_nan.tolist() == expected.is_nan.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    good = ~expected.is_nan
    for name in ("logprobs", "ranks", "top_logprobs"):
        torch.testing.assert_close(getattr(found, name)[good], getattr(expected, name)[good], equal_nan=True)


@pytest.mark.parametrize("seed", range(60))
def test_tokens_equal_those_of_plain_torch(kernels: CpuKernels, seed: int) -> None:
    rng = seeded(seed)
    num_rows, vocab_size = rng.choice([1, 3, 24]), rng.choice([1, 2, 15, 17, 60, 1000, 4096])
    rows = [random_params(rng, vocab_size) for _ in range(num_rows)]
    if rng.random() < 0.5:
        rows = [with_edits(params, rng, vocab_size) for params in rows]
    num_prompt_tokens = rng.randrange(1, MAX_NUM_TOKENS)
    table = opened(rows, rng, vocab_size, num_prompt_tokens)
    num_tokens = np.array([rng.randrange(num_prompt_tokens, MAX_NUM_TOKENS + 1) for _ in rows])
    step = table.of_step(np.arange(num_rows), num_tokens)
    columns, history = table.columns(step), random_history(rng, num_rows, vocab_size, num_prompt_tokens)
    if seed % 3 == 0:
        columns = with_masks(columns, rng, vocab_size)
    logits = random_logits(rng, num_rows, vocab_size)
    arguments = (columns, history, step.max_reported)
    expected = TorchSampler().sample(logits.clone(), *arguments)
    given = torch.empty(num_rows, vocab_size + 3)[:, :vocab_size].copy_(logits)
    assert_same(CpuSampler(kernels.library).sample(given, *arguments), expected)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_a_table_draw_what_the_same_rows_draw_by_themselves(kernels: CpuKernels, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(1000 + seed)
    num_slots, vocab_size, num_prompt_tokens = 12, 500, 7
    rows = [random_params(rng, vocab_size) for _ in range(num_slots)]
    table = opened(rows, rng, vocab_size, num_prompt_tokens)
    history = random_history(rng, num_slots, vocab_size, num_prompt_tokens)
    slots = np.array(sorted(rng.sample(range(num_slots), 5)))
    num_tokens = np.array([rng.randrange(num_prompt_tokens, MAX_NUM_TOKENS + 1) for _ in slots])
    assert table.takes_token[slots].all()
    logits = random_logits(rng, len(slots), vocab_size).contiguous()
    columns = table.columns(table.of_step(slots, num_tokens))
    masks = None
    if seed % 2:
        columns = with_masks(columns, rng, vocab_size)
        assert columns.masks is not None
        assert columns.mask_lines is not None
        masks = columns.masks.numpy(), columns.mask_lines.numpy()
    expected = TorchSampler().sample(logits.clone(), columns, history)
    sampler = CpuSampler(kernels.library).of_table(table.all_columns(), history)
    token_ids, is_nan = sampler.sample_tokens(logits, slots, num_tokens, masks=masks)
    assert token_ids.tolist() == expected.token_ids.tolist()
    assert is_nan.tolist() == expected.is_nan.tolist()


FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
}


@pytest.mark.parametrize("name", FILTERS)
def test_large_vocabularies_and_many_draws(kernels: CpuKernels, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only few rows may be left to plain torch, so that the test checks the kernel itself."""
    rng = random.Random(7)
    num_rows, vocab_size = 40, 32_003
    rows = [SamplingParams(temperature=rng.choice([0.7, 1.0, 1.5]), **FILTERS[name]) for _ in range(num_rows)]
    table, history = opened(rows, rng, vocab_size, 1), random_history(rng, num_rows, vocab_size, 1)
    columns = table.columns(table.of_step(np.arange(num_rows), np.full(num_rows, 9)))
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7)) * 2.5
    expected = TorchSampler().sample(logits.clone(), columns, history)
    left = []

    def counted(logits: torch.Tensor, columns: SamplingColumns, rows: np.ndarray) -> np.ndarray:
        left.extend(rows.tolist())
        return choose(logits, columns, rows)

    monkeypatch.setattr("pagewire.kernels.cpu.sampler.choose", counted)
    assert_same(CpuSampler(kernels.library).sample(logits, columns, history), expected)
    assert len(left) <= 1


def test_scores_that_round_alike_are_left_to_plain_torch(kernels: CpuKernels) -> None:
    """With top-p 0.5 and two tokens of probability 1/2, rounding decides whether the second token is kept."""
    rows = [SamplingParams(temperature=1.0, top_p=0.5)] * 32
    rng = random.Random(3)
    table, history = opened(rows, rng, 2, 1), random_history(rng, len(rows), 2, 1)
    columns = table.columns(table.of_step(np.arange(len(rows)), np.full(len(rows), 3)))
    logits = torch.tensor([[0.0, -1e-7]]).repeat(len(rows), 1)
    expected = TorchSampler().sample(logits.clone(), columns, history)
    assert_same(CpuSampler(kernels.library).sample(logits, columns, history), expected)


def test_arguments_that_do_not_fit_are_refused(kernels: CpuKernels) -> None:
    rng = random.Random(0)
    table, history = opened([SamplingParams()] * 2, rng, 9, 1), random_history(rng, 2, 9, 1)
    sampler = CpuSampler(kernels.library)
    columns = table.columns(table.of_step(np.arange(2), np.full(2, 3)))
    with pytest.raises(ValueError, match="contiguous rows of float32"):
        sampler.sample(torch.zeros(2, 9, dtype=torch.float64), columns, history)
    with pytest.raises(ValueError, match="contiguous rows of float32"):
        sampler.sample(torch.zeros(9, 2).T, columns, history)
    with pytest.raises(ValueError, match="temperature"):
        sampler.sample(torch.zeros(2, 9), columns._replace(temperature=torch.zeros(2).double()), history)
    with pytest.raises(ValueError, match=r"history is torch.int64 .*must be torch.int32"):
        sampler.sample(torch.zeros(2, 9), columns, history._replace(token_ids=history.token_ids.astype(np.int64)))
