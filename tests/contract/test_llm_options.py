"""Options of vLLM and nano-vllm: each is mapped, ignored with a warning, or refused."""

import warnings
from dataclasses import fields
from typing import Any

import pytest

import pagewire
from pagewire import LLM, SamplingParams, StructuredOutputs, compatibility
from pagewire.cli import services
from pagewire.llm.llm import serve_flags

MODEL = "/models/some"
# The keyword arguments of vLLM 0.11's LLM, and the fields of nano-vllm's Config.
VLLM = (
    "runner", "convert", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code",
    "tensor_parallel_size", "dtype", "quantization", "revision", "tokenizer_revision", "seed",
    "gpu_memory_utilization", "swap_space", "cpu_offload_gb", "enforce_eager", "disable_custom_all_reduce", "hf_token",
    "hf_overrides", "mm_processor_kwargs", "pooler_config", "kv_cache_memory_bytes", "compilation_config",
    "logits_processors", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype",
    "enable_prefix_caching", "num_gpu_blocks_override", "load_format", "served_model_name", "pipeline_parallel_size",
    "data_parallel_size", "enable_chunked_prefill", "scheduling_policy", "speculative_config", "enable_lora",
    "distributed_executor_backend", "disable_log_stats", "download_dir", "generation_config", "limit_mm_per_prompt",
)  # fmt: skip
NANO_VLLM = (
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "gpu_memory_utilization", "tensor_parallel_size",
    "enforce_eager", "hf_config", "kvcache_block_size", "num_kvcache_blocks",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted({*VLLM, *NANO_VLLM}))
def test_every_option_of_theirs_is_known(name: str) -> None:
    kinds = [compatibility.MAPPED, compatibility.FOREIGN, services.serve_options(), {"seed"}]
    assert any(name in kind for kind in kinds)


def test_the_tables_do_not_overlap() -> None:
    own = set(services.serve_options())
    assert not own & {*compatibility.FOREIGN}
    assert not own & set(compatibility.MAPPED)
    assert not set(compatibility.MAPPED) & set(compatibility.FOREIGN)
    assert set(compatibility.CONVERTED) <= own
    assert not {field.name for field in fields(SamplingParams)} & set(compatibility.SAMPLING_FIELDS)


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, []),
        ({"max_model_len": 4096, "dtype": "half"}, ["--max-model-len=4096", "--dtype=half"]),
        ({"max_model_len": "32k", "dtype": "float"}, ["--max-model-len=32000", "--dtype=float32"]),
        ({"max_model_len": -1, "max_num_batched_tokens": "8K"}, ["--max-num-batched-tokens=8192"]),
        ({"dtype": "torch.bfloat16"}, ["--dtype=bfloat16"]),
        ({"enable_prefix_caching": False, "num_threads": 2}, ["--no-enable-prefix-caching", "--num-threads=2"]),
        ({"kvcache_block_size": 256, "num_kvcache_blocks": -1}, ["--block-size=256"]),
        ({"num_kvcache_blocks": 100}, ["--num-device-blocks=100"]),
        ({"num_gpu_blocks_override": 7, "max_num_seqs": None}, ["--num-device-blocks=7"]),
        ({"kv_cache_memory_bytes": 1 << 30}, ["--kv-cache-memory=1073741824"]),
        ({"enforce_eager": True}, ["--max-graph-batch-size=0"]),
        ({"enforce_eager": False}, []),
        ({"swap_space": 4}, ["--swap-space=4GiB"]),
        ({"swap_space": 0.5}, ["--swap-space=0.5GiB"]),
        ({"swap_space": "512MiB"}, ["--swap-space=512MiB"]),
        ({"swap_space": 0}, ["--swap-space=0GiB"]),
        ({"kv_cache_dtype": "fp8_e4m3"}, ["--kv-cache-dtype=fp8"]),
        ({"quantization": "int8"}, ["--quantization=int8"]),
        ({"quantization": False}, []),
        ({"load_format": "safetensors"}, ["--load-format=auto"]),
        ({"attention_backend": "FLASH_ATTN"}, ["--attention-backend=flash_attn"]),
        ({"served_model_name": ["a"]}, ["--served-model-name=a"]),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name=a,b"]),
        ({"revision": "main"}, ["--revision=main"]),
        ({"scheduling_policy": "fcfs"}, ["--policy=fcfs"]),
        ({"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
         ["--tensor-parallel-size=2", "--gpu-memory-utilization=0.5"]),
        ({"quantization": None, "trust_remote_code": False, "pipeline_parallel_size": 1, "cpu_offload_gb": 0.0}, []),
        ({"tokenizer": MODEL, "tokenizer_revision": "main", "hf_overrides": {}, "runner": "generate"}, []),
    ],
)  # fmt: skip
def test_options_become_flags(given: dict[str, Any], flags: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serve_flags(MODEL, given) == flags


def test_serve_takes_every_flag() -> None:
    """`serve` knows every flag to which an option of vLLM or nano-vllm is mapped."""
    flags = {option.flag for option in services.serve_options().values()}
    for name in compatibility.MAPPED:
        [made] = serve_flags(MODEL, {name: 1})
        assert made.partition("=")[0].replace("--no-", "--") in flags


@pytest.mark.parametrize("name", [name for name, foreign in compatibility.FOREIGN.items() if foreign.is_refused])
def test_what_pagewire_does_not_have_is_refused(name: str) -> None:
    text = compatibility.FOREIGN[name].text.replace("`", "")
    with pytest.raises(ValueError, match="is not supported: ") as caught:
        serve_flags(MODEL, {name: "something"})
    shown = name if name in ("api_key", "hf_token") else f"{name}='something'"
    assert str(caught.value).replace("`", "") == f"{shown} is not supported: {text}"
    for harmless in compatibility.FOREIGN[name].harmless:
        assert serve_flags(MODEL, {name: harmless}) == []


@pytest.mark.parametrize("name", [name for name, foreign in compatibility.FOREIGN.items() if not foreign.is_refused])
def test_what_makes_no_difference_is_ignored_with_a_warning(name: str) -> None:
    foreign = compatibility.FOREIGN[name]
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert serve_flags(MODEL, {name: "something"}) == []
    assert str(caught[0].message).replace("`", "") == f"{name}='something' is ignored: {foreign.text.replace('`', '')}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harmless in foreign.harmless:
            assert serve_flags(MODEL, {name: harmless}) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_modle_len": 5}, "LLM has no option 'max_modle_len'; did you mean max_model_len?"),
        ({"kv_cache_block_size": 5}, "did you mean kvcache_block_size?"),
        ({"worker": "127.0.0.1:1"}, "LLM has no option 'worker'"),
        ({"model": "x"}, "LLM has no option 'model'"),
    ],
)
def test_an_unknown_option_is_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        serve_flags(MODEL, given)


