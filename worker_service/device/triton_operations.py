"""The operations of a decoder on a GPU: Triton kernels for experts and between matrix products, which are cuBLAS's."""

import torch
from torch import Tensor

from pagewire.kernels.arguments import HeadPreparation
from pagewire.kernels.triton import experts, fused
from pagewire.kernels.triton.cache import HEAD_DIMS
from worker_service.attention.cached_attend import CachedAttend
from worker_service.models.config import ModelConfig
from worker_service.models.model import Attend
from worker_service.models.operations import ExpertProduct, TorchOperations


class TritonOperations:
    """A launch each; intermediate results are rounded where `TorchOperations` rounds them."""

    def __init__(self) -> None:
        self.rms_norm = fused.rms_norm
        self.add_rms_norm = fused.add_rms_norm
        self.silu_mul = fused.silu_mul
        products = TorchOperations()
        self.can_hold, self.packs, self.prepare_product = products.can_hold, products.packs, products.prepare_product
        self.prepare_float32_product = products.prepare_float32_product
        self.multiplies_quantized, self.prepare_quantized = products.multiplies_quantized, products.prepare_quantized
        self.quantize = products.quantize
        self.join_experts = products.join_experts
        self.choose_experts, self.sum_slots = experts.choose_experts, experts.sum_slots
        self._assigned: tuple[Tensor, experts.Assignment] | None = None  # the last ids, and what became of them
        self.takes_rows, self.embedding_of = products.takes_rows, products.embedding_of

    @staticmethod
    def refusal(config: ModelConfig) -> str | None:
        """Why the kernels cannot compute a model, behind "they"; None: they can, or it uses the products alone."""
        if config.rope is None and config.qk_norm == "none" and config.norm == "layer":
            return None
        if config.head_dim not in HEAD_DIMS:
            bounds = f"{HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step}"
            return f"turn heads of {bounds}, and the model's are {config.head_dim}"
        if config.norm == "rms" and config.hidden_size > fused.MAX_NORM_SIZE:
            return f"normalize rows of at most {fused.MAX_NORM_SIZE}, and the model's are {config.hidden_size}"
        return None

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        return lambda x, ids: experts.multiply_chosen(x, weights, self._assign(ids, weights), biases)

    def _assign(self, ids: Tensor, weights: Tensor) -> experts.Assignment:
        """Both products of a layer have the same slots, which are sorted once."""
        if self._assigned is None or self._assigned[0] is not ids:
            self._assigned = ids, experts.assign(ids, len(weights), weights.dtype)
        return self._assigned[1]

    def attend_heads(
        self, attend: Attend, layer: int, heads: Tensor, preparation: HeadPreparation, sinks: Tensor | None
    ) -> Tensor:
        """Attend with rotated queries and keys. Where attention lets it, one launch turns the heads and writes keys and
        values to the cache."""
        if not isinstance(attend, CachedAttend):
            return attend(layer, *fused.norm_rope(heads, preparation), sinks)
        query = attend.caching.turn(heads, preparation, *attend.kv_cache[layer])
        return attend.attend_cached(layer, query, sinks)
