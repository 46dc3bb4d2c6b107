"""Weights in floats of 8 bits with a scale for each block of inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Panels of the CPU kernels have a scale for each output and at most so many inputs, a unit, of a multiple of so many.
_MAX_UNIT, _MIN_UNIT = 128, 16

# What each byte means. A look-up is several times as fast as torch's conversion on CPUs.
_FLOATS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def unit_size(block_size: int, in_size: int) -> int:
    """Inputs that have a scale together in the panels of the CPU kernels; 0: such blocks have no panels."""
    unit = math.gcd(block_size, in_size, _MAX_UNIT)
    return 0 if unit % _MIN_UNIT else unit


@dataclass(frozen=True, slots=True)
class Float8Format:
    """What is known of a weight before it is read."""

    block_size: int
    rounds_inputs: bool = False  # made for inputs that are rounded to FP8

    def num_bytes(self, out_size: int, in_size: int) -> int:
        """Return the memory that a weight takes in the panels of the CPU kernels, which there must be."""
        return out_size * (in_size + in_size // unit_size(self.block_size, in_size) * 4)

    @staticmethod
    def join(formats: Sequence["Float8Format"]) -> "Float8Format":
        """Return the format of weights one below the other."""
        block_size = math.gcd(*(each.block_size for each in formats))
        return Float8Format(block_size, all(each.rounds_inputs for each in formats))


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A weight [out, in] that means `scale * value`, computed in float32. Blocks are consecutive inputs of one output;
    the last may be shorter."""

    values: Tensor  # float8_e4m3fn [out, in]
    scale: Tensor  # float32 [out, ceil(in / block_size)]
    block_size: int

    def dequantized(self) -> Tensor:
        """Return the weight in float32, [out, in]."""
        scale = self.scale.repeat_interleave(self.block_size, 1) if self.scale.shape[1] > 1 else self.scale
        codes = self.values.view(torch.uint8).int()
        return (
            _FLOATS.to(codes.device).index_select(0, codes.flatten()).view(codes.shape).mul_(scale[:, : codes.shape[1]])
        )

    def __getitem__(self, rows: Tensor) -> "Float8Weight":
        """Return the weight that has these outputs, in this order."""
        values = self.values.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return Float8Weight(values, self.scale[rows], self.block_size)

    @staticmethod
    def join(weights: Sequence["Float8Weight"]) -> "Float8Weight":
        """Return the weight that has the outputs of several, all of as many inputs, one below the other."""
        if len(weights) == 1:
            return weights[0]
        in_size, block_size = weights[0].values.shape[1], math.gcd(*(weight.block_size for weight in weights))
        num_blocks = -(-in_size // block_size)
        scales = [
            weight.scale.repeat_interleave(weight.block_size // block_size, 1)[:, :num_blocks] for weight in weights
        ]
        values = torch.cat([weight.values.view(torch.uint8) for weight in weights])
        return Float8Weight(values.view(torch.float8_e4m3fn), torch.cat(scales), block_size)
