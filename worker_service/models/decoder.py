"""A model as a torch module: the weights that a list of operations names, and the code that runs the list."""

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagewire.kernels.states import StateRows
from pagewire.network.network import Network
from pagewire.network.operations import (
    LmHead,
    Projection,
    QkNormRopeStore,
    Table,
    Vector,
    Weight,
    embedding_of,
    last_uses,
    replaced,
    state_offsets,
    weights_of,
)
from pagewire.network.rope import QueryScaling, RopeConfig
from worker_service.models.communicator import Communicator
from worker_service.models.functions import Step
from worker_service.models.linear import Embedding, ExpertLinear, Linear
from worker_service.models.rope import RotaryEmbedding, query_scales
from worker_service.models.torch_operations import Attend, Operations


class Outputs(NamedTuple):
    """The outputs of a model for one forward pass over T tokens. Logits are computed for only R of these tokens,
    usually the last token of each sequence."""

    hidden: Tensor  # [T, hidden_size], the final hidden states
    logits: Tensor  # [R, vocab_size] float32
    highest: Tensor | None  # [R] int64, as `highest_logits` returns it; None: not computed
    times: dict[str, int]  # nanoseconds by part, named as in `StepParts`; only the parts that are measured separately


class Place(NamedTuple):
    """A weight of the model, and the module that stores it. In a layer with experts, each expert's weight has a `Place`
    of its own."""

    name: str  # of the weight in the model
    weight: Any  # a weight description from `pagewire.network.operations`
    holder: Any  # a `Linear` or an `Embedding`; None: the weight is a parameter of the model itself
    experts: ExpertLinear | None = None  # the expert layer that the holder belongs to


