"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864), in the half-split layout of Llama.

Checkpoints that turn pairs of neighbours, or a part of each head, are brought to that layout while they are loaded
(`head_order`), so that one kernel does for all.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_service.models.config import QueryGrowth, RopeConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines by position, computed once in float32 and kept in the model's dtype, or as they are."""

    def __init__(self, config: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        self._config = config
        self.cos = nn.Buffer(torch.empty(max_position_embeddings, head_dim))
        self.sin = nn.Buffer(torch.empty(max_position_embeddings, head_dim))
        self._dtype: torch.dtype | None = None  # what rows are rounded to

    def keep_float32(self) -> None:
        """Keeps the tables as they are computed; rows of them have the dtype that the tables had."""
        self._dtype = self.cos.dtype
        self.float()

    def finish_loading(self) -> None:
        """Fills the tables. The first half of the sines is negated: see `rotate`."""
        max_position_embeddings, head_dim = self.cos.shape
        positions = torch.arange(max_position_embeddings, dtype=torch.float32)
        frequencies = inverse_frequencies(self._config, head_dim)
        angles = positions[:, None] * frequencies  # [positions, rotary_size / 2]
        cos, sin = angles.cos() * self._config.attention_factor, angles.sin() * self._config.attention_factor
        # The other pairs stay as they are.
        num_others = head_dim // 2 - len(frequencies)
        cos, sin = F.pad(cos, (0, num_others), value=1.0), F.pad(sin, (0, num_others))
        self.cos.copy_(torch.cat([cos, cos], dim=-1))
        self.sin.copy_(torch.cat([-sin, sin], dim=-1))

    def working_bytes(self) -> int:
        """Return the bytes that `finish_loading` takes for a while beside the tables: one of them and three halves, in
        float32."""
        return 5 * self.cos.numel() * torch.float32.itemsize // 2

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cosines and sines, [T, head_dim] each."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return (cos, sin) if self._dtype is None else (cos.to(self._dtype), sin.to(self._dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (x[i], x[i + head_dim / 2]) of every head by their angle: [T, num_heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def head_order(config: RopeConfig, head_dim: int) -> list[int] | None:
    """Return which value of a checkpoint's head each value of ours is, such that pairs are (i, i + head_dim / 2) and
    those that are turned come first; None: they are so already.

    Queries and keys in one order have the products that they had before.
    """
    size = config.rotary_size(head_dim)
    turned = [*range(0, size, 2), *range(1, size, 2)] if config.is_interleaved else list(range(size))
    if size == head_dim and not config.is_interleaved:
        return None
    middle = (size + head_dim) // 2
    return [*turned[: size // 2], *range(size, middle), *turned[size // 2 :], *range(middle, head_dim)]


def query_scales(growth: QueryGrowth, positions: Tensor) -> Tensor:
    """Return what queries of these positions are multiplied with, [T] float32."""
    return 1 + growth.beta * torch.log1p((positions // growth.num_positions).float())


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair that is turned: [rotary_size / 2], float32."""
    rotary_size = config.rotary_size(head_dim)
    frequencies = 1.0 / config.theta ** (torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size)
    if config.divisors:
        frequencies = frequencies / torch.tensor(config.divisors)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, frequencies)
    if config.rope_type == "yarn":
        return _yarn(config, frequencies)
    return frequencies


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slows low frequencies by `factor`, leaves high ones, and blends between; as Llama 3.1 was published."""
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = config.original_max_position_embeddings / config.low_freq_factor
    high_wavelength = config.original_max_position_embeddings / config.high_freq_factor
    blend = config.original_max_position_embeddings / wavelengths - config.low_freq_factor
    blend = blend / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    slowed = torch.where(wavelengths > low_wavelength, frequencies / config.factor, blended)
    return torch.where(wavelengths < high_wavelength, frequencies, slowed)


def _yarn(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slows pairs that turn seldom in the original context, leaves those that turn often, and ramps between.

    YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071), section 3.2.
    """
    head_dim = 2 * len(frequencies)

    def pair_that_turns(num_turns: float) -> float:
        ratio = config.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / config.factor * ramp + frequencies * (1 - ramp)
