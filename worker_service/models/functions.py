"""One function for each type of operation of a model. Each function applies `Operations` to the buffers of a step, on
any device.

`Decoder.bind` has replaced the operands of the operations. A weight is replaced by its holder: a tensor for a vector, a
module for a projection or a table. A rope or a query growth is replaced by a callable that returns cosines and sines,
or factors, for positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.states import StateRows
from pagewire.network.operations import (
    Activate,
    Add,
    AllReduce,
    AttendPaged,
    Clip,
    CombineExperts,
    Convolve,
    DeltaRule,
    Embed,
    Gate,
    Multiply,
    MultiplyRouted,
    Normalize,
    NormalizeGated,
    NormalizeProjections,
    QkNormRopeStore,
    RouteTopK,
)
from worker_service.models.torch_operations import Attend

if TYPE_CHECKING:
    from worker_service.models.decoder import Decoder


@dataclass(slots=True)
class Step:
    """The inputs and intermediate buffers of one forward pass over T tokens."""

    model: "Decoder"
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attend: Attend
    states: StateRows | None = None  # needed for a model with states
    # Tensors [T, width] by name. Routes are the ids and weights of experts; queries are the result of
    # `Operations.turn`.
    buffers: dict[str, Any] = field(default_factory=dict)
    _looked_up: dict[object, Any] = field(default_factory=dict)

    def run_operation(self, operation: Any, state_offset: int | None) -> None:
        """Run one operation of the model, for example a matrix multiplication. Its result is stored in the operation's
        output buffer. An `Add` writes its result to its input buffer instead. `state_offset` is the index of the
        operation's first value in a state, or None if the operation has no state."""
        name = operation.input if type(operation) is Add else operation.output
        if state_offset is None:
            self.buffers[name] = _FUNCTIONS[type(operation)](operation, self)
        else:
            assert self.states is not None
            function, x = _STATE_FUNCTIONS[type(operation)], self.buffers[operation.input]
            self.buffers[name] = function(operation, self, x, self.states, state_offset)

    def at_positions(self, table: Callable[[Tensor], Any]) -> Any:
        """Look up the rows of a table, such as the cosines and sines of rotary position embedding, at the positions of
        the step's tokens. The result is cached for the rest of the step, because several layers need it."""
        if table not in self._looked_up:
            self._looked_up[table] = table(self.positions)
        return self._looked_up[table]


def _embed(operation: Any, step: Step) -> Tensor:
    x = operation.table.lookup_rows(step.token_ids)
    if operation.factor != 1:
        x = x * operation.factor
    return x if operation.positions is None else x + operation.positions.lookup_rows(step.positions)


def _add(operation: Any, step: Step) -> Tensor:
    return step.buffers[operation.input].add_(_scaled(step.buffers[operation.update], operation.factor))


def _scaled(update: Tensor, factor: float) -> Tensor:
    return update if factor == 1 else update * factor


def _normalize(operation: Any, step: Step) -> Tensor:
    x, weight, operations = step.buffers[operation.input], operation.weight, step.model.operations
    update = None if operation.update is None else _scaled(step.buffers[operation.update], operation.factor)
    if operation.is_centered:
        x = x if update is None else x.add_(update)
        return F.layer_norm(x, x.shape[-1:], weight, operation.bias, operation.eps)
    if update is None:
        return operations.rms_norm(x, weight, operation.eps)
    return operations.add_rms_norm(x, update, weight, operation.eps)


def _normalize_projections(operation: Any, step: Step) -> Tensor:
    heads, communicator, eps = step.buffers[operation.input], step.model.communicator, operation.eps
    weights = operation.query_norm, operation.key_norm
    sizes = [len(weight) for weight in weights]
    *parts, values = heads.split([*sizes, heads.shape[1] - sum(sizes)], dim=1)
    if operation.head_dim:
        normed = [_normalize_heads(*each, operation.head_dim, eps) for each in zip(parts, weights, strict=True)]
        return torch.cat([*normed, values], dim=1)
    parts = [part.contiguous() for part in parts]
    if communicator.size == 1:
        normed = [step.model.operations.rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)]
        return torch.cat([*normed, values], dim=1)
    sums = torch.cat([x.float().square().sum(1, keepdim=True) for x in parts], dim=1)
    # Invariant: if several ranks store the same key head, every key head is stored equally often.
    totals = communicator.all_reduce(sums).split(1, dim=1)
    means = [total / (communicator.size * size) for total, size in zip(totals, sizes, strict=True)]
    normed = [
        ((x.float() / (mean + eps).sqrt()).to(weight.dtype) * weight).to(heads.dtype)
        for x, mean, weight in zip(parts, means, weights, strict=True)
    ]
    return torch.cat([*normed, values], dim=1)


def _normalize_heads(x: Tensor, weight: Tensor, head_dim: int, eps: float) -> Tensor:
    heads = F.layer_norm(x.float().unflatten(1, (-1, head_dim)), (head_dim,), eps=eps)
    return (heads.flatten(1) * weight).to(x.dtype)


