"""Published config.json files with smaller sizes, over random weights: greedy tokens equal transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from docs.kinds import KINDS
from pagewire.network.checkpoint_files import CheckpointError
from pagewire.network.families import parse_config
from testing.checkpoints.families import draw_weights
from testing.checkpoints.published import Published, published
from testing.worker.model_logits import CPU, TOLERANCE, compute_logits, load, use_kernels

PROMPT_LENGTH, NUM_TOKENS = 40, 6
CHUNKS = (33, 7, *[1] * (NUM_TOKENS - 1))
# What docs/models.md says is not supported.
NOT_YET = {kind.example for kind in KINDS if kind.missing} & published().keys()
SERVED = published().keys() - NOT_YET


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
    logits = []
    for _ in range(NUM_TOKENS):
        logits.append(model(token_ids[None]).logits[0, -1])
        token_ids = torch.cat([token_ids, logits[-1].argmax()[None]])
    return token_ids, torch.stack(logits)


@pytest.mark.parametrize("name", sorted(name for name in SERVED if published()[name].is_generator))
def test_greedy_tokens_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use_kernels(monkeypatch, "require")
    theirs = write_checkpoint(tmp_path, published()[name])
    prompt = torch.randint(0, 151, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(32))
    token_ids, expected = continue_greedily(theirs, prompt)
    actual = compute_logits(load(tmp_path), token_ids[:-1], CHUNKS)[PROMPT_LENGTH - 1 :]
    assert actual.argmax(-1).tolist() == token_ids[PROMPT_LENGTH:].tolist()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())
