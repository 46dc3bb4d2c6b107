"""Refusals of unsupported models: one line of at most 200 characters that names the setting and its value."""

import json
import random

import pytest

from pagewire.hosting.model_source import ModelSourceError, locate
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config
from testing.checkpoints.published import published
from tests.broken_json import refusal_of
from tests.thorough import thorough

ARCHITECTURES = ("T5ForConditionalGeneration", "MambaForCausalLM", "Grok1ModelForCausalLM", "A" * 300, "Zwei\nZeilen")
METHODS = ("fbgemm_fp8", "hqq", "aqlm", "eetq", "vptq", "bitnet", "torchao", "quip", "spqr", "x" * 300, "", None, 7)
ROPE_TYPES = ("dynamic", "ntk", "mrope_interleaved", "xdrope", "x" * 300, "zwei\nzeilen")
ACTIVATIONS = ("swiglu", "relu6", "xielu", "laplace", "x" * 300)
LAYER_TYPES = ("linear_attention", "mamba", "conv", "x" * 300)
# Values of any setting: long numbers, texts and lists, and lists of objects.
LONG_VALUES = (10**300, "x" * 5000, list(range(2000)), [{"a": [1] * 50}] * 50, {"k" * 200: "v" * 200}, "two\nlines")
ALIASES = {"torch_dtype": "dtype", "rotary_emb_base": "rope_theta"}
SECTIONS = ("text_config", "rope_parameters", "rope_scaling", "quantization_config")


def drawn(config, rng):
    """Return a copy of a config.json with one unsupported setting, and texts of which the message must have one."""
    kind, size = rng.randrange(6), rng.choice((1, 1, 30))
    if kind == 0:
        name = rng.choice(ARCHITECTURES)
        return {**config, "architectures": [name] * size}, [json.dumps(name)[1:12]]
    if kind == 1:
        method = rng.choice(METHODS)
        return {**config, "quantization_config": {"quant_method": method, "bits": 4}}, ["quant_method", f"({method})"]
    if kind == 2:
        name = rng.choice(ROPE_TYPES)
        rope = {**(config.get("rope_parameters") or {}), "rope_type": name, "factor": 2.0}
        return {**config, "rope_parameters": rope, "rope_scaling": None}, ["rope_type is ", "rope_type"]
    if kind == 3:
        keys = [key for key in config if key in ("hidden_act", "hidden_activation", "activation_function")]
        return {**config, **dict.fromkeys(keys, rng.choice(ACTIVATIONS))}, keys
    if kind == 4:
        return {**config, "layer_types": [rng.choice(LAYER_TYPES)] * size}, ["layer_types"]
    key = rng.choice(sorted(config))
    return {**config, key: rng.choice(LONG_VALUES)}, [ALIASES.get(key, key), *SECTIONS, "architecture", "has no "]


def is_supported(config):
    return refusal_of(lambda: parse_config(config), CheckpointError) is None


@pytest.mark.parametrize("seed", [0, *thorough(*range(1, 12))])
def test_a_refusal_is_one_short_line_with_the_setting(seed):
    rng = random.Random(seed)
    print("seed", seed)
    configs = [config for each in published().values() if is_supported(config := each.config)]
    num_refused = 0
    for _ in range(200):
        config, names = drawn(rng.choice(configs), rng)
        text = refusal_of(lambda config=config: parse_config(config), CheckpointError)
        if text is not None:
            num_refused += 1
            assert any(name in text for name in names), (names, text)
    assert num_refused > 100


FOLDERS = [
    (), ("notes.txt",), ("sub/config.json",), ("config.json",), ("config.json", "pytorch_model.bin"),
    ("config.json", "consolidated.00.pth"), ("consolidated.safetensors", "params.json"), ("config.json", "a-Q4.gguf"),
    ("adapter_config.json", "adapter_model.safetensors"), ("config.json", "a.safetensors", "b.safetensors"),
    ("config.json", "a-00001-of-00003.safetensors"), ("config.json", "model.safetensors.index.json"),
]  # fmt: skip


@pytest.mark.parametrize("names", FOLDERS, ids=",".join)
def test_a_folder_that_is_no_checkpoint_is_refused_in_one_short_line(tmp_path, names):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    text = refusal_of(lambda: locate(str(folder)), ModelSourceError)
    assert text.startswith(str(folder))


@pytest.mark.parametrize("method", METHODS)
def test_a_quantization_method_is_named_with_those_that_are_supported(method):
    config = {**published()["Qwen/Qwen3-0.6B"].config, "quantization_config": {"quant_method": method}}
    text = refusal_of(lambda: parse_config(config), CheckpointError)
    shown = json.dumps(method or None)[:12]
    assert f"({method})" in text or text.startswith(f"config.json: quantization_config: quant_method is {shown}")
    assert "gptq" in text.lower()
