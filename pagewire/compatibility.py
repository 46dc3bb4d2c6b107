"""Lists the options of vLLM and nano-vllm that Pagewire does not have, and says what becomes of each.

Options whose name and meaning are the same here stand in no table: they are simply options.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Foreign:
    """An option of another engine that asks for nothing Pagewire has. `text` says why, or what to do instead.

    Its `harmless` values ask for what Pagewire does anyway, and are taken without a word. Any other value is refused,
    or ignored with a warning if results are right without it.
    """

    text: str
    harmless: tuple[object, ...] = (None, False)
    is_refused: bool = False


def _refused(text: str, *harmless: object) -> Foreign:
    return Foreign(text, (None, False, *harmless), is_refused=True)


_NO_CODE = "Pagewire runs no code of checkpoints, and needs none for the architectures it knows"
_ONE_MODEL = "Pagewire serves one model as it is"
_TEXT_ONLY = "Pagewire generates text, and makes embeddings, of text"
_POOLING = "embeddings are pooled as the checkpoint's own modules.json says, else by the last token"

LLM_OPTIONS: dict[str, Foreign] = {
    "trust_remote_code": Foreign(_NO_CODE),
    "skip_tokenizer_init": Foreign("the tokenizer takes no part in prompts of token ids"),
    "disable_log_stats": Foreign("statistics are metrics, not log lines", (None, False, True)),
    "disable_log_requests": Foreign("requests are logged with log_requests=True only", (None, False, True)),
    "disable_custom_all_reduce": Foreign("ranks meet over NCCL, or gloo on CPUs", (None, False, True)),
    "distributed_executor_backend": Foreign("ranks are processes on this machine", (None, "mp")),
    "enable_chunked_prefill": Foreign("long prompts are always computed in chunks", (None, True)),
    "async_scheduling": Foreign("plans are always made ahead of their results", (None, True)),
    "compilation_config": Foreign("nothing is compiled by torch.compile"),
    "max_seq_len_to_capture": Foreign("see max_graph_batch_size"),
    "cuda_graph_sizes": Foreign("see max_graph_batch_size"),
    "num_scheduler_steps": Foreign("see pipeline_depth", (None, 1)),
    "model_impl": Foreign("models are Pagewire's own", (None, "auto", "vllm")),
    "use_v2_block_manager": Foreign("there is one block manager", (None, False, True)),
    "disable_cascade_attn": Foreign("there is no cascade attention", (None, False, True)),
    "max_parallel_loading_workers": Foreign("weights are loaded by each rank for itself"),
    "guided_decoding_backend": Foreign("grammars are read by llguidance", (None, "auto", "guidance")),
    "structured_outputs_config": Foreign("grammars are read by llguidance, from the first token on"),
    "limit_mm_per_prompt": Foreign(_TEXT_ONLY, (None, {})),
    "mm_processor_kwargs": Foreign(_TEXT_ONLY, (None, {})),
    "tokenizer_mode": _refused("the tokenizer is the checkpoint's tokenizer.json", "auto", "hf", "fast", "slow"),
    "generation_config": _refused("give sampling_params: without them the checkpoint's own are used", "auto"),
    "tokenizer": _refused("the tokenizer is the checkpoint's own: put another tokenizer.json into its directory"),
    "tokenizer_revision": _refused("the tokenizer is the checkpoint's own, of its revision", "main"),
    "code_revision": _refused(_NO_CODE, "main"),
    "download_dir": _refused("set the variable HF_HOME, or give the checkpoint's directory"),
    "hf_token": _refused("set the variable HF_TOKEN"),
    "hf_config": _refused("config.json is the checkpoint's own: change it in a copy of the directory"),
    "hf_overrides": _refused("config.json is the checkpoint's own: change it in a copy of the directory", {}),
    "rope_scaling": _refused("config.json is the checkpoint's own: change it in a copy of the directory", {}),
    "rope_theta": _refused("config.json is the checkpoint's own: change it in a copy of the directory"),
    "pipeline_parallel_size": _refused("models are shared out by tensor_parallel_size only", 1),
    "data_parallel_size": _refused("make an LLM for each, or put a gateway before several servers", 1),
    "enable_expert_parallel": _refused("models are shared out by tensor_parallel_size only"),
    "decode_context_parallel_size": _refused("models are shared out by tensor_parallel_size only", 1),
    "cpu_offload_gb": _refused("all weights are on the device; swap_space is for the KV cache", 0),
    "speculative_config": _refused("there is no speculative decoding"),
    "enable_lora": _refused(_ONE_MODEL),
    "runner": _refused(_TEXT_ONLY, "auto", "generate", "pooling"),
    "task": _refused(_TEXT_ONLY, "auto", "generate", "embed"),
    "convert": _refused(_TEXT_ONLY, "auto", "none", "embed"),
    "pooler_config": _refused(_POOLING),
    "override_pooler_config": _refused(_POOLING),
    "logits_processors": _refused("tokens are chosen by SamplingParams alone; it has logit_bias", []),
    "kv_transfer_config": _refused("a worker computes prompts and decodes them"),
    "enable_sleep_mode": _refused("close the LLM to free its memory"),
}

SAMPLING_FIELDS: dict[str, Foreign] = {
    "detokenize": Foreign("text is always made where there is a tokenizer", (None, True)),
    "spaces_between_special_tokens": Foreign("text is what the tokenizer makes of the tokens", (None, True)),
    "output_kind": Foreign("generate returns whole outputs; a Client's stream yields what is new"),
    "skip_reading_prefix_cache": Foreign("give requests a cache_salt, or the LLM enable_prefix_caching=False"),
    "best_of": _refused("use n, or beam_width for the likeliest of several", 1),
    "use_beam_search": _refused("set beam_width, and n for how many hypotheses to return"),
    "bad_words": _refused("give logit_bias for their tokens", []),
    "allowed_token_ids": _refused("give logit_bias for the others, or for these", []),
    "logits_processors": _refused("tokens are chosen by these parameters alone; there is logit_bias", []),
    "guided_decoding": _refused("give structured_outputs, which takes json, regex, choice, grammar and json_object"),
    "truncate_prompt_tokens": _refused("cut the prompt's token ids yourself"),
    "extra_args": _refused("there are no more parameters than these", {}),
}

STRUCTURED_OUTPUTS_FIELDS: dict[str, Foreign] = {
    "disable_fallback": Foreign("grammars are read by llguidance, or refused", (None, False, True)),
    "disable_any_whitespace": _refused('say {"x-guidance": {"whitespace_flexible": false}} in the schema'),
    "disable_additional_properties": _refused('say {"additionalProperties": false} in the schema'),
    "whitespace_pattern": _refused('say {"x-guidance": {"whitespace_pattern": "..."}} in the schema'),
}


def judge(table: Mapping[str, Foreign], name: str, value: Any, stacklevel: int) -> None:
    """Ignores an option of another engine, with a warning where that matters. Raises ValueError if it is refused."""
    foreign = table[name]
    # True is 1, but does not mean it.
    if any(
        isinstance(value, bool) == isinstance(harmless, bool) and value == harmless for harmless in foreign.harmless
    ):
        return
    if foreign.is_refused:
        raise ValueError(f"{name}={value!r:.80} is not supported: {foreign.text}")
    warnings.warn(f"{name}={value!r:.80} is ignored: {foreign.text}", stacklevel=stacklevel + 1)
