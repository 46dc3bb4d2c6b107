"""Reading `quantization_config` for a checkpoint's modules, and the errors for unsupported ones."""

import json
import random
import re
from typing import Any

import pytest

from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.quantization import parse_quantization
from pagewire.network.weight_formats import WeightFormat
from testing.checkpoints.quantized import BY_NAME, CASES
from tests.broken_json import ODD_VALUES, refusal_of
from worker_service.models.quantized_checkpoint import formats_of, is_found

QUERIES, DOWN, HEAD = "model.layers.3.self_attn.q_proj", "model.layers.13.mlp.down_proj", "lm_head"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": FP4}, "exclude": ["lm_head"]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


def compressed(*groups, layout="pack-quantized", ignore=("lm_head",), **more):
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    section = {"quant_method": "compressed-tensors", "format": layout, "config_groups": named, "ignore": list(ignore)}
    return {**section, **more}


def group(weights, *targets, **more):
    return {"targets": list(targets or ("Linear",)), "weights": weights, "input_activations": None, **more}


def formats(section, *modules):
    quantization = parse_quantization({"quantization_config": section})
    found = formats_of(quantization, modules)
    return [found.get(module) for module in modules]


def test_a_config_without_one_is_not_quantised():
    assert parse_quantization({}) is None
    assert parse_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (AWQ, WeightFormat("awq", 4, 1, 128, is_symmetric=False)),
        ({"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"},
         WeightFormat("awq", 4, 1, 0, is_symmetric=False)),
        (GPTQ, WeightFormat("gptq", 4, 1, 128)),
        ({**GPTQ, "bits": 8, "group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
         WeightFormat("gptq_v2", 8, 1, 0, is_symmetric=False, has_act_order=True)),
        (FP8, WeightFormat("fp8", 8, 128, 128, rounds_inputs=True)),
        ({**FP8, "weight_block_size": None}, WeightFormat("fp8", 8, 0, 0, rounds_inputs=True)),
        (MODELOPT, WeightFormat("nvfp4", 4, 1, 16)),
        ({**MODELOPT, "quant_algo": "W4A16_NVFP4", "group_size": None}, WeightFormat("nvfp4", 4, 1, 16)),
        ({**MODELOPT, "quant_algo": "fp8"}, WeightFormat("float-quantized", 8, 0, 0, rounds_inputs=True)),
        ({**MODELOPT, "quant_algo": "fp8_pb_wo"}, WeightFormat("float-quantized", 8, 128, 128)),
        ({**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
         WeightFormat("float-quantized", 8, 1, 0, rounds_inputs=True)),
        (compressed(group({**FLOAT4, "strategy": "tensor_group"}), layout="nvfp4-pack-quantized"),
         WeightFormat("nvfp4-pack-quantized", 4, 1, 16)),
        (AUTO_ROUND, WeightFormat("gptq", 4, 1, 128)),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "sym": False},
         WeightFormat("awq", 4, 1, 128, is_symmetric=False)),
        (NF4, WeightFormat("nf4", 4, 0, 0)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, WeightFormat("llm-int8", 8, 1, 0)),
        (QUARK, WeightFormat("quark-mxfp4", 4, 1, 32)),
        ({**QUARK, "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
         WeightFormat("float-quantized", 8, 1, 0)),
        (compressed(group({**FLOAT4, "group_size": 32}), layout="mxfp4-pack-quantized"),
         WeightFormat("mxfp4-pack-quantized", 4, 1, 32)),
        (compressed(group(INT4)), WeightFormat("pack-quantized", 4, 1, 128)),
        (compressed(group({**INT4, "actorder": "group"})),
         WeightFormat("pack-quantized", 4, 1, 128, has_act_order=True)),
        (compressed(group({**INT4, "actorder": "weight"})), WeightFormat("pack-quantized", 4, 1, 128)),
        (compressed(group(INT8), layout="int-quantized"), WeightFormat("int-quantized", 8, 1, 0)),
        (compressed(group(INT8), layout="naive-quantized"), WeightFormat("int-quantized", 8, 1, 0)),
        (compressed(group({"num_bits": 8, "type": "float", "strategy": "tensor"}), layout="naive-quantized"),
         WeightFormat("float-quantized", 8, 0, 0)),
        (compressed(group({**INT8, "type": "float", "strategy": "block", "block_structure": [128, 64]},
                          format="float-quantized"), layout="mixed-precision"),
         WeightFormat("float-quantized", 8, 128, 64)),
    ],
)  # fmt: skip
def test_a_method_has_the_format_that_it_says(section, expected):
    # With these methods, the file of the head's weight decides whether it is quantised.
    head = expected if section["quant_method"] in ("fp8", "bitsandbytes") else None
    assert formats(section, QUERIES, DOWN, HEAD) == [expected, expected, head]


