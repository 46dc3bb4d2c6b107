"""Layers with states of sequences: LFM2's short convolutions and Qwen3.5's gated delta net."""

import json
from itertools import accumulate
from math import prod

import pytest
import torch

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config
from pagewire.network.operations import AttendPaged, QkNormRopeStore, state_offsets, state_shapes
from pagewire.network.unused_tensors import describe_parts
from testing.checkpoints.families import make_checkpoint
from testing.models import load_model
from testing.seeds import seeded
from testing.worker.model_logits import CPU, create_attention, edited, host_operations, packed_products, use_kernels
from testing.worker.state_rows import new_states, state_rows
from tests.thorough import thorough
from worker_service.attention import AttentionBatch
from worker_service.host.cpu_decoder import host_model
from worker_service.models.loading import prepare_model

FAMILIES = ("lfm2", "qwen3_5_text")
# Torch's functions give a value the same bits at any place of a tensor if the width is a multiple of 32.
SIZES = {"qwen3_5_text": {"linear_num_value_heads": 32, "linear_num_key_heads": 16}}
NUM_TOKENS = 97


def host_of(model):
    return host_model(model, create_attention(model.network)) if model.is_fused else model


@torch.inference_mode()
def run(model, token_ids, states, sizes, save_at=-1):
    """Compute a sequence in steps of the given sizes, with its state in slot 1. Return the logits of all tokens.

    The state after `save_at` tokens is saved in slot 2.
    """
    heads, num_layers = model.network.heads, len(model.network.layers)
    storage = torch.zeros(num_layers, 2, 2 + len(token_ids), 8, heads.num_kv_heads, heads.head_dim)
    attention, table, logits, start = create_attention(model.network), torch.arange(1, 14)[None, None], [], 0
    for size in sizes:
        positions = torch.arange(start, start + size)
        batch = AttentionBatch([0, size], [start + size], table, (8 + positions)[None])
        attend = attention.prepare(batch, [tuple(layer) for layer in storage])
        saves = [(save_at - start, 2)] if start <= save_at < start + size else []
        rows = state_rows(states, [(size, min(start, 1), [*saves, (size, 1)])])
        outputs = host_of(model).forward_logits(token_ids[positions], positions, attend, torch.arange(size), rows)
        logits.append(outputs.logits)
        start += size
    return torch.cat(logits)


def read_config(path):
    return json.loads((path / "config.json").read_text())


def random_sizes(rng):
    sizes = []
    while sum(sizes) < NUM_TOKENS:
        sizes.append(min(rng.choice([1, 1, 2, 7, 31, 64, 97]), NUM_TOKENS - sum(sizes)))
    return sizes


@pytest.fixture(params=["fused", *thorough("kernels")])
def load(request, monkeypatch):
    """Load a model that computes all layers in one call of the CPU kernels, or with one call per operation."""
    use_kernels(monkeypatch, "require")

    def load(path):
        model = load_model(path, dtype=torch.float32, device=CPU, operations=host_operations())
        model.is_fused = request.param == "fused"
        return model

    return load


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_do_not_change_logits_and_states(tmp_path, load, family):
    model = load(make_checkpoint(tmp_path, family, seed=61, **SIZES.get(family, {})))
    token_ids = torch.randint(0, 151, (NUM_TOKENS,), generator=torch.Generator().manual_seed(62))
    whole = new_states(model.network.state_size, 2)
    expected = run(model, token_ids, whole, [NUM_TOKENS], save_at=40)
    assert whole.isfinite().all()
    assert not whole[1].equal(whole[2])
    rng = seeded(63)
    for sizes in ([1] * NUM_TOKENS, random_sizes(rng), random_sizes(rng)):
        states = new_states(model.network.state_size, 2)
        assert torch.equal(run(model, token_ids, states, sizes, save_at=40), expected), sizes
        assert torch.equal(states, whole), sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_step_have_states_of_their_own(tmp_path, load, family):
    """Two rows in one step, one of which continues a saved state, compute the same as alone."""
    model = load(make_checkpoint(tmp_path, family, seed=64, **SIZES.get(family, {})))
    heads, num_layers = model.network.heads, len(model.network.layers)
    tokens = torch.randint(0, 151, (40,), generator=torch.Generator().manual_seed(65))
    alone, states = new_states(model.network.state_size, 2), new_states(model.network.state_size, 4)
    expected = run(model, tokens, alone, [24, 16], save_at=24)
    storage = torch.zeros(num_layers, 2, 12, 8, heads.num_kv_heads, heads.head_dim)
    cache, attention = [tuple(layer) for layer in storage], create_attention(model.network)

    def step(rows, states_of_rows):
        """`rows` has pairs of the first block and the range of positions of each row."""
        starts = [0, *accumulate(len(positions) for _, positions in rows)]
        positions = torch.cat([torch.tensor(positions) for _, positions in rows])
        slots = torch.cat([8 * first + torch.tensor(positions) for first, positions in rows])
        tables = torch.stack([torch.arange(first, first + 5) for first, _ in rows])
        batch = AttentionBatch(starts, [positions[-1] + 1 for _, positions in rows], tables[None], slots[None])
        args = tokens[positions], positions, attention.prepare(batch, cache), torch.arange(starts[-1])
        return host_of(model).forward_logits(*args, state_rows(states, states_of_rows)).logits

    with torch.inference_mode():
        first = step([(1, range(24))], [(24, 0, [(10, 4), (24, 1)])])
        both = step([(1, range(24, 40)), (6, range(40))], [(16, 1, [(16, 2)]), (40, 0, [(0, 4), (40, 3)])])
    assert torch.equal(torch.cat([first, both[:16]]), expected)
    assert torch.equal(both[16:], expected)
    assert torch.equal(states[1:], torch.stack([alone[2], alone[1], alone[1], alone[0]]))


