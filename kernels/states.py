"""States of sequences besides K and V, and the specification of the operations that use them, in plain torch.

A *state* is one row of a float32 matrix. It contains the states of all layers of one sequence, after some number of its
tokens. Every operation computes the tokens of a sequence one after another. So the values of a state do not depend on
how a prompt is divided into steps, nor on the other rows of a step.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateRows:
    """The states that the rows of one step read and write. Row i computes the tokens query_start_loc[i] to
    query_start_loc[i + 1] of the step.

    Row i starts with state reads[i]. It writes its state after each number of its new tokens in `save_counts`, for the
    entries save_start_loc[i] to save_start_loc[i + 1] of the saves. The counts of a row do not fall, and equal counts
    write the same state to several places. The last is the number of its new tokens. A count of 0 copies the state that
    the row starts with. A row may write the state that it reads. No other row reads or writes a state that a row
    writes. Padding rows, which only devices have, name state 0: their tokens are computed, and nothing is written.

    Attributes:
        states: [num_states + 1, state_size] float32. State 0 is zero and never written.
        query_start_loc: [R + 1] int32.
        reads: [R] int32.
        save_start_loc: [R + 1] int32.
        save_counts, save_states: [S] int32.
    """

    states: Tensor
    query_start_loc: Tensor
    reads: Tensor
    save_start_loc: Tensor
    save_counts: Tensor
    save_states: Tensor

    def saves(self, row: int) -> list[tuple[int, int]]:
        """Return the saves of a row as (number of new tokens, state), without saves to state 0."""
        first, past = self.save_start_loc[row : row + 2].tolist()
        saves = zip(self.save_counts[first:past].tolist(), self.save_states[first:past].tolist(), strict=True)
        return [(count, state) for count, state in saves if state]


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: StateRows, offset: int, *, is_gated: bool = False
) -> Tensor:
    """Compute `pagewire.network.operations.Convolve`, in float32.

    Args:
        x: [T, width], or [T, 3 * width] if `is_gated`.
        weight: [width, kernel_size] float32.
        bias: [width] float32, or None.
        rows: the rows of the step. Their states are updated.
        offset: the index of the operation's first value in a state.

    Returns [T, width], in the dtype of x.
    """
    width, kernel_size = weight.shape
    end = offset + width * (kernel_size - 1)
    gate, inputs = None, x.float()
    if is_gated:
        before, gate, inputs = inputs.chunk(3, dim=1)
        inputs = before * inputs
    output = torch.empty(len(x), width)
    for row, read in enumerate(rows.reads.tolist()):
        first, past = rows.query_start_loc[row : row + 2].tolist()
        last = rows.states[read, offset:end].view(kernel_size - 1, width)
        seen = torch.cat([last, inputs[first:past]])  # [kernel_size - 1 + number of tokens, width]
        for count, state in rows.saves(row):
            rows.states[state, offset:end] = seen[count : count + kernel_size - 1].flatten()
        for token in range(past - first):
            y = seen.new_zeros(width) if bias is None else bias.clone()
            for j in range(kernel_size):
                y += weight[:, j] * seen[token + j]
            output[first + token] = y
    return (F.silu(output) if gate is None else gate * output).to(x.dtype)


def apply_delta_rule(
    x: Tensor,
    gate: Tensor,
    decay: Tensor,
    bias: Tensor,
    rows: StateRows,
    offset: int,
    *,
    num_key_heads: int,
    key_dim: int,
) -> Tensor:
    """Compute `pagewire.network.operations.DeltaRule`, in float32.

    Args:
        x: [T, 2 * num_key_heads * key_dim + num_heads * value_dim].
        gate: [T, 2 * num_heads].
        decay, bias: [num_heads] float32.
        rows: the rows of the step. Their states are updated.
        offset: the index of the operation's first value in a state.

    Returns [T, num_heads * value_dim], in the dtype of x.
    """
    num_heads, num_keys = len(decay), num_key_heads * key_dim
    query, key, value = x.float().split([num_keys, num_keys, x.shape[1] - 2 * num_keys], dim=1)
    value = value.unflatten(1, (num_heads, -1))
    repeats = num_heads // num_key_heads
    query, key = (_normalize(each.unflatten(1, (num_key_heads, key_dim))) for each in (query, key))
    query, key = (each.repeat_interleave(repeats, dim=1) for each in (query * key_dim**-0.5, key))
    b, a = gate.float().chunk(2, dim=1)
    beta, factor = b.sigmoid(), (decay * F.softplus(a + bias)).exp()
    end = offset + num_heads * key_dim * value.shape[2]
    output = torch.empty_like(value)
    for row, read in enumerate(rows.reads.tolist()):
        first, past = rows.query_start_loc[row : row + 2].tolist()
        state = rows.states[read, offset:end].view(num_heads, key_dim, -1).clone()
        saves = rows.saves(row)
        for token in range(first, past + 1):
            for target in [target for count, target in saves if count == token - first]:
                rows.states[target, offset:end] = state.flatten()
            if token == past:
                break
            state *= factor[token, :, None, None]
            read_value = (state * key[token, :, :, None]).sum(1)
            change = beta[token, :, None] * (value[token] - read_value)
            state += key[token, :, :, None] * change[:, None]
            output[token] = (state * query[token, :, :, None]).sum(1)
    return output.flatten(1).to(x.dtype)


def _normalize(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)


def normalize_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `pagewire.network.operations.NormalizeGated`: x and gate [T, num_heads * head_dim], weight [head_dim].

    The norm is rounded to the dtype of x before it is multiplied by the weight, as in transformers.
    """
    heads = x.unflatten(1, (-1, len(weight)))
    normed = weight * F.rms_norm(heads.float(), weight.shape, None, eps).to(x.dtype)
    return (normed * F.silu(gate.float()).view_as(heads)).flatten(1).to(x.dtype)