@pytest.mark.parametrize(
    ("section", "skipped"),
    [
        ({**AWQ, "modules_to_not_convert": ["self_attn"]}, [True, False]),
        ({**AWQ, "modules_to_not_convert": ["model.layers.1", "q_pro", "down"]}, [False, False]),
        ({**FP8, "modules_to_not_convert": ["model.layers.13.mlp"]}, [False, True]),
        ({**FP8, "ignored_layers": [QUERIES]}, [True, False]),
        ({**GPTQ, "dynamic": {r"-:.*\.13\..*": {}}}, [False, True]),
        ({**GPTQ, "modules_to_not_convert": ["q_proj"]}, [True, False]),
        ({**MODELOPT, "ignore": ["*.13.mlp*"]}, [False, True]),
        ({**MODELOPT, "exclude_modules": ["model.layers.3", "model.layers.1"]}, [True, False]),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {QUERIES: {"quant_algo": "FP8"}}},
            [False, True],
        ),
        ({**AUTO_ROUND, "extra_config": {DOWN: {"bits": 16, "data_type": "float"}}}, [False, True]),
        ({**AUTO_ROUND, "extra_config": {r"self_attn\..*": {"bits": 16}}}, [True, False]),
        ({**NF4, "llm_int8_skip_modules": ["mlp"]}, [False, True]),
        ({**QUARK, "exclude": [QUERIES]}, [True, False]),
        ({**QUARK, "exclude": ["re:.*13"], "layer_quant_config": {"*.q_proj": {"weight": None}}}, [True, True]),
        (compressed(group(INT4), ignore=[QUERIES]), [True, False]),
        (compressed(group(INT4), ignore=[r"re:.*layers\.13\."]), [False, True]),
        (compressed(group(INT4), ignore=["layers.13"]), [False, False]),
        (compressed(group(INT4, r"re:.*down_proj$")), [True, False]),
        (compressed(group(INT4), group(None, DOWN)), [False, True]),
    ],
)
def test_modules_to_skip_are_skipped(section, skipped):
    assert [found is None for found in formats(section, QUERIES, DOWN)] == skipped


