"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864), in the half-split layout of Llama."""

import math

import torch
from torch import Tensor, nn

from worker_service.models.config import RopeConfig


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
        angles = positions[:, None] * inverse_frequencies(self._config, head_dim)  # [positions, head_dim / 2]
        cos, sin = angles.cos() * self._config.attention_factor, angles.sin() * self._config.attention_factor
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


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair: [head_dim / 2], float32."""
    frequencies = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
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
