"""Creates the quantised model files of the tests, and records the numerical accuracy of llama.cpp with these files.

    python -m models.train_storyteller --shape wide build/wide
    python -m models.quantize_fixtures build/wide

The script needs cmake and a C++ compiler. It builds llama.cpp's tools in the environment of the llama.cpp benchmark,
where llama.cpp's converter runs too. Matrices are converted to bfloat16, the dtype of the checkpoints, and quantised by
`llama-quantize`.

llama_cpp.json contains the mean divergence, in nats, between the next-token distributions of llama.cpp and of a float32
computation with the same dequantised weights. It is measured for each type of llama.cpp's KV cache, without flash
attention.
"""

import argparse
import json
import random
import subprocess
from pathlib import Path

from tokenizers import Tokenizer

from bench.peers.environment import CONVERTER, LLAMA_CPP_PYTHON, Environments, default_root
from models.story_tokens import sequences
from models.train_storyteller import RECIPES
from testing.logits import LlamaCppModel, ReferenceModel, mean_divergence
from testing.record import cpu_model, write

BUNDLED = Path("models/storyteller")
FIXTURES = Path("tests/worker/fixtures")
# For each file, the format and further options of `llama-quantize`. The name of a file begins with the model's shape.
FILES: dict[str, tuple[str, ...]] = {
    # Rows of 192 weights do not fill whole K-quant blocks: llama.cpp falls back to Q5_0 and Q8_0 for them.
    "bundled-Q4_K_M": ("Q4_K_M",),
    **{f"wide-{name}": (name,) for name in ("Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")},
    # The formats that have no file of their own.
    "wide-mixed": ("Q4_1", "--pure", "--tensor-type", r"blk\.1\.attn=q5_0", "--tensor-type", r"blk\.1\.ffn=q5_1"),
}
CACHE_TYPES = ("f32", "f16", "bf16")
SEED, NUM_SEQUENCES, LENGTH = 1907, 32, 512


def make_files(environments: Environments, wide: Path, folder: Path) -> None:
    """Write the quantised files to `folder`. `wide` is the checkpoint of the wide model."""
    convert = [environments.vllm(), CONVERTER, environments.llama_cpp()]
    folder.mkdir(parents=True, exist_ok=True)
    for shape, checkpoint in (("bundled", BUNDLED), ("wide", wide)):
        whole = folder / f"{shape}.whole"
        subprocess.run([*convert, checkpoint, whole], check=True)
        for name, arguments in FILES.items():
            if name.startswith(shape):
                environments.quantize(whole, folder / f"{name}.gguf", *arguments)
        whole.unlink()


def measure(llama_logits: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Return llama.cpp's mean divergence in nats, by file name and type of its KV cache."""
    rows = sequences(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), random.Random(SEED), LENGTH)
    token_ids = [next(rows) for _ in range(NUM_SEQUENCES)]
    found = {}
    for name in FILES:
        path = folder / f"{name}.gguf"
        expected = ReferenceModel(path, RECIPES[name.partition("-")[0]].config).logits(token_ids)
        found[name] = {
            cache_type: mean_divergence(expected, LlamaCppModel(llama_logits, path, cache_type).logits(token_ids))
            for cache_type in CACHE_TYPES
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the tests' quantised files with llama.cpp's tools.")
    parser.add_argument("wide", type=Path, help="a checkpoint of `train_storyteller --shape wide`")
    parser.add_argument("--folder", type=Path, default=FIXTURES, help="output folder (default: %(default)s)")
    parser.add_argument(
        "--environments",
        type=Path,
        default=default_root(),
        help="folder of the peers' environments (default: %(default)s)",
    )
    arguments = parser.parse_args()
    environments = Environments(arguments.environments)
    make_files(environments, arguments.wide, arguments.folder)
    figures = {
        "llama_cpp": LLAMA_CPP_PYTHON,
        "cpu": cpu_model(),
        "seed": SEED,
        "num_sequences": NUM_SEQUENCES,
        "length": LENGTH,
        "divergence": measure(environments.llama_logits(), arguments.folder),
    }
    write(arguments.folder / "llama_cpp.json", figures)


if __name__ == "__main__":
    main()