@pytest.mark.parametrize(("family", "overrides"), [("lfm2", {}), ("qwen3_5_text", {"num_key_value_heads": 1})])
def test_ranks_share_the_state(tmp_path, family, overrides):
    """Each rank has the states of its channels and heads. Together they have the size of the whole state."""
    network = parse_config(read_config(make_checkpoint(tmp_path, family, seed=66, **overrides)))
    shapes = state_shapes(network.operations)
    offsets = state_offsets(network.operations)
    assert list(offsets) == list(shapes)
    assert next(iter(offsets.values())) == 0
    assert max(offsets.values()) + prod(shapes[max(shapes)]) == network.state_size
    parts = [network.of_rank(rank, 2) for rank in range(2)]
    assert [2 * part.state_size for part in parts] == [network.state_size] * 2
    numbers = [operation.layer for operation in network.operations if isinstance(operation, AttendPaged)]
    assert numbers == list(range(len(network.layers)))
    assert numbers == [turn.layer for turn in network.operations if isinstance(turn, QkNormRopeStore)]
    with pytest.raises(ValueError, match=r"must divide the \d+ (channels of a convolution|key heads)"):
        network.of_rank(0, 3)


@pytest.mark.parametrize("bits", [4, *thorough(8)])
@pytest.mark.parametrize("family", ["qwen3_next", *thorough("lfm2_moe", "qwen3_5_text")])
def test_projections_are_quantised_while_loading(tmp_path, monkeypatch, family, bits):
    """Each row of a projection is quantised by itself, also if the checkpoint stores other rows in between."""
    use_kernels(monkeypatch, "require")
    path, operations = make_checkpoint(tmp_path, family, seed=70), host_operations()
    options = {"dtype": torch.float32, "device": CPU, "operations": operations}
    floats, codes = (
        packed_products(load_model(path, **options, quantization=quantization)) for quantization in (None, f"int{bits}")
    )
    assert codes.keys() - {"model.embed_tokens"} == floats.keys()
    assert any("in_proj" in name for name in floats)
    for name in floats:
        packed = codes[name]
        rows = torch.arange(packed.out_size)
        expected = operations.kernels.lookup_rows(floats[name], rows)
        if name.endswith((".gate", ".shared_expert_gate")):
            assert not packed.format.group_size
        else:
            assert packed.format.bits == (8 if bits == 8 else 6)  # rows of these sizes are no blocks
            expected = operations.quantize(expected, packed.format.bits).dequantized()
        assert torch.equal(operations.kernels.lookup_rows(packed, rows), expected), name


def test_layers_that_predict_further_tokens_are_not_used(tmp_path, load):
    """Published files of Qwen3.5 have a layer for multi-token prediction."""
    path = make_checkpoint(tmp_path, "qwen3_5_text", seed=67)
    tokens = torch.arange(20)
    model = load(path)
    expected = run(model, tokens, new_states(model.network.state_size, 1), [20])
    extra = {f"mtp.{name}.weight": torch.ones(4) for name in ("layers.0.self_attn.q_proj", "fc", "norm")}
    edited(path, **extra)
    unused = prepare_model(path, dtype=torch.float32, device=CPU).unused
    assert describe_parts(unused) == "tensors of the checkpoint that are not used: 3 (mtp)"
    assert torch.equal(run(load(path), tokens, new_states(model.network.state_size, 1), [20]), expected)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("lfm2", {"conv_L_cache": 1}, r"conv_L_cache is 1, but must be a whole number from 2 to"),
        ("lfm2", {"layer_types": ["conv"] * 4}, r"layer_types is .*, but must be a list with at least one full_atten"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [True]}, r"full_attn_idxs is .*, but must be a list of layer"),
        ("lfm2", {"is_causal": False}, r"is_causal is false, but must be true for a model whose layers have states"),
        ("lfm2", {"intermediate_size": 1}, r"intermediate_size is 1, but must be a number for which block_ffn_dim_"),
        (
            "qwen3_5_text",
            {"linear_num_value_heads": 3},
            r"linear_num_key_heads is 4, but must be a divisor of linear_num_value_heads, 3",
        ),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 3}, r"layer_types is .* linear_attention or full_att"),
    ],
)
def test_a_setting_that_is_not_supported(tmp_path, family, changes, expected):
    config = read_config(make_checkpoint(tmp_path, family, seed=68))
    with pytest.raises(CheckpointError, match=expected):
        parse_config({**config, **changes})


def test_other_names_of_settings_of_lfm2(tmp_path):
    """Published files have names that transformers reads as others."""
    config = read_config(make_checkpoint(tmp_path, "lfm2", seed=69))
    spelled = {**config, "intermediate_size": 7, "block_ff_dim": config["intermediate_size"]}
    assert parse_config(spelled) == parse_config(config)
    assert not parse_config({**config, "tie_embedding": False}).tie_word_embeddings
    assert parse_config({**config, "tie_word_embeddings": None}).tie_word_embeddings
