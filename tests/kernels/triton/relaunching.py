"""Launch attention of many layers through Triton's launcher, and compare repeated launches with first launches.

    python -m tests.kernels.triton.relaunching

The driver does nothing. If a layer's launch repeats another's, the driver must receive the same values as when Triton
inspects all arguments. This runs in a process of its own, because Triton interprets in the process of the tests. The
program prints for each layer the kernels that Triton looked up, and fails if the driver receives other values.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagewire.kernels.arguments import NormRopeParams, Scoring
from pagewire.kernels.triton.attention_arguments import AlikeLayers, PagedCaches, paged_caches
from pagewire.kernels.triton.decode_attention import SplitPlan
from pagewire.kernels.triton.fused import HeadCaching
from pagewire.kernels.triton.paged_attention import PagedAttention
from testing.kernels.triton_driver import Driver

CPU = torch.device("cpu")
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 4, 2, 16, 8
NUM_DECODES, NUM_ROWS = 3, 5

told: list[tuple[Any, ...]] = []
looked_for: list[str] = []


class Launcher:
    """A launcher that records the variant, grid and arguments of each launch, with tensors by their addresses."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._variant = (source.fn.__name__, metadata.hash)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *others: Any) -> None:
        packed, _, *rest = others  # everything but a description for hooks, which is new for each launch
        told.append((self._variant, (x, y, z), packed, _plain(tuple(rest))))


class RecordingDriver(Driver):
    launcher_cls = Launcher


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr(), value.dtype
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def layers() -> Iterator[tuple[str, Tensor, PagedCaches, Tensor | None, Tensor]]:
    """Yield a name, and the query, caches, sinks and output of each layer."""
    shape, size = (NUM_TOKENS, NUM_HEADS, HEAD_DIM), NUM_HEADS * HEAD_DIM
    storage = torch.zeros((7, 8, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM))
    caches = [paged_caches(*storage[:, layer].unbind(1)) for layer in range(8)]
    sinks, output = torch.zeros(2, 8)[:, :NUM_HEADS], torch.zeros(shape)
    wide = torch.zeros(2, NUM_TOKENS, size + 24)
    merged = [part[:, :size].unflatten(1, shape[1:]) for part in wide]
    shifted = torch.zeros(output.numel() + 8)[1:][: output.numel()].view(shape)
    yield "dense", torch.zeros(shape), caches[0], None, output
    yield "dense", torch.zeros(shape), caches[1], None, torch.zeros(shape)
    yield "merged", merged[0], caches[2], None, output
    yield "merged", merged[1], caches[3], None, output
    yield "shifted", shifted, caches[4], None, output
    yield "shifted", shifted, caches[5], None, output
    yield "output shifted", torch.zeros(shape), caches[5], None, shifted
    yield "sinks", torch.zeros(shape), caches[6], sinks[0], output
    yield "sinks", torch.zeros(shape), caches[7], sinks[1], output
    yield "dense", torch.zeros(shape), caches[7], None, output


def layers_to_turn() -> Iterator[tuple[str, Tensor, NormRopeParams, Tensor, Tensor]]:
    """Yield a name, heads, their preparation, and the caches for their keys and values."""
    num_all, storage = NUM_HEADS + 2 * NUM_KV_HEADS, torch.zeros((7, 6, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM))
    caches = [storage[:, layer].unbind(1) for layer in range(6)]
    heads, shifted = torch.zeros(NUM_TOKENS, num_all, HEAD_DIM), torch.zeros(NUM_TOKENS * num_all * HEAD_DIM + 1)[1:]
    weights, angles = torch.ones(4, HEAD_DIM), torch.ones(4, NUM_TOKENS, HEAD_DIM)
    both = NormRopeParams(NUM_HEADS, weights[0], weights[1], 1e-6, angles[0], angles[1])
    yield "turned", heads, both, *caches[0]
    others = NormRopeParams(NUM_HEADS, weights[2], weights[3], 1e-6, angles[2], angles[3])
    yield "turned", torch.zeros_like(heads), others, *caches[1]
    yield "turned before they are normalized", heads, both._replace(rotates_first=True), *caches[1]
    yield "turned without a norm of keys", heads, both._replace(key_weight=None), *caches[2]
    yield "turned where they are shifted", shifted.view(heads.shape), both, *caches[3]
    yield "turned where they are shifted", shifted.view(heads.shape), both, *caches[4]
    yield "turned as part of more", torch.zeros(NUM_TOKENS, num_all + 1, HEAD_DIM + 1)[:, 1:, :-1], both, *caches[4]
    yield "turned", heads, both, *caches[5]


def attentions(caches: PagedCaches) -> Iterator[PagedAttention]:
    """Yield attentions over the same rows, none of which has launched anything."""
    layers = AlikeLayers.of((NUM_TOKENS, NUM_HEADS, HEAD_DIM), torch.float32, caches, Scoring(1.0, window=20))
    tables = torch.zeros((NUM_ROWS, 7), dtype=torch.int32)
    seq_lens, starts = torch.ones(NUM_ROWS, dtype=torch.int32), torch.arange(NUM_ROWS + 1, dtype=torch.int32)
    plan = SplitPlan.allocate(NUM_DECODES, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CPU, num_programs=8)
    while True:
        yield PagedAttention.of(layers, tables, seq_lens, starts, NUM_DECODES, plan)


def main() -> None:
    driver.set_active(RecordingDriver())
    run = JITFunction.run

    def look_for(kernel: JITFunction, *arguments: Any, **options: Any) -> Any:
        looked_for.append(kernel.__name__)
        return run(kernel, *arguments, **options)

    JITFunction.run = look_for
    every_layer = list(layers())
    fresh = attentions(every_layer[0][2])
    attention = next(fresh)
    for name, *tensors in every_layer:
        compare(name, lambda attention, tensors=tensors: attention.attend(*tensors), attention, next(fresh))
    slots = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    caching = HeadCaching(slots)
    for name, *turned in layers_to_turn():
        compare(name, lambda caching, turned=turned: caching.turn(*turned), caching, HeadCaching(slots))


def compare(name: str, launch: Callable[[Any], object], repeated: Any, fresh: Any) -> None:
    """Compare a repeated launch with a first launch."""
    results = []
    for tried in (repeated, fresh):
        told.clear()
        looked_for.clear()
        launch(tried)
        results.append((list(told), list(looked_for)))
    (actual, names), (expected, all_names) = results
    assert actual == expected, f"{name}: the driver is told {actual}, not {expected}"
    assert len(expected) == len(all_names) > 0
    print(f"{name}:", *names)


if __name__ == "__main__":
    main()
