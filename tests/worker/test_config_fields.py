"""Every field of every family's config.json compared with transformers.

Our model follows a field that transformers' model follows, or refuses it. The fields are taken from the configurations
of all families, because files contain fields that their model ignores.
"""

import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config
from pagewire.network.network import Network
from testing.checkpoints.families import DEFAULTS, FAMILIES, NO_SPECIAL_TOKENS, draw_weights
from testing.models import load_model
from testing.worker.model_logits import TOLERANCE, compute_logits

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
# Fields of every configuration, fields about training, and fields about results beside the logits.
BESIDE = {
    *transformers.PretrainedConfig().to_dict(), "architectures", "model_type", "dtype", "torch_dtype", "use_cache",
    "transformers_version", "initializer_range", "output_router_logits", "router_aux_loss_coef",
    "quantization_config", "text_config", "vision_config",
}  # fmt: skip
DROPOUT = re.compile("drop|input_jitter")  # no dropout in evaluation
# Fields that MPT's own code reads and transformers does not: see docs/models.md.
OWN_CODE = {("mpt", "no_bias"), ("mpt", "expansion_ratio")}
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu", "relu"],
    "activation_function": ["gelu", "relu"],
    "head_dim": [8, 32],
    "sliding_window": [3, None],
    "layer_types": [["full_attention"], ["sliding_attention"]],
    "no_rope_layers": [[0], [1]],
    "mlp_only_layers": [[0], []],
    "rope_parameters": [
        {"rope_theta": 99.0},
        {"rope_theta": None},
        {"partial_rotary_factor": 0.25},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.6, "mscale_all_dim": 1.1},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0},
    ],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}],
    "attn_config": [{"softmax_scale": 0.2}, {"clip_qkv": 0.5}, {"qk_ln": True}],
    # The lower the cap, the more the rounding before it matters.
    "final_logit_softcapping": [5.0, 1.7],
    "vocab_size": [97],
    "num_key_value_heads": [1, 4],
    "num_ln_in_parallel_attn": [1],
    "moe_layers": [[0], []],
    "logit_scale": [0.5],
    "norm_type": ["layernorm"],
}


def values(key: str, value: Any, num_layers: int) -> list[Any]:
    """Return other values for a field: of its own type, or of the type that its name implies."""
    if key in VALUES:
        lists = [each * num_layers if key in ("layer_types", "no_rope_layers") else each for each in VALUES[key]]
        return [merged(value, each) for each in lists]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value // 2, value * 2, value + 1]
    if isinstance(value, float):
        return [value * 1.7, value * 0.4]
    return [True, 3, 0.6] if value is None else []


def merged(value: Any, changes: Any) -> Any:
    """Return an object with changes.

    If the object contains an object for each kind of layer, the changes apply to full attention.
    """
    if not isinstance(value, dict) or not isinstance(changes, dict):
        return changes
    kind = "full_attention"
    return {**value, kind: {**value[kind], **changes}} if kind in value else {**value, **changes}


@cache
def base(family: str) -> dict[str, Any]:
    """Return the content of a family's config.json, as transformers writes it."""
    config = transformers.AutoConfig.for_model(family, **{**DEFAULTS[family], **NO_SPECIAL_TOKENS})
    architecture = transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}


def theirs(family: str, config: dict[str, Any]) -> tuple[Any, torch.Tensor] | None:
    """Return transformers' model with random weights, and its logits.

    Returns None if transformers refuses the config or cannot compute finite logits.
    """
    try:
        parsed = transformers.AutoConfig.for_model(family).__class__.from_dict(config)
        model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
        draw_weights(model, seed=7)
        computed = logits(model)
        return (model, computed) if computed.isfinite().all() else None
    except Exception:
        return None


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(tokens(model.config.vocab_size)[None]).logits[0]


def tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, min(vocab_size, 90), (24,), generator=torch.Generator().manual_seed(2))


def ours(config: dict[str, Any]) -> Network | None:
    try:
        return parse_config(config)
    except CheckpointError:
        return None


def fields(family: str) -> dict[str, Any]:
    """Return all fields of all families, with this family's values."""
    foreign = {key: value for other in FAMILIES for key, value in base(other).items()}
    found = {**foreign, **base(family)}
    left_out = BESIDE | {key for of_family, key in OWN_CODE if of_family == family}
    return {key: value for key, value in found.items() if key not in left_out and not DROPOUT.search(key)}


def fault(directory: Path, family: str, config: dict[str, Any]) -> str | None:
    """Return how the logits of a checkpoint differ from transformers'.

    Returns None if they agree or transformers has none.
    """
    found = theirs(family, config)
    if found is None:
        return None
    model, expected = found
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    try:
        loaded = load_model(directory, dtype=torch.float32, device=CPU)
    except CheckpointError as error:
        return str(error)
    chunks = (24,) if loaded.network.is_bidirectional else (9, 1, 14)
    actual = compute_logits(loaded, tokens(len(expected[0])), chunks)
    atol = TOLERANCE * expected.abs().max().item()
    return None if torch.allclose(actual, expected, rtol=0, atol=atol) else f"{(actual - expected).abs().max()}"


def read_fields(family: str, changes: list[tuple[str, Any]], expected: torch.Tensor) -> list[str]:
    """Return the fields among `changes` that transformers' model follows, although we do not read them.

    All fields are changed at once. If the logits differ or there is no model, the function tries each half.
    """
    if not changes:
        return []
    found = theirs(family, base(family) | dict(changes))
    if found is not None and torch.equal(found[1], expected):
        return []
    if len(changes) > 1:
        half = len(changes) // 2
        return [name for part in (changes[:half], changes[half:]) for name in read_fields(family, part, expected)]
    return [] if found is None else [f"{changes[0][0]} is {changes[0][1]}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_means_what_it_means_to_transformers(tmp_path: Path, family: str) -> None:
    """A field that we read changes the logits as in transformers. Fields that we do not read change nothing there."""
    config, plain = base(family), parse_config(base(family))
    num_read, faults = 0, []
    unread: dict[int, list[tuple[str, Any]]] = defaultdict(list)  # by the number of the value among the field's values
    for key, value in sorted(fields(family).items()):
        for number, other in enumerate(values(key, value, len(plain.layers))):
            changed = {**config, key: other}
            parsed = ours(changed)
            if parsed is None or other == config.get(key):
                continue
            if parsed == plain:
                unread[number].append((key, other))
                continue
            num_read += 1
            found = fault(tmp_path / f"{num_read}", family, changed)
            if found is not None:
                faults.append(f"{key} is {other}, was {config.get(key)}: {found}")
    assert num_read >= 5
    assert not faults, "\n".join(faults)
    plain_model = theirs(family, config)
    assert plain_model is not None
    expected = plain_model[1]
    assert not [name for changes in unread.values() for name in read_fields(family, changes, expected)]


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rope_parameters"])
def test_a_field_that_is_left_out_is_what_transformers_takes_for_it(tmp_path: Path, key: str) -> None:
    num_compared = 0
    for family in FAMILIES:
        config = base(family)
        rest = {name: value for name, value in config.items() if name != key}
        if ours(rest) in (None, ours(config)):
            continue
        num_compared += 1
        found = fault(tmp_path / family, family, rest)
        assert found is None, f"{family}: {found}"
    assert num_compared > 0
