"""The building blocks of layers that have states of sequences instead of K and V.

Each block yields operations that read the buffer `normed` and write the buffer `update`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pagewire.network.blocks import parts_of
from pagewire.network.operations import (
    Convolve,
    DeltaRule,
    Multiply,
    NormalizeGated,
    Operation,
    Part,
    Projection,
    Share,
    Vector,
)


def short_convolution(name: str, size: int, kernel_size: int, *, has_bias: bool) -> Iterator[Operation]:
    """Yield the operations of a gated short convolution over `size` channels, the module `name` (LFM2, Liquid AI, 2025,
    https://arxiv.org/abs/2511.23404). With several tensor-parallel ranks, each rank has some channels."""
    channels, hidden = Share.of(size, 1, "channels of a convolution"), Share.of(size)
    parts = tuple(parts_of([f"{name}.in_proj"], [channels] * 3))
    yield Multiply("normed", "mixed", Projection(parts, hidden, has_bias))
    values = Share.of(size * kernel_size, kernel_size, channels.counted)
    weight = Vector(f"{name}.conv.weight", values, is_float32=True, row_size=kernel_size)
    bias = Vector(f"{name}.conv.bias", channels, is_float32=True) if has_bias else None
    yield Convolve("mixed", "convolved", weight, kernel_size, bias, is_gated=True)
    yield Multiply("convolved", "update", Projection((Part(f"{name}.out_proj", hidden),), channels, has_bias))


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The block of a gated delta net (Yang et al., 2024, https://arxiv.org/abs/2412.06464) of one layer. Call an
    instance with the name of the module to get the operations of the block. With several tensor-parallel ranks, each
    rank has some key heads and their value heads."""

    hidden_size: int
    num_heads: int  # of values; a multiple of num_key_heads
    num_key_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int  # of the convolution over queries, keys and values
    norm_eps: float

    def __call__(self, name: str, *, are_by_head: bool = False) -> Iterator[Operation]:
        """Yield the operations of the module `name`. With `are_by_head`, the module `in_proj_qkvz` stores the rows of
        the queries, keys, values and gates of each key head together, and `in_proj_ba` the rows of its rates.
        Otherwise, `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` store them."""
        hidden, values, rates = Share.of(self.hidden_size), self._values(), self._of_key_heads(1)
        if are_by_head:
            qkv, gates = self._parts_by_head(f"{name}.in_proj_qkvz")
            ratio = rates.unit
            rate_parts = [Part(f"{name}.in_proj_ba", rates, 2 * ratio, first) for first in (0, ratio)]
        else:
            qkv = tuple(parts_of([f"{name}.in_proj_qkv"], self._shares()))
            gates = Part(f"{name}.in_proj_z", values)
            rate_parts = [Part(f"{name}.in_proj_{each}", rates) for each in "ba"]
        yield Multiply("normed", "mixed", Projection(qkv, hidden))
        yield Convolve("mixed", "convolved", self._kernels(f"{name}.conv1d.weight"), self.kernel_size)
        yield Multiply("normed", "rates", Projection(tuple(rate_parts), hidden))
        decay = Vector(f"{name}.A_log", rates, is_float32=True, is_log=True)
        bias = Vector(f"{name}.dt_bias", rates, is_float32=True)
        sizes = self.num_heads, self.num_key_heads, self.key_dim, self.value_dim
        yield DeltaRule("convolved", "rates", "read_values", *sizes, decay, bias)
        yield Multiply("normed", "head_gates", Projection((gates,), hidden))
        weight = Vector(f"{name}.norm.weight", Share.of(self.value_dim))
        yield NormalizeGated("read_values", "head_gates", "gated_heads", weight, self.norm_eps)
        yield Multiply("gated_heads", "update", Projection((Part(f"{name}.out_proj", hidden),), values))

    def _parts_by_head(self, name: str) -> tuple[tuple[Part, ...], Part]:
        """Return the parts of queries, keys and values, and of gates, of the module `name`."""
        shares, parts, first = [*self._shares(), self._values()], [], 0
        for share in shares:
            parts.append(Part(name, share, sum(each.unit for each in shares), first))
            first += share.unit
        return tuple(parts[:-1]), parts[-1]

    def _kernels(self, name: str) -> Vector:
        """Return the weight of the convolution: the kernels of the channels of queries, keys and values."""
        sections = tuple(part.rows for part in parts_of([name], self._shares(self.kernel_size)))
        values = Share.of(sections[0].whole)
        return Vector(name, values, is_float32=True, row_size=self.kernel_size, sections=sections)

    def _shares(self, factor: int = 1) -> list[Share]:
        """Return the shares of queries, keys and values, with `factor` indices for each of their channels."""
        size = factor * self.key_dim
        keys = Share.of(self.num_key_heads * size, size, "key heads")
        return [keys, keys, self._of_key_heads(factor * self.value_dim)]

    def _values(self) -> Share:
        return self._of_key_heads(self.value_dim)

    def _of_key_heads(self, size: int) -> Share:
        """Return the share of all heads with `size` indices for each head. The heads of one key head stay together."""
        return Share.of(self.num_heads * size, self.num_heads // self.num_key_heads * size, "key heads")