@pytest.mark.parametrize(
    ("weights", "layout", "inputs", "rounds_inputs"),
    [
        (INT8, "int-quantized", {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, True),
        (INT8, "int-quantized", {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, False),
        (INT8, "int-quantized", None, False),
        ({**INT8, "type": "float"}, "float-quantized", {"num_bits": 8, "type": "float", "dynamic": False}, True),
        ({**INT8, "type": "float"}, "float-quantized", {"num_bits": 4, "type": "float"}, False),
        (INT4, "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "token"}, False),
    ],
)
def test_inputs_are_rounded_where_they_have_the_bits_of_the_weight(weights, layout, inputs, rounds_inputs):
    (found,) = formats(compressed(group(weights, input_activations=inputs), layout=layout), QUERIES)
    assert found.rounds_inputs == rounds_inputs


def test_overrides_of_gptq_change_what_they_name():
    override = {r"+:.*down_proj": {"bits": 8, "group_size": 32, "sym": False}, HEAD: {"desc_act": True}}
    queries, down, head = formats({**GPTQ, "dynamic": override}, QUERIES, DOWN, HEAD)
    assert queries == WeightFormat("gptq", 4, 1, 128)
    assert down == WeightFormat("gptq", 8, 1, 32, is_symmetric=False)
    assert head == WeightFormat("gptq", 4, 1, 128, has_act_order=True)
    assert formats({**GPTQ, "lm_head": True}, HEAD) == [queries]


def test_overrides_of_autoround_change_what_they_name():
    override = {r".*_proj": {"bits": 8}, DOWN: {"group_size": 32, "sym": False}}
    queries, down, head = formats({**AUTO_ROUND, "extra_config": override}, QUERIES, DOWN, HEAD)
    assert queries == WeightFormat("gptq", 8, 1, 128)
    assert down == WeightFormat("gptq", 4, 1, 32, is_symmetric=False)
    assert head is None


def test_names_come_before_patterns_and_classes():
    section = compressed(group(INT4), group(INT8, r"re:.*_proj"), group({**INT4, "group_size": 32}, DOWN))
    assert [found.columns for found in formats(section, QUERIES, DOWN, "model.layers.0.x")] == [0, 32, 128]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("awq", r'quantization_config is "awq", but must be an object with one of compressed-tensors, awq, gptq, fp8'),
        ({"quant_method": "vptq"}, r'quant_method is "vptq", but must be one of compressed-tensors, awq'),
        ({"quant_method": "bitsandbytes"}, r"load_in_4bit is false, but must be true, or load_in_8bit must be true"),
        ({**AUTO_ROUND, "packing_format": "auto_round"}, r'packing_format is "auto_round", but must be one of auto_ro'),
        ({**AUTO_ROUND, "packing_format": "auto_awq", "bits": 8}, r"bits is 8, but must be 4 with awq"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, r'data_type is "mx_fp", but must be int'),
        ({**AUTO_ROUND, "extra_config": {"x": 4}}, r'extra_config is {"x": 4}, but must be an object of overrides'),
        ({**NF4, "bnb_4bit_quant_type": "nf5"}, r'bnb_4bit_quant_type is "nf5", but must be one of nf4, fp4'),
        ({"bits": 4}, r"quant_method is null, but must be one of"),
        ({**AWQ, "bits": 8}, r"bits is 8, but must be 4 with awq"),
        ({**AWQ, "version": "gemv"}, r'version is "gemv", but must be gemm with awq'),
        ({**AWQ, "zero_point": False}, r"zero_point is false, but must be true with awq"),
        ({**GPTQ, "bits": 3}, r"bits is 3, but must be 4 or 8 with gptq"),
        ({**GPTQ, "group_size": 0}, r"group_size is 0, but must be a whole number from 1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r'checkpoint_format is "marlin", but must be one of gptq, gptq_v2'),
        ({**GPTQ, "dynamic": {"+:(": {}}}, r'dynamic is "\+:\(", but must be a regular expression: missing \)'),
        ({**GPTQ, "dynamic": {"+:x": 8}}, r'dynamic is {"\+:x": 8}, but must be an object of objects'),
        ({**GPTQ, "dynamic": {"x": {"bits": 2}}}, r"bits is 2, but must be 4 or 8 with gptq"),
        ({**FP8, "fmt": "e5m2"}, r'fmt is "e5m2", but must be e4m3'),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\], but must be two whole numbers"),
        (
            compressed(group({**FLOAT4, "group_size": 32}), layout="nvfp4-pack-quantized"),
            r"group_size is 32, but must be 16 in nvfp4-pack-quantized",
        ),
        (
            {**MODELOPT, "quant_algo": "INT4_AWQ"},
            r'quant_algo is "INT4_AWQ", but must be one of NVFP4, W4A16',
        ),
        ({**QUARK, "global_quant_config": {"weight": [FP4]}}, r"weight is .*, but must be fp4 per group of 32 with"),
        ({**QUARK, "global_quant_config": {"weight": {**FP4, "group_size": 16}}}, r"weight is .*, but must be fp4 per"),
        (
            {**QUARK, "global_quant_config": {"input_tensors": FP4, "weight": {"is_dynamic": False, "dtype": "uint4"}}},
            r'weight is {"dtype": "uint4"}, but must be fp4',
        ),
        ({**QUARK, "global_quant_config": 4}, r"weight is 4, but must be fp4 per group of 32 with e8m0"),
        ({**QUARK, "layer_quant_config": [4]}, r"layer_quant_config is \[4\], but must be an object of settings"),
        (
            {**QUARK, "layer_type_quant_config": {"x": 1}},
            r"layer_quant_config is {}, but must be an object of settings",
        ),
        ({**MODELOPT, "group_size": 32}, r"group_size is 32, but must be 16 with NVFP4"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, r"quantized_layers is null, but must be an object of objects"),
        (
            {"quant_method": "modelopt", "quantization": 4},
            r"quantization is 4, but must be an object with a quant_algo",
        ),
        (
            compressed(group(INT4), layout="marlin-24"),
            r'format is "marlin-24", but must be one of pack-quantized, int-',
        ),
        (compressed(group({**INT4, "num_bits": 3})), r"num_bits is 3, but must be 4 or 8 in pack-quantized"),
        (compressed(group({**INT4, "type": "float"})), r'type is "float", but must be int in pack-quantized'),
        (
            compressed(group({**INT4, "strategy": "tensor_group"})),
            r'strategy is "tensor_group", but must be one of tens',
        ),
        (compressed(group({**INT4, "actorder": "odd"})), r'actorder is "odd", but must be null, weight or group'),
        (compressed(group(INT4, 7)), r"targets is \[7\], but must be a list of module names"),
        (compressed(group(INT4), ignore=["re:["]), r'ignore is "re:\[", but must be a regular expression'),
        ({**compressed(), "config_groups": None}, r"config_groups is null, but must be an object of groups"),
        ({**compressed(), "config_groups": {"W4A16": ["Linear"]}}, r"config_groups is .* of objects with targets"),
        (compressed(group(INT4), transform_config={"a": 1}), r"transform_config is .*, but must be unset"),
        (compressed(group(INT4), sparsity_config={"format": "sparse-24"}), r"sparsity_config is .*, but must be unset"),
    ],
)
def test_what_is_not_served_is_named_with_what_is(section, message):
    with pytest.raises(CheckpointError, match=f"config.json: .*{message}"):
        parse_quantization({"quantization_config": section})


MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "FP8 rows for FBGEMM (fbgemm_fp8)"),
        ({"quantization_config": {"quant_method": "hqq", "quant_config": {}}}, "codes of HQQ (hqq)"),
        ({"quantization_config": {"quant_method": "torchao"}}, "tensors of torchao's own classes (torchao)"),
        ({"quantization_config": {"quant_method": "exl3", "bits": 4.0}}, "codes for ExLlamaV3 (exl3)"),
        ({"quantization": MLX, "quantization_config": MLX}, "codes for MLX on Apple processors (mlx)"),
        ({"quantization": MLX}, "codes for MLX on Apple processors (mlx)"),
    ],
)
def test_known_files_that_are_not_served_are_told_with_those_that_are(config, what):
    with pytest.raises(CheckpointError) as refusal:
        parse_quantization(config)
    text = str(refusal.value)
    assert text.startswith(
        f"config.json: quantization_config: the weights are {what}, which are not supported; use the"
    )
    assert len(text) <= 200
    assert "\n" not in text


