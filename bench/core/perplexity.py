"""Measures what formats of weights and of the KV cache cost the bundled model in exactness.

    python -m bench perplexity

Perplexity is over stories that the model was not trained on; the divergence is the mean of the next tokens' from those
in float32, in nats. GGUF files are quantised by PyPI `gguf`, in the types and to the bytes that `llama-quantize` makes
of this model; that of Q4_K_M is the tests'. Computed by the CPU's kernels, as the worker does. Raw numbers go to
bench/results/perplexity.json, and a table for the README to standard output.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.story_tokens import sequences
from pagewire.kernels.cpu import CpuKernels
from testing.checkpoints.gguf_files import write_gguf
from testing.logits import OurModel, mean_divergence
from worker_service.startup.cpu_kernels import load_cpu_kernels

MODEL = Path("models/storyteller")
Q4_K_M = Path("tests/worker/fixtures/bundled-Q4_K_M.gguf")
SEED, NUM_SEQUENCES, LENGTH = 1908, 64, 512


@dataclass(frozen=True)
class Arm:
    """What the model computes in, its KV cache's dtype, and a format of its weights: the checkpoint's or GGUF's."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    gguf_type: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of `load_model`

    def path(self, folder: Path) -> Path:
        """Returns its checkpoint, or its file, which is made in `folder` unless there is one."""
        if self.gguf_type is None:
            return MODEL
        if self.gguf_type == "Q4_K_M":
            return Q4_K_M
        # The head's weights, which are the embedding's, keep 8 bits in all of llama.cpp's files.
        types = {"token_embd.weight": "Q8_0"}
        return write_gguf(folder / f"{self.gguf_type}.gguf", MODEL, self.gguf_type, types=types)


ARMS = (
    Arm("float32", torch.float32, torch.float32),  # what the others diverge from
    Arm("bfloat16"),
    Arm("KV fp8", cache_dtype=torch.float8_e4m3fn),
    Arm("KV int8", cache_dtype=torch.int8),
    *(Arm(name, gguf_type=name) for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0")),
)


def perplexity(logits: Tensor, token_ids: Sequence[Sequence[int]]) -> float:
    """Of every token but the first of each sequence, all of which have one length."""
    targets = torch.tensor(token_ids)
    predicted = logits.view(*targets.shape, -1)[:, :-1]
    return torch.nn.functional.cross_entropy(predicted.flatten(0, 1), targets[:, 1:].flatten()).exp().item()


def measure(arguments: argparse.Namespace) -> dict:
    kernels = load_cpu_kernels()
    if kernels is None:
        raise SystemExit("there are no CPU kernels: PAGEWIRE_CPU_KERNELS is off, or there is no compiler")
    rows = sequences(Tokenizer.from_file(str(MODEL / "tokenizer.json")), random.Random(SEED), LENGTH)
    figures = measure_arms(kernels, [next(rows) for _ in range(NUM_SEQUENCES)])
    stories = {"seed": SEED, "num_sequences": NUM_SEQUENCES, "length": LENGTH}
    return {"variant": kernels.variant, "stories": stories, "figures": figures}


def measure_arms(kernels: CpuKernels, token_ids: Sequence[Sequence[int]]) -> list[dict]:
    figures, exact = [], None
    with tempfile.TemporaryDirectory() as folder:
        for arm in ARMS:
            path = arm.path(Path(folder))
            model = OurModel(path, dtype=arm.dtype, cache_dtype=arm.cache_dtype, kernels=kernels, **arm.options)
            logits = model.logits(token_ids)
            exact = logits if exact is None else exact
            found = {"perplexity": perplexity(logits, token_ids), "divergence": mean_divergence(exact, logits)}
            figures.append({"format": arm.name, **found})
            print(figures[-1], file=sys.stderr, flush=True)
    return figures


def report(found: dict) -> None:
    print(table(found["figures"]))


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ["format", *(figure["format"] for figure in figures)],
        ["---"] * (len(figures) + 1),
        ["perplexity", *(f"{figure['perplexity']:.4f}" for figure in figures)],
        ["divergence, 10⁻⁶ nats", *(f"{figure['divergence'] * 1e6:.1f}" for figure in figures)],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """There are none."""
