"""Models whose layers are in several layer groups: windows are shorter than sequences, and freed blocks are reused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire.common.wire.messages import Logprobs, RowStatus, SamplingParams, StepPlan
from pagewire.network.layer_groups import LayersOfGroup
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.mixed_heads import make_mixed_checkpoint
from testing.plans import Row, plan_for
from testing.seeds import seeded
from testing.worker.model_logits import use_kernels
from tests.thorough import thorough
from tests.worker.runners import load
from worker_service.engine import LoadedWorker
from worker_service.startup import loader

pytestmark = pytest.mark.one_of_each

# Options of the checkpoint, and the number of layers of each group.
FAMILIES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "gpt_oss": ({"num_hidden_layers": 4}, [2, 2]),
    "gemma2": ({}, [1, 1]),
    "gemma3_text": ({"num_hidden_layers": 12}, [2, 2, 2, 2, 2, 2]),
    "cohere2": ({}, [1, 1, 1, 1]),
    "olmo3": ({"num_hidden_layers": 8}, [2, 2, 2, 2]),
    "exaone4": ({"num_hidden_layers": 8}, [2, 2, 2, 2]),
    "mistral": ({}, [2]),
}
LENGTHS = (1, 5, 45, 70, 20)
PLANS = [(8, 13), *thorough((4, 7), (16, 64))]  # block size and budget


def compute(
    worker: LoadedWorker, rows: Sequence[Row], budget: int, seed: int
) -> tuple[list[list[int]], list[Logprobs]]:
    """Return the output tokens of each row, and the log probabilities of each step.

    Blocks that no row needs any more are filled with NaN before they are used again.
    """
    worker.runner.reset(1)
    storage = worker.runner._cache.storage.view(torch.uint8)
    storage[1:] = 0xFF
    steps = plan_for(worker.ready, rows, budget, rng=seeded(seed))
    outputs: list[list[int]] = [[] for _ in rows]
    logprobs = []
    for step in steps:
        result = worker.runner.execute(step.plan)
        assert result.statuses == ()
        for slot, token_id in zip(step.sampling_slots, result.token_ids, strict=True):
            outputs[slot].append(token_id)
        logprobs.append(result.logprobs)
        storage[step.free_blocks] = 0xFF
    assert not storage[0].any()
    assert len({block for step in steps for block in step.plan.append_block_ids}) < sum(
        len(step.plan.append_block_ids) for step in steps
    ), "blocks are reused"
    return outputs, logprobs


@pytest.mark.parametrize("kernels", ["require", "off", *thorough("onednn")])
@pytest.mark.parametrize(("block_size", "budget"), PLANS)
@pytest.mark.parametrize("family", ["gpt_oss", *thorough(*(name for name in FAMILIES if name != "gpt_oss"))])
def test_tokens_are_those_of_transformers_while_blocks_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, block_size: int, budget: int, kernels: str
) -> None:
    """With onednn, the kernels compute the attention layer by layer."""
    use_kernels(monkeypatch, "off" if kernels == "off" else "require")
    overrides, sizes = FAMILIES[family]
    path = make_checkpoint(tmp_path, family, seed=27, **overrides)
    worker = load(path, block_size=block_size, **({"cpu_products": "onednn"} if kernels == "onednn" else {}))
    assert [group.num_layers for group in worker.ready.layer_groups] == sizes
    prompts = oracle.random_prompts(27, worker.ready.vocab_size, LENGTHS)
    outputs, _ = compute(worker, [Row(prompt, 30) for prompt in prompts], budget, seed=block_size)
    model = oracle.load(path)
    assert outputs == [oracle.greedy(model, prompt, 30) for prompt in prompts]


# KV heads and head size of the layers with windows, and of the layers without.
MIXED = [((2, 16), (1, 32)), ((2, 16), (1, 40)), ((4, 16), (2, 512)), ((1, 16), (4, 264))]


def load_mixed(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    windowed: tuple[int, int],
    full: tuple[int, int],
    **options: Any,
) -> tuple[transformers.PreTrainedModel, LoadedWorker]:
    shape = {"num_hidden_layers": 6, "sliding_window_pattern": 2, "num_key_value_heads": windowed[0]}
    model = make_mixed_checkpoint(path, monkeypatch, seed=30, full=full, head_dim=windowed[1], **shape)
    worker = load(path, block_size=8, **options)
    assert {*worker.runner._cache.shape.heads} == {windowed, full}
    return model, worker


@pytest.mark.parametrize("kernels", ["require", "off"])
@pytest.mark.parametrize(("windowed", "full"), MIXED)
def test_layers_may_have_different_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windowed: tuple[int, int], full: tuple[int, int], kernels: str
) -> None:
    use_kernels(monkeypatch, kernels)
    model, worker = load_mixed(tmp_path, monkeypatch, windowed, full)
    prompts = oracle.random_prompts(30, worker.ready.vocab_size, LENGTHS)
    outputs, _ = compute(worker, [Row(prompt, 30) for prompt in prompts], 13, seed=4)
    assert outputs == [oracle.greedy(model, prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("kernels", ["require", "off"])
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("windowed", "full"), MIXED[1:3])
def test_groups_of_different_heads_do_not_change_a_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    windowed: tuple[int, int],
    full: tuple[int, int],
    cache_dtype: str,
    kernels: str,
) -> None:
    use_kernels(monkeypatch, kernels)
    _, worker = load_mixed(tmp_path, monkeypatch, windowed, full, kv_cache_dtype=cache_dtype)
    prompts = oracle.random_prompts(28, 151, LENGTHS)
    rows = [Row(prompt, 30, SamplingParams(num_logprobs=5)) for prompt in prompts]
    found = compute(worker, rows, 13, seed=3)
    one = (LayersOfGroup(0, tuple(range(6))),)
    monkeypatch.setattr(loader, "layer_groups", lambda *_, **__: one)
    assert len(worker.ready.layer_groups) > 1
    rows = [Row(prompt, 30, SamplingParams(num_logprobs=5)) for prompt in prompts]
    assert compute(load(tmp_path, block_size=8, kv_cache_dtype=cache_dtype), rows, 13, seed=3) == found


@pytest.mark.parametrize("kernels", ["require", "off"])
@pytest.mark.parametrize("cache_dtype", ["int8", *thorough("auto", "fp8")])
@pytest.mark.parametrize("family", ["gpt_oss", *thorough("gemma3_text", "olmo3")])
def test_groups_do_not_change_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, cache_dtype: str, kernels: str
) -> None:
    use_kernels(monkeypatch, kernels)
    overrides, sizes = FAMILIES[family]
    path = make_checkpoint(tmp_path, family, seed=28, **overrides)
    prompts = oracle.random_prompts(28, 151, LENGTHS)
    found = []
    for _ in range(2):
        worker = load(path, block_size=8, kv_cache_dtype=cache_dtype)
        rows = [Row(prompt, 30, SamplingParams(num_logprobs=5)) for prompt in prompts]
        found.append(compute(worker, rows, 13, seed=3))
        monkeypatch.setattr(
            loader, "layer_groups", lambda layers, *_, **__: (LayersOfGroup(0, tuple(range(len(layers)))),)
        )
    assert len(sizes) > 1 == len(worker.ready.layer_groups)
    assert found[0] == found[1]
    assert sum(len(logprobs.chosen) for logprobs in found[0][1]) == 30 * len(prompts)


def test_a_failed_row_leaves_nan_in_the_blocks_of_all_groups(tmp_path: Path) -> None:
    worker = load(make_checkpoint(tmp_path, "gemma2", seed=29), block_size=8)
    runner, cache = worker.runner, worker.runner._cache
    cache.storage.zero_()
    [planned] = plan_for(worker.ready, [Row(range(20), 1)], 64)
    runner._give_up(runner.table.apply(planned.plan))
    [opening] = planned.plan.openings
    for layers, table in zip(cache.shape.groups, opening.block_tables, strict=True):
        for keys, values in (cache.layers[layer] for layer in layers):
            spoilt = keys.isnan().all(-1).all(-1) & values.isnan().all(-1).all(-1)
            assert spoilt[list(table)].flatten().tolist() == [True] * 20 + [False] * 4
    assert cache.storage.isnan().sum() == 2 * 20 * cache.shape.block_elements / 8
    assert runner.execute(StepPlan(1, 2)).statuses == (RowStatus.OUT_OF_MEMORY,)
