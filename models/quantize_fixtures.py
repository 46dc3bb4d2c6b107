"""Makes the tests' quantised files of trained models, and records how exactly llama.cpp computes with them.

    python -m models.train_storyteller --shape wide build/wide
    python -m models.quantize_fixtures build/wide

Needs cmake and a C++ compiler: llama.cpp's tools are built in the environment of its benchmark, where its converter
runs too. Matrices are converted to bfloat16, which the checkpoints have, and quantised by `llama-quantize`.
llama_cpp.json gets the mean divergence, in nats, of llama.cpp's next tokens from those of a float32 computation over
the same dequantised weights, for each type of its KV cache, without flash attention.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.peers.environment import CONVERTER, LLAMA_CPP_PYTHON, Environments
from models.story_tokens import sequences
from models.train_storyteller import CONFIG, RECIPES
from testing.logits import ReferenceModel, mean_divergence
from testing.record import cpu_model, write

BUNDLED = Path("models/storyteller")
FIXTURES = Path("tests/worker/fixtures")
PROGRAM = Path("bench/peers/programs/llama_logits.c")
# By the name of the file, which begins with the model's shape: the arguments of `llama-quantize`.
FILES: dict[str, tuple[str, ...]] = {
    # Rows of 192 are no whole K-quants: llama.cpp falls back to Q5_0 and Q8_0 there.
    "bundled-Q4_K_M": ("Q4_K_M",),
    **{f"wide-{name}": (name,) for name in ("Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")},
    # The formats without a file of their own.
    "wide-mixed": ("--pure", "--tensor-type", r"blk\.1\.attn=q5_0", "--tensor-type", r"blk\.1\.ffn=q5_1", "Q4_1"),
}
CACHE_TYPES = ("f32", "f16", "bf16")
SEED, NUM_SEQUENCES, LENGTH = 1907, 32, 512


class LlamaCpp:
    """llama.cpp's converter and quantiser, and a program of ours that prints its logits."""

    def __init__(self, environments: Environments) -> None:
        self._source, self._python = environments.llama_cpp(), environments.vllm()
        build = self._source / "build"
        self._quantizer, self._logits = build / "bin" / "llama-quantize", environments.root / "llama_logits"
        run(["cmake", "--build", build, "-j", str(os.cpu_count() or 1), "--target", "llama-quantize"])
        includes = [f"-I{self._source / folder}" for folder in ("include", "ggml/include")]
        libraries = [
            f"-L{build / 'bin'}",
            f"-Wl,-rpath,{build / 'bin'}",
            "-lllama",
            "-lggml",
            "-lggml-cpu",
            "-lggml-base",
        ]
        run(["cc", "-O2", "-o", self._logits, PROGRAM, *includes, *libraries])

    def convert(self, checkpoint: Path, out: Path) -> Path:
        run([self._python, CONVERTER, self._source, checkpoint, out])
        return out

    def quantize(self, path: Path, out: Path, arguments: Sequence[str]) -> None:
        *options, name = arguments
        run([self._quantizer, *options, path, out, name, "1"])

    def logits(self, path: Path, cache_type: str, token_ids: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
        lines = "".join(" ".join(map(str, sequence)) + "\n" for sequence in token_ids).encode()
        done = subprocess.run([self._logits, path, cache_type], input=lines, stdout=subprocess.PIPE, check=True)
        return torch.from_numpy(np.frombuffer(bytearray(done.stdout), np.float32)).view(-1, vocab_size)


def run(command: Sequence[str | Path]) -> None:
    print("$", *command, file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


def make_files(llama_cpp: LlamaCpp, wide: Path, folder: Path) -> None:
    """Writes the files to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for shape, checkpoint in (("bundled", BUNDLED), ("wide", wide)):
        whole = llama_cpp.convert(checkpoint, folder / f"{shape}.whole")
        for name, arguments in FILES.items():
            if name.startswith(shape):
                llama_cpp.quantize(whole, folder / f"{name}.gguf", arguments)
        whole.unlink()


def measure(llama_cpp: LlamaCpp, folder: Path) -> dict[str, dict[str, float]]:
    """Returns llama.cpp's divergence by file and type of its KV cache."""
    rows = sequences(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), random.Random(SEED), LENGTH)
    token_ids = [next(rows) for _ in range(NUM_SEQUENCES)]
    found = {}
    for name in FILES:
        path, vocab_size = folder / f"{name}.gguf", CONFIG["vocab_size"]
        expected = ReferenceModel(path, RECIPES[name.partition("-")[0]].config).logits(token_ids)
        found[name] = {
            cache_type: mean_divergence(expected, llama_cpp.logits(path, cache_type, token_ids, vocab_size))
            for cache_type in CACHE_TYPES
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tests' quantised files, by llama.cpp's tools.")
    parser.add_argument("wide", type=Path, help="a checkpoint of `train_storyteller --shape wide`")
    parser.add_argument("--folder", type=Path, default=FIXTURES, help="where they go (default: %(default)s)")
    cache = Path("~/.cache/pagewire/bench/peers").expanduser()
    parser.add_argument("--environments", type=Path, default=cache, help="of the peers (default: %(default)s)")
    arguments = parser.parse_args()
    llama_cpp = LlamaCpp(Environments(arguments.environments))
    make_files(llama_cpp, arguments.wide, arguments.folder)
    figures = {
        "llama_cpp": LLAMA_CPP_PYTHON,
        "cpu": cpu_model(),
        "seed": SEED,
        "num_sequences": NUM_SEQUENCES,
        "length": LENGTH,
        "divergence": measure(llama_cpp, arguments.folder),
    }
    write(arguments.folder / "llama_cpp.json", figures)


if __name__ == "__main__":
    main()
