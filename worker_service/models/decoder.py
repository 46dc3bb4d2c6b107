"""A model: the weights that a list of operations names, and the functions that carry it out."""

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagewire.common.network.blocks import compose
from pagewire.common.network.config import QueryGrowth, RopeConfig
from pagewire.common.network.operations import (
    LmHead,
    Projection,
    QkNormRopeStore,
    Table,
    Vector,
    last_uses,
    weights_of,
)
from pagewire.common.network.shard import Shard
from worker_service.models.communicator import Communicator
from worker_service.models.functions import Step
from worker_service.models.linear import Embedding, ExpertLinear, Linear
from worker_service.models.operations import Attend, Operations
from worker_service.models.rope import RotaryEmbedding, query_scales


class Outputs(NamedTuple):
    """The outputs of a model for a step of T tokens, R of which have logits."""

    hidden: Tensor  # [T, hidden_size], final hidden states
    logits: Tensor  # [R, vocab_size] float32
    highest: Tensor | None  # [R] int64, as `highest_logits` gives it; None: not looked for
    times: dict[str, int]  # nanoseconds by part, as `StepParts` names them, as far as they are told apart


class Decoder(nn.Module):
    """Token ids to final hidden states to logits, of one rank's part of a model.

    Each weight is held by a module of its name; `bind` has them ready to compute once they are loaded. Callers hold
    `torch.inference_mode`.
    """

    embedding: Embedding
    head: Linear

    def __init__(self, shard: Shard, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.config = shard.config
        self.operations = operations
        self.communicator = communicator
        self.listed = compose(shard)
        self.weights = weights_of(self.listed)
        self.held: dict[str, Any] = {}
        for name, weight in self.weights.items():
            _place(self, name, _HOLDERS[type(weight)](weight, operations))
        turns = [operation for operation in self.listed if type(operation) is QkNormRopeStore]
        ropes = {turn.rope: (turn.head_dim, turn.num_positions) for turn in turns if turn.rope is not None}
        self.ropes = nn.ModuleList(RotaryEmbedding(rope, *sizes) for rope, sizes in ropes.items())
        # What is looked up by position, by what it is made of.
        self.tables: dict[RopeConfig | QueryGrowth, Any] = {
            **dict(zip(ropes, self.ropes, strict=True)),
            **{turn.growth: partial(query_scales, turn.growth) for turn in turns if turn.growth is not None},
        }
        *before, head = self.listed
        assert type(head) is LmHead
        self._head = head
        self._released = list(zip(before, last_uses(self.listed), strict=False))  # and the buffers that they leave

    def keep_float32(self) -> None:
        """Leaves in float32 what is computed in that, whatever the model is."""
        kept = [(name, weight) for name, weight in self.weights.items() if weight.is_float32]
        for name, weight in kept:
            if type(weight) is Vector:
                self.get_parameter(name).data = self.get_parameter(name).data.float()
            else:
                self.get_submodule(name).float()

    def bind(self) -> None:
        """Has the operations find their weights, which are loaded."""
        for name, weight in self.weights.items():
            if type(weight) is not Vector:
                self.held[name] = self.get_submodule(name)
                continue
            values = self.get_parameter(name).data
            if weight.order:
                values.copy_(values[torch.tensor(weight.order)])
            self.held[name] = values.add_(1) if weight.adds_one else values

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, [T, hidden_size], of a flat batch: token_ids and positions are [T] int64."""
        step = Step(self, token_ids, positions, attend)
        for operation, released in self._released:
            step.carry_out(operation)
            for buffer in released:
                del step.buffers[buffer]
        return step.buffers[self._head.input]

    def forward_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor) -> Outputs:
        """Compute a step: token_ids and positions are [T] int64, logit_rows the tokens that have logits, [R] int64."""
        hidden = self.forward(token_ids, positions, attend)
        began_ns = time.perf_counter_ns()
        if len(logit_rows):
            chosen = hidden if len(logit_rows) == len(hidden) else hidden.index_select(0, logit_rows)
            logits = self.compute_logits(chosen)
        else:
            logits = torch.empty(0, self.config.vocab_size)
        return Outputs(hidden, logits, None, {"head": time.perf_counter_ns() - began_ns})

    def tables_digest(self, slopes: Sequence[float]) -> str:
        """Return SHA-256, in hexadecimal, over what was computed of config.json alone while the model loaded: cosines
        and sines of all positions, slopes of all heads. All ranks have the same."""
        digests = [rope.digest for rope in self.ropes if isinstance(rope, RotaryEmbedding)]
        return hashlib.sha256(b"".join([*digests, *(struct.pack("<d", slope) for slope in slopes)])).hexdigest()

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32. `out`: where to write them, dense; None: new memory."""
        if self.communicator.size == 1:
            logits = self.head.multiply_to_float32(hidden, out)
        else:
            gathered = self.communicator.all_gather(self.head.multiply_to_float32(hidden))
            logits = gathered[:, : self.config.vocab_size]
            logits = logits if out is None else out.copy_(logits)
        if self._head.factor != 1:
            logits.mul_(self._head.factor)
        if self._head.softcap:
            logits.div_(self._head.softcap).tanh_().mul_(self._head.softcap)
        return logits


def _hold_projection(projection: Projection, operations: Operations) -> Linear | ExpertLinear:
    linears = [
        Linear(
            *(projection.in_size, projection.out_sizes, operations),
            bias=projection.has_bias,
            adds_bias=projection.adds_bias,
            is_float32=projection.is_float32,
            gives_float32=projection.gives_float32,
            row_order=projection.row_order,
        )
        for _ in range(max(1, projection.num_experts))
    ]
    return ExpertLinear(linears, operations) if projection.num_experts else linears[0]


# What holds a weight.
_HOLDERS: dict[type, Callable[[Any, Operations], nn.Module | nn.Parameter]] = {
    Table: lambda table, operations: Embedding(table.num_rows, table.width),
    Vector: lambda vector, operations: nn.Parameter(torch.empty(vector.size), requires_grad=False),
    Projection: _hold_projection,
}


def _place(root: nn.Module, name: str, holder: nn.Module | nn.Parameter) -> None:
    """Adds what holds a weight by its dotted name, and the modules on the way where they are not there."""
    *path, last = name.split(".")
    for part, following in pairwise([*path, last]):
        if not hasattr(root, part):
            root.add_module(part, nn.ModuleList() if following.isdigit() else nn.Module())
        root = root.get_submodule(part)
    if isinstance(holder, nn.Parameter):
        root.register_parameter(last, holder)
    else:
        root.add_module(last, holder)
