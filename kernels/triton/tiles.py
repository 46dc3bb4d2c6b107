"""The static table of tile shapes: which piece of its work a program of a kernel takes at a time.

Nothing is tuned while the engine runs. Every shape has an estimate; `bench/gpu/tune_kernels.py` measures candidates on
a device and writes the winners to `measured_tiles.json`, which come first.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

MEASURED_TILES = Path(__file__).with_name("measured_tiles.json")
MAX_HEAD_DIM = 256
MAX_GROUPS = 128


@dataclass(frozen=True)
class Tile:
    """Launch constants of a kernel.

    Attributes:
        block_n: positions of the cache that a program reads at a time.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline over those reads.
        block_m: rows, query tokens times heads of a group, that a program owns.
    """

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 16


@dataclass(frozen=True)
class Shape:
    """Key of the table: head dimension and number of groups as powers of two, rounded up, and bytes of an element."""

    kernel: str
    head_dim: int
    num_groups: int
    itemsize: int


# What fits 227 KB of shared memory, leaves room for a second program beside it where it can, keeps a tile of keys and
# one of values on their way while another is computed (which takes three stages), and spills no register when compiled
# for an H200, but for what `CompileCase.max_stack` allows where it says why. [head_dim][itemsize]
_DECODE = {
    32: {1: Tile(128, 4, 3), 2: Tile(128, 4, 3), 4: Tile(64, 4, 3)},
    64: {1: Tile(128, 4, 3), 2: Tile(64, 4, 3), 4: Tile(64, 4, 3)},
    128: {1: Tile(64, 4, 3), 2: Tile(64, 4, 3), 4: Tile(32, 8, 3)},
    256: {1: Tile(64, 4, 3), 2: Tile(32, 4, 3), 4: Tile(16, 4, 3)},
}
_PREFILL = {
    32: {1: Tile(64, 4, 3, 128), 2: Tile(64, 4, 3, 128), 4: Tile(32, 8, 3, 64)},
    64: {1: Tile(64, 4, 3, 128), 2: Tile(32, 4, 3, 128), 4: Tile(32, 8, 3, 64)},
    128: {1: Tile(64, 8, 3, 128), 2: Tile(64, 8, 3, 128), 4: Tile(16, 8, 3, 32)},
    256: {1: Tile(32, 8, 3, 128), 2: Tile(32, 8, 3, 128), 4: Tile(16, 8, 3, 32)},
}
ESTIMATES = {"paged_attention_v1": _DECODE, "paged_attention_v2": _DECODE, "paged_prefill": _PREFILL}

_forced: dict[str, Tile] = {}


def lookup(kernel: str, *, head_dim: int, num_groups: int, dtype: torch.dtype) -> Tile:
    """The tile of a kernel.

    Args:
        kernel: a key of `ESTIMATES`; the phase is part of the name.
        head_dim: 1 to 256.
        num_groups: query heads that share a KV head, 1 to 128. A tile has a row for each at least.
        dtype: of the cache.

    Raises:
        ValueError: the table has no such kernel, or a value lies outside its range.
    """
    if kernel not in ESTIMATES:
        raise ValueError(f"there are no tiles for the kernel {kernel!r}; those with tiles are {', '.join(ESTIMATES)}")
    shape = key(kernel, head_dim=head_dim, num_groups=num_groups, dtype=dtype)
    tile = _forced.get(kernel) or _measured().get(shape) or ESTIMATES[kernel][shape.head_dim][shape.itemsize]
    if tile.block_m >= shape.num_groups:
        return tile
    # Sums stay in registers: so many rows of them take more threads.
    num_warps = max(tile.num_warps, 8 if shape.num_groups * shape.head_dim > 64 * 64 else 4)
    return replace(tile, block_m=shape.num_groups, num_warps=num_warps)


def key(kernel: str, *, head_dim: int, num_groups: int, dtype: torch.dtype) -> Shape:
    """Return the key of the tables in which `lookup` looks. Its arguments and errors are those of `lookup`."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; {kernel} takes 1 to {MAX_HEAD_DIM}")
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"{num_groups} query heads share a KV head; {kernel} takes 1 to {MAX_GROUPS}")
    if dtype.itemsize > 4:
        raise ValueError(f"the cache holds {dtype}; {kernel} takes elements of at most 4 bytes")
    return Shape(kernel, max(32, _power_of_two(head_dim)), _power_of_two(num_groups), dtype.itemsize)


@contextlib.contextmanager
def forced(kernel: str, tile: Tile) -> Iterator[None]:
    """Gives the kernel this tile whatever its shape, until the end of the block: for tests and the tuner."""
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
    """The measured tiles of a file that `write` wrote; none where there is no file."""
    if not path.exists():
        return {}
    return {Shape(**entry["shape"]): Tile(**entry["tile"]) for entry in json.loads(path.read_text())["tiles"]}


def write(measured: dict[Shape, Tile], device: str, path: Path = MEASURED_TILES) -> None:
    """Writes measured tiles and the name of the device that they were measured on, one line each."""
    lines = [json.dumps({"shape": vars(shape), "tile": vars(tile)}) for shape, tile in measured.items()]
    path.write_text(f'{{"device": {json.dumps(device)}, "tiles": [\n' + ",\n".join(lines) + "\n]}\n")
    _measured.cache_clear()


@functools.cache
def _measured() -> dict[Shape, Tile]:
    return read()


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
