"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864), in the half-split layout of Llama.

Checkpoints that rotate neighbouring pairs, or only a part of each head, are converted to this layout while they load
(`RopeConfig.head_order`). One kernel then supports them all.
"""

import hashlib
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.network.rope import QueryScaling, RopeConfig

_NUM_CHUNK_POSITIONS = 1024  # number of positions for which tables are filled at a time


class RotaryEmbedding(nn.Module):
    """Lookup tables of the cosines and sines that rotary position embedding needs, with one row per position. The
    tables are computed once in float32, and kept in the model's dtype or in float32."""

    def __init__(self, config: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        self._config = config
        self.cos = nn.Buffer(torch.empty(max_position_embeddings, head_dim))
        self.sin = nn.Buffer(torch.empty(max_position_embeddings, head_dim))
        # The dtype to which looked-up rows are rounded; None: the dtype of the tables.
        self._dtype: torch.dtype | None = None
        self.digest = b""  # SHA-256 of the tables in float32, once they are filled

    def keep_float32(self) -> None:
        """Convert the tables of cosines and sines to float32. Rows that are looked up are still rounded to the dtype
        that the tables had before this call."""
        self._dtype = self.cos.dtype
        self.float()

    def finish_loading(self) -> None:
        """Compute the tables of cosines and sines. The first half of each row of sines is negated, as `rotate`
        requires.

        numpy computes the values in float64, and they are rounded once, so that all machines get the same tables.
        torch's cosine is not used: its first vectorized call may round incorrectly when it runs on several threads.
        """
        num_positions, head_dim = self.cos.shape
        frequencies = inverse_frequencies(self._config, head_dim).numpy()
        # The pairs that are not rotated get cosine 1 and sine 0.
        others = (0, head_dim // 2 - len(frequencies))
        digest = hashlib.sha256()
        for start in range(0, num_positions, _NUM_CHUNK_POSITIONS):
            rows = slice(start, min(start + _NUM_CHUNK_POSITIONS, num_positions))
            positions = np.arange(rows.start, rows.stop, dtype=np.float32)
            angles = (positions[:, None] * frequencies).astype(np.float64)  # [positions, rotary_size / 2]
            cos, sin = (
                values.astype(np.float32) * np.float32(self._config.attention_factor)
                for values in (np.cos(angles), np.sin(angles))
            )
            digest.update(cos)
            digest.update(sin)
            padded = F.pad(torch.from_numpy(cos), others, value=1.0)
            self.cos[rows] = torch.cat([padded, padded], dim=-1)
            padded = F.pad(torch.from_numpy(sin), others)
            self.sin[rows] = torch.cat([-padded, padded], dim=-1)
        self.digest = digest.digest()

    def working_bytes(self) -> int:
        """Return an upper bound on the temporary memory, in bytes, that `finish_loading` needs. The memory contains a
        chunk of angles, cosines and sines in float64 and float32."""
        return 8 * min(_NUM_CHUNK_POSITIONS, self.cos.shape[0]) * self.cos.shape[1] * torch.float32.itemsize

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines for the given token positions: [T] -> two tensors [T, head_dim]."""
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        return (cos, sin) if self._dtype is None else (cos.to(self._dtype), sin.to(self._dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to query or key heads x, [T, num_heads, head_dim]. Each pair (x[i], x[i +
    head_dim / 2]) of a head is rotated by its angle. The first half of `sin` must be negated."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def query_scales(growth: QueryScaling, positions: Tensor) -> Tensor:
    """Return the factor by which the query at each token position is multiplied before attention, [T] float32. The
    factors grow with the position. This is the attention temperature of Llama 4 (https://arxiv.org/abs/2501.19399)."""
    return 1 + growth.beta * torch.log1p(((positions + growth.offset) // growth.num_positions).float())


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the rotation angle, in radians per position, of each pair of elements that rotary position embedding
    rotates: [rotary_size / 2] float32."""
    rotary_size = config.rotary_size(head_dim)
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size
    # Python computes the powers: the last bit of torch's powers depends on the kind of processor.
    frequencies = 1.0 / torch.tensor([config.theta**exponent for exponent in exponents.tolist()], dtype=torch.float32)
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
    """Scale rotary frequencies for long contexts, as published with Llama 3.1. Low frequencies are divided by
    `config.factor`, high frequencies are kept, and frequencies between them are blended."""
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = config.original_max_position_embeddings / config.low_freq_factor
    high_wavelength = config.original_max_position_embeddings / config.high_freq_factor
    blend = config.original_max_position_embeddings / wavelengths - config.low_freq_factor
    blend = blend / (config.high_freq_factor - config.low_freq_factor or 1.0)  # Llama 4 Scout: nothing is blended
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    slowed = torch.where(wavelengths > low_wavelength, frequencies / config.factor, blended)
    return torch.where(wavelengths < high_wavelength, frequencies, slowed)


def _yarn(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Scale rotary frequencies for long contexts with YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071,
    section 3.2).

    Frequencies of pairs that rotate only a few times within the original context are divided by `config.factor`.
    Frequencies of pairs that rotate often are kept, and frequencies in between are interpolated linearly.
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
