"""Broken inputs drawn from a seed: invalid values for config.json, invalid JSON files and truncated files."""

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAX_ERROR_CHARS = 200
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**40, 10**9, 10**400, 0.5, -0.5, 2.0, float("nan"), float("inf"),
    float("-inf"), 1e308, 1e-320, "", "2", "many", "two\nlines", "x" * 10_000, [], [1], [{}], [[]], [None] * 5000,
    ["LlamaForCausalLM"], {}, {"a": {}}, {"rope_type": "yarn"}, {"quant_method": []},
)  # fmt: skip
ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    "partial_rotary_factor",
)  # fmt: skip


def spoilt(config: Mapping[str, Any], rng: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of `config` with one or two invalid values, and the keys that have them."""
    keys = rng.sample(sorted(config), rng.choice((1, 1, 1, 2)))
    if rng.random() < 0.3:
        scaling = {"rope_type": rng.choice(("default", "linear", "llama3", "yarn")), "factor": 2.0}
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        odd = rng.choice(ROPE_KEYS)
        return {**config, "rope_parameters": {**scaling, odd: rng.choice(ODD_VALUES)}}, [odd]
    return {**config, **{key: rng.choice(ODD_VALUES) for key in keys}}, keys


def spoilt_bytes(config: Mapping[str, Any], rng: random.Random) -> bytes:
    """Return the bytes of a config.json that may be truncated, not JSON, or not UTF-8."""
    content = bytearray(json.dumps(config).encode())
    kind = rng.randrange(6)
    if kind == 0:
        del content[rng.randrange(len(content)) :]
    elif kind == 1:
        for _ in range(rng.randint(1, 5)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    elif kind == 2:
        content = bytearray('{"architectures": ["é"]}'.encode("latin-1"))
    elif kind == 3:
        content = bytearray(json.dumps(config).encode(rng.choice(("utf-16", "utf-8-sig"))))
    elif kind == 4:
        content = bytearray(b'{"a":' * 200_000)
    else:
        content = bytearray(rng.choice((b"", b"null", b"[]", b"3", b"\0" * 100, b'{"vocab_size": 1' + b"0" * 9000)))
    return bytes(content)


def spoil_safetensors(path: Path, rng: random.Random, *, is_cut: bool) -> None:
    """Truncate the checkpoint's weights file, or change one to four bytes of its header.

    `path`: the checkpoint's folder. `is_cut`: truncate the file.
    """
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    header_length = 8 + int.from_bytes(content[:8], "little")
    if is_cut:
        del content[rng.choice((0, 3, 8, header_length, rng.randrange(header_length), rng.randrange(len(content)))) :]
    else:
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(header_length)] = rng.randrange(256)
    file.write_bytes(content)


def refusal_of(read: Callable[[], object], *errors: type[Exception]) -> str | None:
    """Return the message of the error that `read` raises, or None if `read` succeeds.

    `errors`: the expected exception types. The message must be one line of 1 to 200 characters, without folders.
    """
    try:
        read()
    except errors as error:
        text = str(error)
        assert len(text.splitlines()) == 1
        assert len(re.sub(r"/\S*/", "", text)) <= MAX_ERROR_CHARS, text
        return text
    return None