def paths(value, path=()):
    """Yield the path of every value in a JSON object."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


@pytest.mark.parametrize("seed", range(10))
def test_an_odd_value_is_refused_in_one_line_or_harmless(seed):
    rng = random.Random(seed)
    num_refused = 0
    for _ in range(200):
        config = {"quantization_config": json.loads(json.dumps(rng.choice(CASES).section))}
        *parents, key = rng.choice(list(paths(config))[1:])
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = rng.choice(ODD_VALUES)
        text = refusal_of(lambda config=config: parse_quantization(config), CheckpointError)
        num_refused += text is not None
        assert text is None or text.startswith("config.json: quantization_config")
    assert num_refused > 30


def test_formats_are_described_for_people():
    (found,) = formats(BY_NAME["GPTQ of 8 bits"].section, QUERIES)
    assert found.describe() == "gptq in 8 bits"


# With each of these, Python's own matching would never end.
ENDLESS = [r"(?:(?:.?){40}){40}[!?]", r"(.|..|...)+[!?]"]  # refused at the first module name that takes too long
HARD = [r"(\w+\.?)+[!?]", r"(.*)*[!?]", r"((a|.)+)+[!?]", r"(.+)+\1[!?]", r"(.+)+!"]  # matched nevertheless
MODULES = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj" for layer in range(4) for expert in range(16)]


def brought(pattern: str) -> list[tuple[str, dict[str, Any]]]:
    """Return every setting of a checkpoint that contains regular expressions for module names, with this pattern."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights}
    compressed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return [
        ("ignore", {**compressed, "ignore": [f"re:{pattern}"], "config_groups": {"a": group}}),
        ("targets", {**compressed, "config_groups": {"a": {**group, "targets": [f"re:{pattern}"]}}}),
        ("dynamic", {"quant_method": "gptq", "bits": 4, "dynamic": {f"-:{pattern}": {}}}),
        ("dynamic", {"quant_method": "gptq", "bits": 4, "dynamic": {f"+:{pattern}": {"bits": 8}}}),
        ("modules_to_not_convert", {"quant_method": "mxfp4", "modules_to_not_convert": [pattern]}),
    ]


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_without_end_is_refused_by_name(pattern: str, place: int) -> None:
    key, section = brought(pattern)[place]
    quantization = parse_quantization({"quantization_config": section})
    assert quantization is not None
    with pytest.raises(CheckpointError, match=rf"{key} is .*, but must be a pattern that can be matched with model\."):
        formats_of(quantization, MODULES)


