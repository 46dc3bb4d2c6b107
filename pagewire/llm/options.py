"""Turns the options of `LLM`, Pagewire's own and those of vLLM and nano-vllm, into flags of `pagewire serve`."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pagewire.compatibility import LLM_OPTIONS, judge

_DTYPES = {"half": "float16", "float": "float32"}
_KV_CACHE_DTYPES = {"fp8_e4m3": "fp8"}


def _without_prefix(value: Any) -> str:
    """Returns "bfloat16" for `torch.bfloat16` and for "bfloat16"."""
    return str(value).removeprefix("torch.")


def _quantization(value: Any) -> Any:
    """Raises ValueError for a format, which vLLM lets one name."""
    if not value:
        return None
    if value not in ("int8", "int4"):
        raise ValueError(
            f"quantization={value!r} is not supported: how weights are quantised is read from the checkpoint; int8 and "
            "int4 quantise weights of floats while they load"
        )
    return value


# What each value of an option of theirs asks for, by our names.
MAPPED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "kvcache_block_size": lambda value: {"block_size": value},
    "num_kvcache_blocks": lambda value: {} if value == -1 else {"num_device_blocks": value},
    "num_gpu_blocks_override": lambda value: {"num_device_blocks": value},
    "kv_cache_memory_bytes": lambda value: {"kv_cache_memory": str(value)},
    "enforce_eager": lambda value: {"max_graph_batch_size": 0} if value else {},
    "scheduling_policy": lambda value: {"policy": value},
    "preemption_mode": lambda value: {"preemption": value},
    # A number is in GiB.
    "swap_space": lambda value: (
        {"swap_space": value if isinstance(value, str) else f"{value}GiB"} if value else {"num_host_blocks": 0}
    ),
    "enable_log_requests": lambda value: {"log_requests": value},
}
# Ours under the same name, where theirs has other values too.
CONVERTED: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda value: _DTYPES.get(_without_prefix(value), _without_prefix(value)),
    "kv_cache_dtype": lambda value: _KV_CACHE_DTYPES.get(_without_prefix(value), _without_prefix(value)),
    "quantization": _quantization,
    "load_format": lambda value: "auto" if value == "safetensors" else value,
    "attention_backend": lambda value: value.lower() if isinstance(value, str) else value,
    "served_model_name": lambda value: value[0] if isinstance(value, list) and value else value,
}


def serve_flags(model: str, given: Mapping[str, Any]) -> list[str]:
    """Returns the flags of `pagewire serve` for options of either kind. Warns of those that are ignored.

    Raises TypeError for an unknown name, and ValueError for a value that cannot be.
    """
    from pagewire.cli.services import serve_options

    known = serve_options().keys() - {"model"}
    wanted: dict[str, Any] = {}
    for name, value in given.items():
        if name in MAPPED:
            wanted |= {} if value is None else MAPPED[name](value)
        elif name in known:
            wanted[name] = CONVERTED[name](value) if name in CONVERTED and value is not None else value
        elif name in LLM_OPTIONS:
            if not (name == "tokenizer" and str(value) == model):
                judge(LLM_OPTIONS, name, value, stacklevel=3)
        else:
            near = difflib.get_close_matches(name, [*known, *MAPPED, *LLM_OPTIONS], n=1)
            raise TypeError(f"LLM has no option {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return [_flag(name, value) for name, value in wanted.items() if value is not None]


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be a text, a number or a bool, got {value!r:.80}")
    return f"--{flag}={value}"