class Decoder(nn.Module):
    """A language model, or one rank's part of it. It computes hidden states and logits from token ids.

    Each weight is stored in a submodule that has the weight's name in the checkpoint. An exception is the LM head,
    which is in the submodule "head". Call `bind` after the weights are loaded, and then run the model under
    `torch.inference_mode`.
    """

    head: Linear

    def __init__(self, network: Network, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        self.network = network
        self.operations = operations
        self.communicator = communicator
        *before, head = network.operations
        assert type(head) is LmHead
        self._head = head
        # With the buffers that are released after each operation, and the offset of the operation's state, if any.
        offsets = map(state_offsets(network.operations).get, range(len(before)))
        self._before = list(zip(before, last_uses(network.operations), offsets, strict=False))
        self._steps: list[tuple[Any, tuple[str, ...], int | None]] = []  # the same, with weights replaced by holders
        self.holders: dict[Weight, Any] = {}  # for a vector, its values once `bind` has run
        self.places: list[Place] = []
        for weight in weights_of(network.operations):
            self._hold(weight, "head" if weight == head.head else weight.name)
        self._unused_tokens: Tensor | None = None  # set by `bind`, if the model has unused tokens
        turns = [operation for operation in before if type(operation) is QkNormRopeStore]
        ropes = {(turn.rope, turn.heads.head_dim): turn.num_positions for turn in turns if turn.rope is not None}
        self.ropes = [RotaryEmbedding(*rope, num_positions) for rope, num_positions in ropes.items()]
        self._ropes = nn.ModuleList(self.ropes)
        # The lookup tables by position, keyed by the configuration that they are computed from. The tables of a rope
        # also depend on the size of the heads.
        self.tables: dict[tuple[RopeConfig, int] | QueryScaling, Any] = {
            **dict(zip(ropes, self.ropes, strict=True)),
            **{turn.growth: partial(query_scales, turn.growth) for turn in turns if turn.growth is not None},
        }

    def _hold(self, weight: Weight, name: str) -> None:
        holder: Any = _HOLDERS[type(weight)](weight, self.operations)
        self.holders[weight] = holder
        _place(self, name, holder)
        if type(weight) is Projection and weight.num_experts:
            self.places += [
                Place(f"{name}.{expert}", linear.projection, linear, holder)
                for expert, linear in enumerate(holder.linears)
            ]
        else:
            self.places.append(Place(name, weight, None if type(weight) is Vector else holder))

    @property
    def embedding(self) -> Any:
        """The module that stores the embedding table. It is an `Embedding`, or a `Linear` if, for example, the LM
        head's weight is also the embedding (tied embedding)."""
        return self.holders[embedding_of(self.network.operations)]

    def keep_float32(self) -> None:
        """Convert back to float32 the weights that the model always uses in float32. Call this after the model was
        converted to another dtype."""
        for name, weight, holder, _ in self.places:
            if type(weight) is Vector and weight.is_float32:
                self.get_parameter(name).data = self.get_parameter(name).data.float()
            elif type(weight) is Projection and weight.is_float32:
                holder.float()

    def bind(self) -> None:
        """Make the model ready for `forward`: in its list of operations, replace the descriptions of weights by the
        loaded weights. Call this once, after loading."""
        for weight in self.holders:
            if type(weight) is Vector:
                self.holders[weight] = self._values(weight)
        bound: dict[type, Callable[[Any], Any]] = dict.fromkeys((Vector, Table, Projection), self.holders.__getitem__)
        bound[QueryScaling] = self.tables.__getitem__
        self._steps = [
            (replaced(self.with_rope_table(operation), bound), *others) for operation, *others in self._before
        ]
        if self.network.unused_tokens:
            self._unused_tokens = torch.tensor(self.network.unused_tokens, device=next(self.parameters()).device)

    def with_rope_table(self, operation: Any) -> Any:
        """Return an operation with the tables of its rope in place of the rope's configuration."""
        return replaced(operation, {RopeConfig: lambda rope: self.tables[rope, operation.heads.head_dim]})

    def _values(self, vector: Vector) -> Tensor:
        values = self.get_parameter(vector.name).data
        if vector.order:
            values.copy_(values[torch.tensor(vector.order)])
        if vector.is_log:
            values.exp_().neg_()
        return values.add_(1) if vector.adds_one else values

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, states: StateRows | None = None) -> Tensor:
        """Return the final hidden states, [T, hidden_size], of a flat batch of T tokens. `token_ids` and `positions`
        are [T] int64, and `attend` computes attention over the KV cache. `states` is needed for a model with states,
        which are updated."""
        step = Step(self, token_ids, positions, attend, states)
        for operation, released, offset in self._steps:
            step.run_operation(operation, offset)
            for buffer in released:
                del step.buffers[buffer]
        return step.buffers[self._head.input]

    def forward_logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        logit_rows: Tensor,
        states: StateRows | None = None,
    ) -> Outputs:
        """Run one forward pass over T tokens. Return the hidden states of all tokens, and the logits of the R tokens in
        `logit_rows`. `token_ids` and `positions` are [T] int64. `logit_rows` [R] int64 contains indexes of tokens.
        `attend` computes attention over the KV cache. `states` is needed for a model with states, which are updated."""
        hidden = self.forward(token_ids, positions, attend, states)
        began_ns = time.perf_counter_ns()
        if len(logit_rows):
            chosen = hidden if len(logit_rows) == len(hidden) else hidden.index_select(0, logit_rows)
            logits = self.compute_logits(chosen)
        else:
            logits = torch.empty(0, self.network.vocab_size)
        return Outputs(hidden, logits, None, {"head": time.perf_counter_ns() - began_ns})

    def tables_digest(self, slopes: Sequence[float]) -> str:
        """Return a SHA-256, in hexadecimal, of all tables that are computed from config.json and not read from the
        checkpoint. All ranks must have equal tables, so the caller compares their digests. The tables are the cosines
        and sines of all positions and the ALiBi `slopes` of all heads."""
        digests = [rope.digest for rope in self.ropes]
        return hashlib.sha256(b"".join([*digests, *(struct.pack("<d", slope) for slope in slopes)])).hexdigest()

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the float32 logits, [R, vocab_size], of final hidden states, [R, hidden_size]. The logits are written
        to the dense tensor `out`, or to new memory if `out` is None."""
        if self.communicator.size == 1:
            logits = self.head.multiply_to_float32(hidden, out)
        else:
            gathered = self.communicator.all_gather(self.head.multiply_to_float32(hidden))
            logits = gathered[:, : self.network.vocab_size]
            logits = logits if out is None else out.copy_(logits)
        if self._head.factor != 1:
            logits.mul_(self._head.factor)
        if self._head.softcap:
            logits.div_(self._head.softcap).tanh_().mul_(self._head.softcap)
        return self.mask_unused(logits)

    def mask_unused(self, logits: Tensor) -> Tensor:
        """Set the logits of unused tokens to the lowest float32, in place: [R, vocab_size]. Return the logits."""
        if self._unused_tokens is None:
            return logits
        return logits.index_fill_(1, self._unused_tokens, torch.finfo(torch.float32).min)


def _hold_projection(projection: Projection, operations: Operations) -> Linear | ExpertLinear:
    if not projection.num_experts:
        return Linear(projection, operations)
    of_each = map(projection.of_expert, range(projection.num_experts))
    return ExpertLinear([Linear(each, operations) for each in of_each], operations)


# The holder to create for each type of weight.
_HOLDERS: dict[type, Callable[[Any, Operations], nn.Module | nn.Parameter]] = {
    Table: lambda table, operations: Embedding(table.num_rows, table.width),
    Vector: lambda vector, operations: nn.Parameter(torch.empty(vector.num_elements), requires_grad=False),
    Projection: _hold_projection,
}


def _place(root: nn.Module, name: str, holder: nn.Module | nn.Parameter) -> None:
    """Register a weight's module or parameter in `root` under its dotted name, such as "layers.0.weight". Intermediate
    modules that do not exist yet are created."""
    *path, last = name.split(".")
    for part, following in pairwise([*path, last]):
        if not hasattr(root, part):
            root.add_module(part, nn.ModuleList() if following.isdigit() else nn.Module())
        root = root.get_submodule(part)
    setattr(root, last, holder)
