"""Tensors that a model does not use: parts outside the model are named in the log, all others are refused."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.unused_tensors import describe_parts, is_apart, unused_parts
from testing.checkpoints.families import make_checkpoint
from testing.worker.model_logits import (
    CPU,
    TOLERANCE,
    compute_logits,
    edit_config,
    edited,
    random_tokens,
    transformers_logits,
)
from tests.thorough import thorough
from worker_service.config import WorkerConfig
from worker_service.models.loading import prepare_model
from worker_service.startup.loader import load_worker

LAYER = "model.layers.0.self_attn"
USED = ["model.embed_tokens.weight", f"{LAYER}.q_proj.weight", "model.layers.1.mlp.experts.0.up_proj.weight"]
USED += ["model.norm.weight", "lm_head.weight"]
# A further layer, a head, parts of a vision model, and layers that predict further tokens.
APART = {
    "model.layers.2": ["model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_proj.weight"],
    "v_head": ["v_head.summary.bias", "v_head.summary.weight"],
    "score": ["score.weight"],
    "visual": ["visual.blocks.0.attn.qkv.weight"],
    "model.visual": ["model.visual.patch_embed.proj.weight"],
    "mtp": ["mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"],
    "model.mtp": ["model.mtp.0.proj.weight"],
}
INSIDE = [
    "lm_head.bias", "model.norm.bias", f"{LAYER}.q_proj.bias", f"{LAYER}.q_norm.weight", "model.embed_positions.weight",
    "model.layers.1.mlp.experts.1.up_proj.weight", "model.layers.1.post_mlp_layernorm.weight", "model.extra",
]  # fmt: skip


@pytest.mark.parametrize("part", APART)
def test_a_part_outside_the_model_is_found(part):
    assert unused_parts(reversed(APART[part]), USED) == {part: APART[part]}
    assert is_apart(part, APART[part], USED)


@pytest.mark.parametrize("name", INSIDE)
def test_a_tensor_of_the_model_is_no_part_outside_it(name):
    ((part, names),) = unused_parts([name], USED).items()
    assert names == [name]
    assert not is_apart(part, names, USED)


def test_the_line_has_the_count_and_the_first_names():
    buffers = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(40)]
    used = [*USED, *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(40))]
    names = [*buffers, "visual.norm.weight", "model.layers.40.norm.weight", "zz.a", "zz.b", "score.weight"]
    assert describe_parts(unused_parts(names, used)) == (
        "tensors of the checkpoint that are not used: 45 (model.layers.*.self_attn.rotary_emb, model.layers.40, score "
        "and 2 more)"
    )


def check_logits(path):
    expected = transformers_logits(path, random_tokens())
    unloaded = prepare_model(path, dtype=torch.float32, device=CPU)
    actual = compute_logits(unloaded.load(), random_tokens())
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
    return describe_parts(unloaded.unused)


@pytest.mark.parametrize("family", ["qwen3", *thorough("gpt2", "gpt_neox", "qwen3_moe", "gemma3_text", "mpt")])
def test_parts_outside_the_model_do_not_change_it(tmp_path, family):
    path = make_checkpoint(tmp_path, family, seed=51)
    extra = {name: torch.ones(4) for name in ("v_head.summary.weight", "visual.blocks.0.norm.weight", "mtp.0.x.weight")}
    edited(path, **extra)
    assert check_logits(path) == "tensors of the checkpoint that are not used: 3 (mtp, v_head, visual)"


@pytest.mark.parametrize(("family", "key"), [("qwen3", "num_hidden_layers"), *thorough(("gpt2", "n_layer"))])
def test_further_layers_do_not_change_the_model(tmp_path, family, key):
    path = make_checkpoint(tmp_path, family, seed=52)
    edit_config(path, **{key: 1, "layer_types": None})
    assert check_logits(path).endswith({"qwen3": "(model.layers.1)", "gpt2": "(transformer.h.1)"}[family])


@pytest.mark.thorough
def test_layers_that_predict_further_tokens_do_not_change_the_model(tmp_path):
    """GLM-4.5 is published with such a layer after its last one."""
    path = make_checkpoint(tmp_path, "glm4_moe", seed=53)
    edited(path, **{"model.layers.2.eh_proj.weight": torch.zeros(64, 128)})
    assert check_logits(path) == "tensors of the checkpoint that are not used: 1 (model.layers.2)"


def test_a_tensor_inside_the_model_is_refused(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3", seed=54, tie_word_embeddings=True)
    # The last is a quantised head without settings, which the tied embedding must not replace.
    for name in ("model.norm.bias", "model.embed_positions.weight", "lm_head.qweight"):
        edited(path, **{name: torch.zeros(64)})
        with pytest.raises(CheckpointError, match=rf"tensor {name} in the checkpoint has no place in Decoder"):
            prepare_model(path, dtype=torch.float32, device=CPU)
        edited(path, **{name: None})


def test_the_worker_logs_once_what_is_not_used(tmp_path, caplog):
    path = make_checkpoint(tmp_path, "qwen3", seed=55)
    save_file({"a": torch.zeros(1)}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{}")
    edited(path, **{f"{LAYER}.rotary_emb.inv_freq": torch.zeros(8)})
    assert f"{LAYER}.rotary_emb.inv_freq" in load_file(path / "model.safetensors")
    config = WorkerConfig(model=str(path), device="cpu", dtype="float32", num_device_blocks=200)
    with caplog.at_level(logging.INFO):
        load_worker(config, "worker")
    line = "tensors of the checkpoint that are not used: 1 (model.layers.*.self_attn.rotary_emb)"
    assert [record.message for record in caplog.records].count(line) == 1
    (warning,) = [record.message for record in caplog.records if "adapter" in record.message]
    assert warning.startswith("adapter_config.json: the adapter beside the model is not applied, but transformers app")
