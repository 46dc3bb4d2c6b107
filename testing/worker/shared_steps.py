"""Logits of prompts that run alone, and of prompts that share steps."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.cache_rows import row_size
from testing.worker.state_rows import new_states, state_rows
from worker_service.attention import AttentionBatch, create_backend
from worker_service.host import host_model
from worker_service.host.cpu_decoder import CpuDecoder
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import attention_shape

CPU = torch.device("cpu")
VOCAB = 151
MAX_ROWS = 64


@dataclass
class Row:
    tokens: Tensor
    table: list[int]
    logits: list[Tensor]
    state: int
    num_computed: int = 0


class Engine:
    """A model with a paged cache that contains NaN in all positions not yet written."""

    def __init__(self, model, dtype, cache_dtype, block_size, rng):
        shape = attention_shape(model.network, block_size, dtype, cache_dtype)
        self._backend = create_backend("auto", CPU, shape, load_cpu_kernels())
        self._host = host_model(model, self._backend)
        assert isinstance(self._host, CpuDecoder)
        self._block_size = block_size
        network, num_blocks = model.network, 1 + 4000 // block_size
        row = row_size(network.heads.head_dim, cache_dtype)
        places = (num_blocks, len(network.layers), 2, network.heads.num_kv_heads, block_size, row)
        # In a float cache these bytes are NaN. In an int8 cache, the scale among them is NaN.
        storage = torch.full((*places[:-1], row * cache_dtype.itemsize), 0xFF, dtype=torch.uint8).view(cache_dtype)
        self._cache = [tuple(storage[:, i, j].transpose(1, 2) for j in (0, 1)) for i in range(len(network.layers))]
        self._states, self._num_states = new_states(network.state_size, MAX_ROWS), 0
        self._free = rng.sample(range(1, num_blocks), num_blocks - 1)

    def row(self, tokens: Tensor) -> Row:
        self._num_states += 1
        table = [self._free.pop() for _ in range(-(-len(tokens) // self._block_size))]
        return Row(tokens, table, [], self._num_states)

    @torch.inference_mode()
    def step(self, work: list[tuple[Row, int]]) -> None:
        """Compute one step, in which each row computes the given number of further tokens."""
        positions = [torch.arange(row.num_computed, row.num_computed + num) for row, num in work]
        slots = [
            torch.tensor(row.table)[at // self._block_size] * self._block_size + at % self._block_size
            for (row, _), at in zip(work, positions, strict=True)
        ]
        width = max(len(row.table) for row, _ in work)
        tables = torch.tensor([row.table + [0] * (width - len(row.table)) for row, _ in work])
        starts = [0]
        for _, num in work:
            starts.append(starts[-1] + num)
        batch = AttentionBatch(starts, [int(at[-1]) + 1 for at in positions], tables[None], torch.cat(slots)[None])
        tokens = torch.cat([row.tokens[at] for (row, _), at in zip(work, positions, strict=True)])
        attend = self._backend.prepare(batch, self._cache)
        states = [(num, min(row.num_computed, 1) * row.state, [(num, row.state)]) for row, num in work]
        args = tokens, torch.cat(positions), attend, torch.arange(starts[-1]), state_rows(self._states, states)
        outputs = self._host.forward_logits(*args)
        for (row, num), logits in zip(work, outputs.logits.split([num for _, num in work]), strict=True):
            row.num_computed += num
            row.logits.append(logits)


def alone(model, dtype, cache_dtype, prompts) -> list[Tensor]:
    """Return the logits of each prompt, computed in one step on one thread."""
    torch.set_num_threads(1)
    engine = Engine(model, dtype, cache_dtype, 16, random.Random(0))
    rows = [engine.row(tokens) for tokens in prompts]
    for row in rows:
        engine.step([(row, len(row.tokens))])
    return [row.logits[0] for row in rows]


def together(model, dtype, cache_dtype, prompts, block_size, rng) -> list[Tensor]:
    """Return the logits of prompts that share steps, in chunks of random length, many of a single token."""
    engine = Engine(model, dtype, cache_dtype, block_size, rng)
    rows = [engine.row(tokens) for tokens in prompts]
    while True:
        left = [row for row in rows if row.num_computed < len(row.tokens)]
        if not left:
            return [torch.cat(row.logits) for row in rows]
        chosen = rng.sample(left, rng.randint(1, len(left)))
        longest = rng.choice([1, 1, 3, 40, 600])
        engine.step([(row, rng.randint(1, min(longest, len(row.tokens) - row.num_computed))) for row in chosen])