def _multiply(operation: Any, step: Step) -> Tensor:
    x = step.buffers[operation.input]
    return operation.projection(x.float() if operation.projection.projection.is_float32 else x)


# For plain MLPs, and for the gate half of gated MLPs.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def _activate(operation: Any, step: Step) -> Tensor:
    up = step.buffers[operation.input]
    if operation.is_gated and operation.function == "silu":
        return step.model.operations.silu_mul(up)
    if operation.function == "clamped_swiglu":
        gate, up = up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=operation.limit), up.clamp(-operation.limit, operation.limit)
        return (up + 1) * (gate * (gate * operation.alpha).sigmoid())
    if operation.function == "xielu":
        return _xielu(up.float(), *operation.parameters).to(up.dtype)
    if not operation.is_gated:
        return _ACTIVATIONS[operation.function](up)
    gate, up = up.chunk(2, dim=-1)
    return _ACTIVATIONS[operation.function](gate) * up


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    below = (beta + F.softplus(alpha_n)) * (torch.expm1(torch.minimum(x, eps)) - x)
    return torch.where(x > 0, F.softplus(alpha_p) * x * x, below) + beta * x


def _route(operation: Any, step: Step) -> tuple[Tensor, Tensor]:
    logits, correction = step.buffers[operation.input], operation.correction
    return step.model.operations.route_tokens(logits, operation.routing, correction)


def _multiply_routed(operation: Any, step: Step) -> Tensor:
    ids, _ = step.buffers[operation.routes]
    return operation.projection(step.buffers[operation.input], ids)


def _combine(operation: Any, step: Step) -> Tensor:
    _, weights = step.buffers[operation.routes]
    return step.model.operations.sum_slots(step.buffers[operation.input], weights)


def _gate(operation: Any, step: Step) -> Tensor:
    x = step.buffers[operation.input]
    return (x * step.buffers[operation.gate].sigmoid()).to(x.dtype)


def _clip(operation: Any, step: Step) -> Tensor:
    return step.buffers[operation.input].clamp(-operation.limit, operation.limit)


def _prepare_heads(operation: Any, step: Step) -> tuple[Tensor, ...]:
    num_heads, query_weight, key_weight = operation.heads.num_heads, operation.query_norm, operation.key_norm
    heads = step.buffers[operation.input].unflatten(1, (-1, operation.heads.head_dim))  # [T, all heads, head_dim]
    if operation.growth is not None:
        heads[:, :num_heads] *= step.at_positions(operation.growth)[:, None, None].to(heads.dtype)
    if operation.rope is not None:
        cos, sin = step.at_positions(operation.rope)
    elif query_weight is None and key_weight is None:
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        return heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    else:
        cos = heads.new_ones(len(heads), operation.heads.head_dim)
        sin = torch.zeros_like(cos)
    preparation = NormRopeParams(num_heads, query_weight, key_weight, operation.eps, cos, sin, operation.rotates_first)
    return step.model.operations.turn(step.attend, operation.layer, heads, preparation)


def _attend(operation: Any, step: Step) -> Tensor:
    turned, sinks = step.buffers[operation.input], operation.sinks
    return step.model.operations.attend_rotated(step.attend, operation.layer, turned, sinks).flatten(1)


def _all_reduce(operation: Any, step: Step) -> Tensor:
    return step.model.communicator.all_reduce(step.buffers[operation.input])


def _convolve(operation: Any, step: Step, x: Tensor, states: StateRows, offset: int) -> Tensor:
    weight = operation.weight.view(-1, operation.kernel_size)
    return step.model.operations.convolve(x, weight, operation.bias, states, offset, is_gated=operation.is_gated)


def _apply_delta_rule(operation: Any, step: Step, x: Tensor, states: StateRows, offset: int) -> Tensor:
    gate, key_heads = step.buffers[operation.gate], operation.num_key_heads
    weights = operation.decay, operation.bias
    return step.model.operations.apply_delta_rule(
        x, gate, *weights, states, offset, num_key_heads=key_heads, key_dim=operation.key_dim
    )


def _normalize_gated(operation: Any, step: Step) -> Tensor:
    x, gate = step.buffers[operation.input], step.buffers[operation.gate]
    return step.model.operations.normalize_gated(x, gate, operation.weight, operation.eps)


_STATE_FUNCTIONS: dict[type, Callable[[Any, Step, Tensor, StateRows, int], Tensor]] = {
    Convolve: _convolve,
    DeltaRule: _apply_delta_rule,
}
_FUNCTIONS: dict[type, Callable[[Any, Step], Any]] = {
    Embed: _embed,
    Add: _add,
    Normalize: _normalize,
    NormalizeProjections: _normalize_projections,
    Multiply: _multiply,
    Activate: _activate,
    RouteTopK: _route,
    MultiplyRouted: _multiply_routed,
    CombineExperts: _combine,
    Gate: _gate,
    Clip: _clip,
    QkNormRopeStore: _prepare_heads,
    AttendPaged: _attend,
    AllReduce: _all_reduce,
    NormalizeGated: _normalize_gated,
}
