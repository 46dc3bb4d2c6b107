"""Published config.json files with smaller sizes, over random weights: greedy tokens equal transformers'."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from docs.kinds import KINDS
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config
from pagewire.network.operations import Convolve
from testing.checkpoints.families import draw_weights
from testing.checkpoints.published import Published, published
from testing.worker.model_logits import TOLERANCE, compute_logits, load, use_kernels
from tests.thorough import thorough

PROMPT_LENGTH, NUM_TOKENS = 40, 6
CHUNKS = (33, 7, *[1] * (NUM_TOKENS - 1))
# Examples of docs/kinds.tsv that are not supported, because the row says what is missing.
NOT_YET = sorted({kind.example for kind in KINDS if kind.missing} & published().keys())
SERVED = sorted(published().keys() - set(NOT_YET))
GENERATORS = [name for name in SERVED if published()[name].is_generator]
EMBEDDERS = [name for name in SERVED if published()[name].is_bidirectional]
# The cases of `make test`: files whose keys differ in various ways from the keys that transformers 5 writes.
QUICK = (
    *("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    *("openai/gpt-oss-20b", "google/gemma-3-4b-it", "microsoft/Phi-4-mini-instruct", "MiniMaxAI/MiniMax-M2"),
    *("LGAI-EXAONE/EXAONE-4.0-32B", "CohereLabs/c4ai-command-r7b-12-2024", "mosaicml/mpt-7b"),
)
# The published lists of LongRoPE factors have 64 values; the file here has the first 8. The smaller model has the short
# factors as long factors, too, because transformers applies them to all lengths.
WITH_CUT_LISTS = ("microsoft/Phi-3.5-MoE-instruct",)


def write_checkpoint(folder: Path, files: Published) -> Any:
    """Write a random model with the published config.json, and return the model of transformers."""
    config_file, config = folder / "config.json", json.dumps(files.small_config)
    config_file.write_text(config)
    read = transformers.AutoConfig.from_pretrained(folder)
    is_multimodal = "vision_config" in files.config
    kind = transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM
    model = kind.from_config(read, dtype=torch.float32).eval()
    draw_weights(model, seed=31)
    model.save_pretrained(folder)
    config_file.write_text(config)
    return model


@torch.inference_mode()
def continue_greedily(model: Any, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a prompt with its greedy continuation by transformers, and the logits of the new tokens."""
    logits: list[torch.Tensor] = []
    for _ in range(NUM_TOKENS):
        logits.append(model(token_ids[None]).logits[0, -1])
        token_ids = torch.cat([token_ids, logits[-1].argmax()[None]])
    return token_ids, torch.stack(logits)


@pytest.mark.parametrize("name", [*QUICK, *thorough(*(name for name in GENERATORS if name not in QUICK))])
def test_greedy_tokens_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use_kernels(monkeypatch, "require")
    theirs = write_checkpoint(tmp_path, published()[name])
    prompt = torch.randint(0, 151, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(32))
    token_ids, expected = continue_greedily(theirs, prompt)
    actual = compute_logits(load(tmp_path), token_ids[:-1], CHUNKS)[PROMPT_LENGTH - 1 :]
    assert actual.argmax(-1).tolist() == token_ids[PROMPT_LENGTH:].tolist()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


@pytest.mark.thorough
@pytest.mark.parametrize("name", EMBEDDERS)
def test_bidirectional_models_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use_kernels(monkeypatch, "require")
    theirs = write_checkpoint(tmp_path, published()[name])
    prompt = torch.randint(0, 151, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(33))
    with torch.inference_mode():
        expected = theirs(prompt[None]).logits[0]
    actual = compute_logits(load(tmp_path), prompt, (PROMPT_LENGTH,))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def test_published_sizes_are_read() -> None:
    """Quantization, positions and lists with a value per layer fit the published sizes."""
    for name in SERVED:
        files = published()[name]
        config = files.small_config if name in WITH_CUT_LISTS else files.config
        sizes = {**config, **config.get("text_config", {})}
        num_layers = next(sizes[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in sizes)
        network = parse_config(config)
        num_convolutions = sum(type(operation) is Convolve for operation in network.operations)  # one in a state layer
        assert len(network.layers) + num_convolutions == num_layers
    assert SERVED


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_supported_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: .*$"):
        parse_config(published()[name].config)


def leaves(published: Any, reduced: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(reduced, dict):
        for key, value in reduced.items():
            yield from leaves((published or {}).get(key), value, key)
    else:
        yield name, published, reduced


def test_only_sizes_are_reduced() -> None:
    """A smaller number, a shorter list, and no quantization, since the weights are random floats."""
    for name, files in published().items():
        for key, whole, part in leaves(files.config, files.reduced, ""):
            is_shorter = isinstance(part, list) and len(part) <= len(whole)
            is_smaller = type(part) is int and (whole is None or (type(whole) is int and part <= whole))
            assert is_shorter or is_smaller or (key, part) == ("quantization_config", None), (name, key)


def test_quick_cases_generate_text() -> None:
    assert set(QUICK) <= set(GENERATORS)