@pytest.mark.parametrize("pattern", HARD)
def test_a_pattern_that_is_hard_for_others_is_answered(pattern: str) -> None:
    (_, section), *_ = brought(pattern)
    quantization = parse_quantization({"quantization_config": section})
    assert quantization is not None
    assert formats_of(quantization, MODULES).keys() == set(MODULES), "none is ignored"


def test_many_slow_patterns_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No single pattern takes too long, but all patterns with all names do."""
    monkeypatch.setattr("worker_service.models.quantized_checkpoint._MAX_MATCHING_S", 0.1)
    key, section = brought("(.*.*.*.*)[!?]")[0]
    quantization = parse_quantization({"quantization_config": {**section, key: section[key] * 1000}})
    assert quantization is not None
    with pytest.raises(CheckpointError, match=r"is .*, but must be (a pattern|patterns) that"):
        formats_of(quantization, MODULES * 100)


@pytest.mark.parametrize(
    "pattern",
    [
        r"model\.layers\.\d+\.mlp", r".*(?:up|down)_proj$", r"^(?!.*experts\.1\b).*", r".*layers\.[0-2]\..*", "x",
        r".*experts\.(3|1[0-5])\.down_proj", r".*(?<=experts\.)7\.", r"(\w+)\.layers\.(\d)\.mlp\.experts\.\2",
    ],
)  # fmt: skip
def test_patterns_mean_what_they_mean_to_python(pattern: str) -> None:
    for key, section in brought(pattern):
        ending = r"(\.|$)" if key == "modules_to_not_convert" else ""
        quantization = parse_quantization({"quantization_config": section})
        assert quantization is not None
        found = {rule.source[0] for rule in quantization.rules if is_found(rule, MODULES[0], 1.0)}
        assert formats_of(quantization, MODULES).keys() <= set(MODULES)
        expected = {module for module in MODULES if re.match(f"(?:{pattern}){ending}", module)}
        rule = next(rule for rule in quantization.rules if rule.source[0])
        assert {module for module in MODULES if is_found(rule, module, 1.0)} == expected
        assert (key in found) == (MODULES[0] in expected)


def test_a_pattern_that_is_a_book_is_refused() -> None:
    for key, section in brought("a|" * 10_000 + "b"):
        with pytest.raises(CheckpointError, match=rf"{key} is .*, but must be a regular expression of at most 1"):
            parse_quantization({"quantization_config": section})
