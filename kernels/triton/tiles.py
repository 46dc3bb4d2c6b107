"""The static table of tile shapes: the part of its work that a program of a kernel processes at a time.

No tuning takes place while the engine runs. Every shape has an estimate. `bench/gpu/tune_kernels.py` measures
candidates on a device and writes the fastest to `measured_tiles.json`; these override the estimates.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

MEASURED_TILES = Path(__file__).with_name("measured_tiles.json")
MAX_HEAD_DIM = 512
MAX_GROUPS = 128
MAX_WIDE_GROUPS = 32  # for heads of more than 256: the queries and sums of more heads do not fit a processor


@dataclass(frozen=True)
class Tile:
    """The tile of an attention kernel, which is the part of the work that one program processes at a time, and the
    launch options of the kernel.

    Attributes:
        block_n: number of cache positions that a program reads at a time.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline of these reads (Triton's `num_stages`).
        block_m: rows that a program processes; a row is one query head of one query token.
    """

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 16


@dataclass(frozen=True)
class Shape:
    """The key of a table of tiles: the name of an attention kernel and the sizes for which it is compiled.

    `head_dim` and `num_groups` (query heads per KV head) are rounded up to powers of two; `itemsize` is the size of a
    cache element in bytes.
    """

    kernel: str
    head_dim: int
    num_groups: int
    itemsize: int


# [head_dim][itemsize]. These tiles fit 227 KB of shared memory, if possible with room for a second program. They load a
# tile of keys and a tile of values while another tile is computed, which takes three stages. Compiled for an H200 they
# spill no register, except up to `CompileCase.max_stack` where a case documents the reason.
_DECODE = {
    32: {1: Tile(128, 4, 3), 2: Tile(128, 4, 3), 4: Tile(64, 4, 3)},
    64: {1: Tile(128, 4, 3), 2: Tile(64, 4, 3), 4: Tile(64, 4, 3)},
    128: {1: Tile(64, 4, 3), 2: Tile(64, 4, 3), 4: Tile(32, 8, 3)},
    256: {1: Tile(64, 4, 3), 2: Tile(32, 4, 3), 4: Tile(16, 4, 3)},
    512: {1: Tile(16, 8, 3), 2: Tile(16, 8, 3), 4: Tile(16, 8, 3)},
}
_PREFILL = {
    32: {1: Tile(64, 4, 3, 128), 2: Tile(64, 4, 3, 128), 4: Tile(32, 8, 3, 64)},
    64: {1: Tile(64, 4, 3, 128), 2: Tile(32, 4, 3, 128), 4: Tile(32, 8, 3, 64)},
    128: {1: Tile(64, 8, 3, 128), 2: Tile(64, 8, 3, 128), 4: Tile(16, 8, 3, 32)},
    256: {1: Tile(32, 8, 3, 128), 2: Tile(32, 8, 3, 128), 4: Tile(16, 8, 3, 32)},
    512: {1: Tile(16, 8, 3, 32), 2: Tile(16, 8, 3, 32), 4: Tile(16, 8, 3, 16)},
}
ESTIMATES = {"paged_attention_v1": _DECODE, "paged_attention_v2": _DECODE, "paged_prefill": _PREFILL}

_forced: dict[str, Tile] = {}


def lookup(kernel: str, *, head_dim: int, num_groups: int, dtype: torch.dtype) -> Tile:
    """Return the tile to use for an attention kernel with these sizes. If `forced` set a tile, return this tile.
    Otherwise return the tile that was measured to be fastest, or an estimate if none was measured.

    Args:
        kernel: the name of the kernel, a key of `ESTIMATES`.
        head_dim: 1 to 512.
        num_groups: query heads per KV head, 1 to `max_groups`. A tile has at least one row for each of them.
        dtype: dtype of the cache.

    Raises:
        ValueError: the table has no such kernel, or a value is outside its range.
    """
    if kernel not in ESTIMATES:
        raise ValueError(f"there are no tiles for the kernel {kernel!r}; those with tiles are {', '.join(ESTIMATES)}")
    shape = key(kernel, head_dim=head_dim, num_groups=num_groups, dtype=dtype)
    tile = _forced.get(kernel) or _measured().get(shape) or ESTIMATES[kernel][shape.head_dim][shape.itemsize]
    if tile.block_m >= shape.num_groups:
        return tile
    # Sums stay in registers: this number of rows needs more threads.
    num_warps = max(tile.num_warps, 8 if shape.num_groups * shape.head_dim > 64 * 64 else 4)
    return replace(tile, block_m=shape.num_groups, num_warps=num_warps)


def key(kernel: str, *, head_dim: int, num_groups: int, dtype: torch.dtype) -> Shape:
    """Return the key under which `lookup` finds a tile in the tables. The arguments and errors are the same as for
    `lookup`."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; {kernel} supports 1 to {MAX_HEAD_DIM}")
    most = max_groups(head_dim)
    if not 1 <= num_groups <= most:
        raise ValueError(f"{num_groups} query heads of {head_dim} share a KV head; {kernel} supports 1 to {most}")
    if dtype.itemsize > 4:
        raise ValueError(f"the cache is {dtype}; {kernel} supports elements of at most 4 bytes")
    return Shape(kernel, max(32, _power_of_two(head_dim)), _power_of_two(num_groups), dtype.itemsize)


def max_groups(head_dim: int) -> int:
    """Return how many query heads of this size may share a KV head."""
    return MAX_GROUPS if head_dim <= 256 else MAX_WIDE_GROUPS


@contextlib.contextmanager
def forced(kernel: str, tile: Tile) -> Iterator[None]:
    """Use `tile` for an attention kernel, for all sizes, until the end of the `with` block. Intended for tests and the
    tuner."""
    if kernel not in ESTIMATES:
        raise ValueError(f"there are no tiles for the kernel {kernel!r}; those with tiles are {', '.join(ESTIMATES)}")
    outer = _forced.get(kernel)
    _forced[kernel] = tile
    try:
        yield
    finally:
        if outer is None:
            del _forced[kernel]
        else:
            _forced[kernel] = outer


def read(path: Path = MEASURED_TILES) -> dict[Shape, Tile]:
    """Read the measured tiles from a JSON file that `write` created. Return an empty dictionary if the file does not
    exist."""
    if not path.exists():
        return {}
    return {Shape(**entry["shape"]): Tile(**entry["tile"]) for entry in json.loads(path.read_text())["tiles"]}


def write(measured: dict[Shape, Tile], device: str, path: Path = MEASURED_TILES) -> None:
    """Write measured tiles to a JSON file, one per line, with the name of the device on which they were measured."""
    lines = [json.dumps({"shape": vars(shape), "tile": vars(tile)}) for shape, tile in measured.items()]
    path.write_text(f'{{"device": {json.dumps(device)}, "tiles": [\n' + ",\n".join(lines) + "\n]}\n")
    _measured.cache_clear()


@functools.cache
def _measured() -> dict[Shape, Tile]:
    return read()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
