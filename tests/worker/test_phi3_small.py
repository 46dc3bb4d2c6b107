"""Phi-3-small compared with plain torch under a dense mask, at every length around the edges of its blocks.

`testing/checkpoints/phi3small.py` has the model in plain torch. A prompt that ends at a position has the same logits
there as a longer prompt, so one sequence covers every length. `tests/worker/test_triton_model.py` has the Triton
kernels, and `tests/system/test_parity.py` serves the family with a small pool.
"""

import json
import random
from itertools import pairwise

import pytest
import torch

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config
from pagewire.network.operations import BlockPattern
from pagewire.network.source import load_config
from testing import models
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.published import published
from testing.plans import Row, plan_steps
from testing.worker.model_logits import (
    CPU,
    TOLERANCE,
    compute_logits,
    edit_config,
    host_operations,
    transformers_logits,
    use_kernels,
)
from tests.worker.runners import host_runner
from tests.worker.thread_ranks import on_every_rank
from worker_service.attention import create_backend
from worker_service.cache.cache_engine import CacheEngine
from worker_service.host.cpu_decoder import host_model
from worker_service.rows.table import TableLimits
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import attention_shape, cache_shape

LENGTH = 330
PATTERNS = {
    "a stride of 3": {},
    "two local blocks": {"blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 4},
    "heads apart": {"blocksparse_vert_stride": 16},
    "equal heads": {"blocksparse_homo_head_pattern": True, "blocksparse_vert_stride": 2},
    "blocks of 128": {"blocksparse_block_size": 128, "blocksparse_vert_stride": 2},
    "no dense layer": {"dense_attention_every_n_layers": None},
}
MODES = ("fused", "kernels", "torch")


def tokens(seed, length=LENGTH):
    return torch.randint(0, 151, (length,), generator=torch.Generator().manual_seed(seed))


def random_chunks(rng, length):
    """Return sizes of chunks, of which many begin or end at or beside the edge of a block."""
    edges = [edge + beside for edge in range(64, length, 64) for beside in (-1, 0, 1)]
    ends = sorted({*rng.sample(edges, 5), *rng.sample(range(1, length), 3), *range(length - 9, length)})
    return [end - start for start, end in pairwise([0, *ends, length])]


@pytest.fixture(params=MODES)
def load(request, monkeypatch):
    use_kernels(monkeypatch, "off" if request.param == "torch" else "require")

    def load(path, **options):
        model = models.load_model(path, dtype=torch.float32, device=CPU, operations=host_operations(), **options)
        model.is_fused = request.param == "fused"
        return model

    return load


@pytest.mark.one_of_each
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_length_equals_a_dense_mask(load, tmp_path, pattern, block_size):
    path = make_checkpoint(tmp_path, "phi3small", seed=21, **PATTERNS[pattern])
    model, token_ids = load(path), tokens(22)
    expected = transformers_logits(path, token_ids)
    rng = random.Random(23)
    for chunks in ([LENGTH], random_chunks(rng, LENGTH), random_chunks(rng, LENGTH)):
        print(f"{pattern}, blocks of {block_size}, chunks of {chunks}")
        actual = compute_logits(model, token_ids, chunks, block_size)
        torch.testing.assert_close(actual, expected, rtol=0, atol=spread(expected))


def spread(logits):
    """Return the tolerance for logits, whose largest absolute value may be the one of unused tokens."""
    return TOLERANCE * logits[logits > torch.finfo(torch.float32).min].abs().max().item()


def test_the_pattern_matters(tmp_path):
    path = make_checkpoint(tmp_path, "phi3small", seed=21)
    sparse = transformers_logits(path, tokens(22))
    edit_config(path, dense_attention_every_n_layers=1)
    dense = transformers_logits(path, tokens(22))
    differences = (sparse - dense).abs().max(-1).values
    assert differences[:64].max() == 0
    assert differences[64:].min() > 100 * spread(dense)


@pytest.mark.one_of_each
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_heads_of_every_rank_have_their_own_blocks(load, tmp_path, pattern, size):
    path, token_ids = make_checkpoint(tmp_path, "phi3small", seed=24, **PATTERNS[pattern]), tokens(25)
    expected = transformers_logits(path, token_ids)
    logits = on_every_rank(size, lambda rank: compute_logits(load(path, communicator=rank), token_ids, (200, 130)))
    for actual in logits:
        torch.testing.assert_close(actual, expected, rtol=0, atol=spread(expected))


def test_ranks_have_whole_kv_heads(tmp_path):
    network = load_config(make_checkpoint(tmp_path, "phi3small", seed=24))
    assert [network.of_rank(rank, 4).layers[0].pattern.first for rank in range(4)] == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="--tensor-parallel-size is 8; for this model it must divide the 4 KV heads"):
        network.of_rank(0, 8)


@pytest.mark.one_of_each
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [512, 50])
def test_prompts_in_company_continue_as_alone(tmp_path, monkeypatch, mode, budget):
    use_kernels(monkeypatch, "off" if mode == "torch" else "require")
    path = make_checkpoint(tmp_path, "phi3small", seed=26)
    network, kernels = load_config(path), load_cpu_kernels()
    shape = attention_shape(network, 16, torch.float32, torch.float32)
    model = models.load_model(path, dtype=torch.float32, device=CPU, operations=host_operations())
    blocks = cache_shape(network, (), 16, torch.float32)
    cache, backend = CacheEngine(blocks, 70, CPU), create_backend("auto", CPU, shape, kernels)
    cache.storage[1:] = float("nan")
    limits = TableLimits(4, budget, 1024, 16, 70, network.vocab_size)
    runner = host_runner(host_model(model, backend) if mode == "fused" else model, cache, backend, limits)
    prompts = [tokens(seed, length).tolist() for seed, length in ((1, 1), (2, 64), (3, 190))]
    outputs = [[] for _ in prompts]
    runner.reset(epoch=1)
    for step in plan_steps([Row(prompt, 4) for prompt in prompts], block_size=16, max_num_batched_tokens=budget):
        result = runner.execute(step.plan)
        for slot, token_id in zip(step.sampling_slots, result.token_ids, strict=True):
            outputs[slot].append(token_id)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = transformers_logits(path, torch.tensor(prompt + output))
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_published_settings():
    config = published()["microsoft/Phi-3-small-8k-instruct"].config
    network = parse_config(config)
    assert [heads.pattern for heads in network.layers[:2]] == [BlockPattern(64, 16, 8, 1, 1), None]
    assert (len(network.unused_tokens), network.unused_tokens[:3]) == (91, (100_256, 100_258, 100_259))
    assert not {100_257, 100_261, 100_262, 100_263, 100_266} & {*network.unused_tokens}
    assert network.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, 'hidden_act is "silu", but must be one of gegelu'),
        ({"rope_position_scale": 2.0}, "rope_position_scale is 2.0, but must be 1"),
        ({"blocksparse_block_size": 32}, "blocksparse_block_size is 32, but must be a multiple of 64"),
        ({"blocksparse_vert_stride": 0}, "blocksparse_vert_stride is 0, but must be a whole number from 1"),
        ({"ff_dim_multiplier": 4}, "ff_dim_multiplier is 4, but must be null if ff_intermediate_size is set"),
        ({"dummy_token_indices": [100_352]}, r"dummy_token_indices is \[100352\], but must be a list of tokens from 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 'rope_type is "linear", but must be default or longrope'),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(changes, message):
    config = json.loads(json.dumps(published()["microsoft/Phi-3-small-8k-instruct"].config))
    with pytest.raises(CheckpointError, match=message):
        parse_config(config | changes)
