"""The interface between the worker and every model."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from pagewire.common.network.config import ModelConfig

# attend(layer, query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim], the layer's `Scoring.sinks`)
# -> [T, num_heads, head_dim]. Where keys and values are kept, and which tokens belong together, is its own business.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Model(Protocol):
    """A loaded causal language model. Callers hold `torch.inference_mode`."""

    config: ModelConfig

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states, [T, hidden_size], of a flat batch: token_ids and positions are [T] int64."""

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32. `out`: where to write them, dense; None: new memory."""

    def tables_digest(self, slopes: Sequence[float]) -> str:
        """Return SHA-256, in hexadecimal, over what was computed of config.json alone while the model loaded: cosines
        and sines of all positions, slopes of all heads. All ranks have the same."""
