"""The sampling parameters of requests that leave options unset: the values in a checkpoint's generation_config.json, or
else the API's defaults."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire.common.gguf import is_whole, shown, token_ids_of, unserved
from pagewire.common.wire.messages import SamplingParams
from pagewire.common.wire.sampling_rules import CHECKPOINTS_OPTIONS, RANGES

# Used where generation_config.json sets no value.
API_DEFAULTS = SamplingParams(temperature=1.0)
# The bias of tokens that a checkpoint suppresses, which overrides the bias in a request. It is far below any logit, but
# finite, so a grammar that allows only such tokens still works. It is exact as a 32-bit float, the format on the wire.
SUPPRESSING_BIAS = -(2.0**100)
# Spellings of other engines: top_k of -1 means no limit, and top_p of 0 means the most likely token alone.
_OTHER_SPELLINGS: Mapping[str, Mapping[float, float]] = {"top_k": {-1: 0}, "top_p": {0: 1e-30}}
_MAX_SUPPRESSED = 1024  # tokens; each is sent to the worker with every request
_READ = {*CHECKPOINTS_OPTIONS, "do_sample", "suppress_tokens", "eos_token_id"}
# Settings of transformers that change no token: for its caches, its return values and speculative decoding.
_INERT = frozenset(
    (
        *("transformers_version", "_from_model_config", "_commit_hash", "bos_token_id", "pad_token_id"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "return_dict_in_generate"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "renormalize_logits"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "speculation_type", "use_mtp", "decoder_start_token_id"),
    )
)
# Settings that have no effect if they are 1. Other settings have no effect if they are 0, false or empty.
_OFF_AT_ONE = frozenset(
    (
        *("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "length_penalty", "guidance_scale"),
        "encoder_repetition_penalty",
    )
)
_MAX_NAMED = 20  # settings in a warning


def sampling_defaults(generation: Mapping[str, Any], file: Path, vocab_size: int) -> SamplingParams:
    """Return the sampling parameters for options that a request leaves unset. The values come from the checkpoint's
    generation_config.json, or else from the API's defaults. Tokens that the file suppresses get large negative logit
    biases, which apply to all requests. Raise ValueError if a setting in the file is invalid."""
    values: dict[str, Any] = {}
    for key in CHECKPOINTS_OPTIONS:
        value = generation.get(key)
        if value is not None:
            values[key] = _checked(file, key, value)
    samples = generation.get("do_sample")
    if not isinstance(samples, bool | None):
        raise unserved(file, "do_sample", samples, "true or false")
    if samples is False:
        values["temperature"] = 0.0
    # The file may be written for a larger or multimodal vocabulary, with tokens that cannot be sampled here.
    suppressed = sorted(id for id in token_ids_of(generation, "suppress_tokens", file) if id < vocab_size)
    if len(suppressed) > _MAX_SUPPRESSED:
        expected = f"a list of at most {_MAX_SUPPRESSED} tokens"
        raise unserved(file, "suppress_tokens", generation["suppress_tokens"], expected)
    biases = (SUPPRESSING_BIAS,) * len(suppressed)
    return replace(API_DEFAULTS, **values, logit_bias_token_ids=tuple(suppressed), logit_bias_values=biases)


def ignored_settings(generation: Mapping[str, Any], file: Path) -> str:
    """Return a warning that names the settings in a checkpoint's generation_config.json that this server does not
    support. Return an empty string if all settings are supported."""
    found = [
        f"{key} ({shown(value)})"
        for key, value in generation.items()
        if key not in _READ and key not in _INERT and _has_effect(key, value)
    ]
    if not found:
        return ""
    rest = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return f"{file}: ignored settings, which requests must set themselves: {', '.join(found[:_MAX_NAMED])}{rest}"


def _has_effect(key: str, value: object) -> bool:
    if key in _OFF_AT_ONE and value == 1:
        return False
    return value is not None and (bool(value) or (key.endswith("_token_id") and value is not False))


def _checked(file: Path, key: str, value: Any) -> Any:
    takes_whole, legal = is_whole(getattr(API_DEFAULTS, key)), RANGES[key]
    value = int(value) if takes_whole and isinstance(value, float) and value.is_integer() else value
    is_number = is_whole(value) or (isinstance(value, float) and not takes_whole)
    value = _OTHER_SPELLINGS.get(key, {}).get(value, value) if is_number else value
    if not is_number or not legal.holds(value):
        expected = f"a {'whole ' if takes_whole else ''}number {'' if legal.excludes_low else 'from '}{legal}"
        raise unserved(file, key, value, expected)
    return value