def test_two_options_that_disagree_are_refused() -> None:
    assert serve_flags(MODEL, {"max_model_len": 4096, "ctx_size": 4096}) == ["--max-model-len=4096"]
    with pytest.raises(ValueError, match=r"^max_model_len=4096 and ctx_size=1 set max_model_len to different values"):
        serve_flags(MODEL, {"max_model_len": 4096, "ctx_size": 1})


def test_a_value_that_no_flag_can_give_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len must be a text, a number or a bool"):
        serve_flags(MODEL, {"max_model_len": [5]})


def test_llm_refuses_before_it_starts_anything() -> None:
    with pytest.raises(ValueError, match=r"quantization='awq' is not supported: the checkpoint specifies"):
        LLM(MODEL, quantization="awq")
    with pytest.raises(TypeError, match="no option 'colour'"):
        LLM(MODEL, colour="red")


def test_structured_outputs_have_the_fields_of_vllms_class() -> None:
    """The fields of vLLM's StructuredOutputsParams, which docs/migrating.md lists."""
    theirs = {"json", "regex", "choice", "grammar", "json_object", "structural_tag", "disable_fallback"}
    theirs |= {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
    assert {field.name for field in fields(StructuredOutputs)} | {*compatibility.STRUCTURED_OUTPUTS_FIELDS} == theirs


def test_the_module_that_vllms_users_import_from_has_its_names() -> None:
    from pagewire.client.sampling_params import SamplingParams, StructuredOutputsParams

    given = StructuredOutputsParams(json={"type": "object"})
    assert SamplingParams(structured_outputs=given).structured_outputs == StructuredOutputs(json={"type": "object"})
    assert pagewire.StructuredOutputsParams is StructuredOutputsParams


@pytest.mark.parametrize("name", compatibility.STRUCTURED_OUTPUTS_FIELDS)
def test_fields_of_structured_outputs_of_theirs(name: str) -> None:
    foreign = compatibility.STRUCTURED_OUTPUTS_FIELDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harmless in foreign.harmless:
            assert StructuredOutputs(regex="a", **{name: harmless}) == StructuredOutputs(regex="a")
    if foreign.is_refused:
        with pytest.raises(ValueError, match=f"{name}='something' is not supported: "):
            SamplingParams(structured_outputs={"regex": "a", name: "something"})
    else:
        with pytest.warns(UserWarning, match=f"{name}='something' is ignored: ") as caught:
            assert StructuredOutputs(regex="a", **{name: "something"}) == StructuredOutputs(regex="a")
        assert caught[0].filename == __file__


def test_guided_decoding_names_the_field_that_took_its_place() -> None:
    with pytest.raises(ValueError, match=r"guided_decoding=.* is not supported: use structured_outputs"):
        SamplingParams(guided_decoding={"regex": "a"})


@pytest.mark.parametrize("name", compatibility.SAMPLING_FIELDS)
def test_sampling_fields_of_theirs(name: str) -> None:
    foreign = compatibility.SAMPLING_FIELDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harmless in foreign.harmless:
            assert SamplingParams(**{name: harmless}) == SamplingParams()
    if foreign.is_refused:
        with pytest.raises(ValueError, match=f"{name}='something' is not supported: "):
            SamplingParams(**{name: "something"})
    else:
        with pytest.warns(UserWarning, match=f"{name}='something' is ignored: ") as caught:
            assert SamplingParams(**{name: "something"}) == SamplingParams()
        assert caught[0].filename == __file__
