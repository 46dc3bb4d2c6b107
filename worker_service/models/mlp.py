"""The MLP of a layer, or experts in its place: a router chooses a few for each token (Shazeer et al., 2017,
https://arxiv.org/abs/1701.06538). `pagewire.kernels.experts` specifies what these compute."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.common.network.config import ModelConfig
from worker_service.models.communicator import Communicator
from worker_service.models.linear import ExpertLinear, Linear
from worker_service.models.operations import Operations

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """An activation between two products; or gated, as GLU variants are (Shazeer, 2020,
    https://arxiv.org/abs/2002.05202)."""

    def __init__(
        self, config: ModelConfig, intermediate_size: int, operations: Operations, communicator: Communicator
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.activate = ActivationFunction(config, operations)
        self.up = Linear(config.hidden_size, up_sizes(config, intermediate_size), operations, bias=config.mlp_bias)
        self.down = Linear(
            intermediate_size,
            [config.hidden_size],
            operations,
            bias=config.mlp_bias,
            adds_bias=communicator.rank == 0,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.communicator.all_reduce(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """What this rank has of the sum over ranks."""
        return self.down(self.activate(self.up(x)))


class ActivationFunction:
    """What stands between the products of MLPs and of experts: [T, up] to [T, intermediate_size]."""

    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        self._config = config
        self._operations = operations

    def __call__(self, up: Tensor) -> Tensor:
        config = self._config
        if config.is_gated and config.activation == "silu":
            return self._operations.silu_mul(up)
        if config.activation == "clamped_swiglu":
            return clamped_swiglu(up, config.swiglu_alpha, config.swiglu_limit)
        function = _ACTIVATIONS[config.activation]
        if not config.is_gated:
            return function(up)
        gate, up = up.chunk(2, dim=-1)
        return function(gate) * up


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), of gates up to a limit, and ups up to it on both sides: that of gpt-oss
    (OpenAI, 2025, https://arxiv.org/abs/2508.10925), gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * (gate * alpha).sigmoid())


def up_sizes(config: ModelConfig, intermediate_size: int) -> list[int]:
    """The rows of the first product's projections. Gates come first."""
    return [intermediate_size] * (2 if config.is_gated else 1)


class ExpertMLP(nn.Module):
    """The sum of what a token's experts make of it, times their weights, and of what the shared one does, if there is
    one. Ranks have some columns of each expert, and all of the router."""

    def __init__(self, config: ModelConfig, operations: Operations, communicator: Communicator) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None
        self.routing = experts.routing
        self.operations = operations
        self.communicator = communicator
        self.router = Router(config, operations)
        self.activate = ActivationFunction(config, operations)
        self.up = ExpertLinear(
            experts.num_experts,
            config.hidden_size,
            up_sizes(config, experts.intermediate_size),
            operations,
            bias=experts.bias,
        )
        self.down = ExpertLinear(
            experts.num_experts,
            experts.intermediate_size,
            [config.hidden_size],
            operations,
            bias=experts.bias,
            adds_bias=communicator.rank == 0,
        )
        self.shared = self.shared_gate = None
        if experts.shared_intermediate_size:
            self.shared = MLP(config, experts.shared_intermediate_size, operations, communicator)
        if experts.has_shared_gate:
            self.shared_gate = Linear(config.hidden_size, [1], operations, bias=False, is_float32=True)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        operations = self.operations
        ids, weights = operations.route_tokens(self.router(x.float()), self.routing, self.router.correction)
        slots = self.down(self.activate(self.up(x, ids)), ids)
        update = operations.sum_slots(slots, weights)
        if self.shared is not None:
            update = update + self._shared(self.shared, x)
        return self.communicator.all_reduce(update)

    def _shared(self, shared: MLP, x: Tensor) -> Tensor:
        update = shared.partial(x)
        if self.shared_gate is None:
            return update
        return (update * self.shared_gate(x.float()).sigmoid()).to(x.dtype)


class Router(Linear):
    """A token's logits of experts, in float32."""

    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        experts = config.experts
        assert experts is not None
        sizes = [experts.num_experts]
        super().__init__(config.hidden_size, sizes, operations, bias=experts.has_router_bias, is_float32=True)
        correction = nn.Parameter(torch.empty(experts.num_experts), requires_grad=False)
        self.e_score_correction_bias = correction if experts.has_correction else None  # as checkpoints call it

    @property
    def correction(self) -> Tensor | None:
        """[num_experts] float32 that is added to scores for the routing."""
        return None if self.e_score_correction_bias is None else self.e_score_correction_bias.data
