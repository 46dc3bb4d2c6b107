"""Kernels for the operations that use states of sequences, one launch each. Specification: `pagewire.kernels.states`.

A program computes the tokens of a row one after another, in decode steps and in prefills alike, and keeps its part of
the state in registers. So the bits of a row depend neither on the division of its tokens into steps nor on other rows.
Chunked forms of the delta rule compute prompts faster, as matrix multiplications. They keep the bits only if chunks
begin at absolute positions, the multiples of their size, and if a decode step repeats the tokens of its chunk. They are
a later optimization.

Multiplications and additions are not fused, so the compiler has no choice that could change bits.
"""

from collections import namedtuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.states import StateRows
from pagewire.kernels.triton.launching import FLOATS, Strided, check_tensor

KERNEL_SIZES = range(2, 8 + 1)
MAX_KEY_DIM = 256
MAX_HEAD_DIM = 1024

# The work of one program.
_TILE_CHANNELS = 128
_TILE_VALUES = 8  # columns of the state of a head
_TILE_CELLS = 1024  # values of the state of a head: 32 per thread of the only warp
_TILE_ELEMENTS = 1024

_NORM_EPS = tl.constexpr(1e-6)

# The compile-time constants of the kernels.
ConvolutionConstants = namedtuple("ConvolutionConstants", "width kernel_size tile is_gated")
DeltaConstants = namedtuple("DeltaConstants", "num_heads num_key_heads key_dim padded_keys value_dim tile")


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: StateRows, offset: int, *, is_gated: bool = False
) -> Tensor:
    """Compute the causal convolution of each channel. `pagewire.kernels.states.convolve` specifies the result.

    The bits of a gated output and of the states equal the specification. silu is rounded differently.

    Args:
        x: [T, width], or [T, 3 * width] if `is_gated`; float16, bfloat16 or float32, any row stride.
        weight: [width, kernel_size] float32, kernel_size 2 to 8.
        bias: [width] float32, or None.
        rows: the rows of the step, on the device. Their states are updated; the row stride of the states may be any.
        offset: the index of the operation's first value in a state.

    Returns:
        [T, width], dense, in the dtype of x. The output of a token of no row is undefined.

    Raises:
        ValueError: a shape, dtype or stride is not supported.
    """
    check_tensor("weight", weight, ("width", "kernel_size"), torch.float32)
    width, kernel_size = weight.shape
    if kernel_size not in KERNEL_SIZES:
        raise ValueError(f"the convolution has a kernel_size of {kernel_size}; 2 to 8 are supported")
    check_tensor("x", x, ("T", 3 * width if is_gated else width), *FLOATS, is_strided=True)
    check_tensor("bias", bias, (width,), torch.float32)
    states = _states_of_operation(rows, offset, width * (kernel_size - 1))
    output = x.new_empty(len(x), width)
    constants = ConvolutionConstants(width, kernel_size, _TILE_CHANNELS, is_gated)
    if len(rows.reads):
        _convolve_kernel[(len(rows.reads), triton.cdiv(width, _TILE_CHANNELS))](
            Strided.of(x),
            weight,
            bias,
            output,
            Strided.of(states),
            *_index_tensors(rows),
            SHAPE=constants,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return output


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
    """Compute the gated delta rule of each head. `pagewire.kernels.states.apply_delta_rule` specifies the result.

    Args:
        x: [T, 2 * num_key_heads * key_dim + num_heads * value_dim], float16, bfloat16 or float32, any row stride.
        gate: [T, 2 * num_heads], of the dtype of x, any row stride.
        decay, bias: [num_heads] float32.
        rows: the rows of the step, on the device. Their states are updated; the row stride of the states may be any.
        offset: the index of the operation's first value in a state.
        num_key_heads: a divisor of num_heads.
        key_dim: at most 256.

    Returns:
        [T, num_heads * value_dim], dense, in the dtype of x. The output of a token of no row is undefined.

    Raises:
        ValueError: a shape, dtype or stride is not supported.
    """
    check_tensor("decay", decay, ("num_heads",), torch.float32)
    num_heads = len(decay)
    check_tensor("bias", bias, (num_heads,), torch.float32)
    check_tensor("x", x, ("T", "size"), *FLOATS, is_strided=True)
    check_tensor("gate", gate, (len(x), 2 * num_heads), x.dtype, is_strided=True)
    if not 1 <= key_dim <= MAX_KEY_DIM:
        raise ValueError(f"key_dim is {key_dim}; 1 to {MAX_KEY_DIM} are supported")
    if num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(f"num_key_heads is {num_key_heads}; make it a divisor of the {num_heads} heads")
    value_size = x.shape[1] - 2 * num_key_heads * key_dim
    if value_size < num_heads or value_size % num_heads:
        raise ValueError(f"x leaves {value_size} values for {num_heads} heads; make it a positive multiple")
    value_dim = value_size // num_heads
    states = _states_of_operation(rows, offset, value_size * key_dim)
    output = x.new_empty(len(x), value_size)
    padded_keys = triton.next_power_of_2(key_dim)
    tile = min(_TILE_VALUES, _TILE_CELLS // padded_keys)
    constants = DeltaConstants(num_heads, num_key_heads, key_dim, padded_keys, value_dim, tile)
    if len(rows.reads):
        _delta_rule_kernel[(len(rows.reads), num_heads, triton.cdiv(value_dim, tile))](
            Strided.of(x),
            Strided.of(gate),
            (decay, bias),
            output,
            Strided.of(states),
            *_index_tensors(rows),
            SHAPE=constants,
            num_warps=1,  # so sums over keys need no barrier
            enable_fp_fusion=False,
        )
    return output


def normalize_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the gated RMS norm of each head. `pagewire.kernels.states.normalize_gated` specifies the result.

    Args:
        x, gate: [T, num_heads * head_dim], float16, bfloat16 or float32, any row stride, head_dim at most 1024.
        weight: [head_dim], of the dtype of x or float32.
        eps: added to the mean square.

    Returns:
        [T, num_heads * head_dim], dense, in the dtype of x.

    Raises:
        ValueError: a shape, dtype or stride is not supported.
    """
    check_tensor("x", x, ("T", "size"), *FLOATS, is_strided=True)
    check_tensor("gate", gate, tuple(x.shape), x.dtype, is_strided=True)
    check_tensor("weight", weight, ("head_dim",), x.dtype, torch.float32)
    (num_tokens, size), head_dim = x.shape, len(weight)
    if not 1 <= head_dim <= MAX_HEAD_DIM or size % head_dim:
        raise ValueError(f"head_dim is {head_dim}; make it a divisor of the {size} columns, up to {MAX_HEAD_DIM}")
    output = x.new_empty(num_tokens, size)
    padded_dim = triton.next_power_of_2(head_dim)
    tile_heads = _TILE_ELEMENTS // padded_dim
    if output.numel():
        _normalize_gated_kernel[(num_tokens, triton.cdiv(size // head_dim, tile_heads))](
            Strided.of(x),
            Strided.of(gate),
            weight,
            output,
            eps,
            NUM_HEADS=size // head_dim,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            TILE_HEADS=tile_heads,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return output


def _states_of_operation(rows: StateRows, offset: int, size: int) -> Tensor:
    """Check the tensors of the rows. Return the part of the states that belongs to the operation,
    [num_states + 1, size]."""
    check_tensor("states", rows.states, ("num_states", "state_size"), torch.float32, is_strided=True)
    num_rows, num_saves = len(rows.reads), len(rows.save_states)
    for name, length in (
        ("reads", num_rows),
        ("query_start_loc", num_rows + 1),
        ("save_start_loc", num_rows + 1),
        ("save_states", num_saves),
        ("save_counts", num_saves),
    ):
        check_tensor(name, getattr(rows, name), (length,), torch.int32)
    if not 0 <= offset <= rows.states.shape[1] - size:
        raise ValueError(f"states have {rows.states.shape[1]} values; the operation needs {size} from {offset}")
    return rows.states[:, offset : offset + size]


def _index_tensors(rows: StateRows) -> tuple[Tensor, ...]:
    """Return the kernel arguments that describe the rows. They are separate arguments and not in a tuple: Triton
    recompiles a kernel if the alignment of a tensor inside a tuple changes."""
    return rows.query_start_loc, rows.reads, rows.save_start_loc, rows.save_counts, rows.save_states


_INDEX_NAMES = ["query_start_loc", "reads", "save_start_loc", "save_counts", "save_states"]


@triton.jit(do_not_specialize_on_alignment=_INDEX_NAMES)
def _convolve_kernel(
    x, weight, bias, output, states, query_start_loc, reads, save_start_loc, save_counts, save_states,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Triton kernel for a causal convolution. Each program computes the tokens of one row in a tile of channels."""
    SIZE: tl.constexpr = SHAPE.kernel_size - 1  # inputs of a channel in a state
    row = tl.program_id(0)
    channels = tl.program_id(1) * SHAPE.tile + tl.arange(0, SHAPE.tile)
    mask = channels < SHAPE.width
    token = tl.load(query_start_loc + row).to(tl.int64)
    read = states.data + tl.load(reads + row).to(tl.int64) * states.strides[0] + channels
    window, weights = (), ()
    for j in tl.static_range(SIZE):
        window = _append(window, tl.load(read + j * SHAPE.width, mask, 0.0))
        weights = _append(weights, tl.load(weight + channels * (SIZE + 1) + j, mask, 0.0))
    newest_weight = tl.load(weight + channels * (SIZE + 1) + SIZE, mask, 0.0)
    start = tl.full([SHAPE.tile], 0.0, tl.float32)
    if bias is not None:
        start = tl.load(bias + channels, mask, 0.0)
    num_done = 0
    for save in tl.range(tl.load(save_start_loc + row), tl.load(save_start_loc + row + 1)):
        count = tl.load(save_counts + save)
        for _ in tl.range(num_done, count):
            value, gate = _load_inputs(x.data + token * x.strides[0] + channels, mask, SHAPE)
            y = start
            for j in tl.static_range(SIZE):
                y += weights[j] * window[j]
            y += newest_weight * value
            y = gate * y if SHAPE.is_gated else tl.div_rn(y, 1.0 + tl.exp(-y))
            tl.store(output + token * SHAPE.width + channels, y.to(x.data.dtype.element_ty), mask)
            window = _append(window[1:], value)
            token += 1
        number = tl.load(save_states + save).to(tl.int64)
        if number != 0:
            saved = states.data + number * states.strides[0] + channels
            for j in tl.static_range(SIZE):
                tl.store(saved + j * SHAPE.width, window[j], mask)
        num_done = count


@triton.jit
def _append(values, value):
    values += (value,)
    return values


@triton.jit
def _load_inputs(x_at, mask, SHAPE: tl.constexpr):
    """Load the inputs of the convolution for one token, and the gates of the outputs, in float32. Without gates, the
    second result is not used."""
    values = tl.load(x_at, mask, 0.0).to(tl.float32)
    gates = values
    if SHAPE.is_gated:
        gates = tl.load(x_at + SHAPE.width, mask, 0.0).to(tl.float32)
        values *= tl.load(x_at + 2 * SHAPE.width, mask, 0.0).to(tl.float32)
    return values, gates


@triton.jit(do_not_specialize_on_alignment=_INDEX_NAMES)
def _delta_rule_kernel(
    x, gate, head_numbers, output, states, query_start_loc, reads, save_start_loc, save_counts, save_states,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Triton kernel for the gated delta rule. Each program computes the tokens of one row in some columns of the state
    of one head, [padded_keys, tile]. `head_numbers` has the decay and the bias of each head."""
    NUM_KEYS: tl.constexpr = SHAPE.num_key_heads * SHAPE.key_dim
    VALUE_SIZE: tl.constexpr = SHAPE.num_heads * SHAPE.value_dim
    row, head = tl.program_id(0), tl.program_id(1)
    decay, bias = tl.load(head_numbers[0] + head), tl.load(head_numbers[1] + head)
    keys = tl.arange(0, SHAPE.padded_keys)
    is_key = keys < SHAPE.key_dim
    columns = tl.program_id(2) * SHAPE.tile + tl.arange(0, SHAPE.tile)
    is_column = columns < SHAPE.value_dim
    mask = is_key[:, None] & is_column[None, :]
    cells = (head * SHAPE.key_dim + keys)[:, None] * SHAPE.value_dim + columns[None, :]
    state = tl.load(states.data + tl.load(reads + row).to(tl.int64) * states.strides[0] + cells, mask, 0.0)
    queries = x.data + head // (SHAPE.num_heads // SHAPE.num_key_heads) * SHAPE.key_dim + keys
    values = x.data + 2 * NUM_KEYS + head * SHAPE.value_dim + columns
    token = tl.load(query_start_loc + row).to(tl.int64)
    num_done = 0
    for save in tl.range(tl.load(save_start_loc + row), tl.load(save_start_loc + row + 1)):
        count = tl.load(save_counts + save)
        for _ in tl.range(num_done, count):
            query = _normalize(tl.load(queries + token * x.strides[0], is_key, 0.0).to(tl.float32))
            key = _normalize(tl.load(queries + NUM_KEYS + token * x.strides[0], is_key, 0.0).to(tl.float32))
            query *= SHAPE.key_dim**-0.5
            value = tl.load(values + token * x.strides[0], is_column, 0.0).to(tl.float32)
            gate_at = gate.data + token * gate.strides[0] + head
            beta = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(gate_at).to(tl.float32)))
            a = tl.load(gate_at + SHAPE.num_heads).to(tl.float32)
            state *= tl.exp(decay * _softplus(a + bias))
            change = beta * (value - tl.sum(state * key[:, None], axis=0))
            state += key[:, None] * change[None, :]
            y = tl.sum(state * query[:, None], axis=0).to(x.data.dtype.element_ty)
            tl.store(output + token * VALUE_SIZE + head * SHAPE.value_dim + columns, y, is_column)
            token += 1
        number = tl.load(save_states + save).to(tl.int64)
        if number != 0:
            tl.store(states.data + number * states.strides[0] + cells, state, mask)
        num_done = count


@triton.jit
def _normalize(vector):
    return vector * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(vector * vector, axis=0) + _NORM_EPS))


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)). The last step is log1p(small) as by Kahan, whose relative error is small also where 1 +
    small is rounded. The decay of a state needs it: its errors accumulate over all tokens."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    is_one = rounded == 1.0
    quotient = tl.div_rn(small, tl.where(is_one, 1.0, rounded - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_one, small, tl.log(rounded) * quotient)


@triton.jit
def _normalize_gated_kernel(
    x, gate, weight, output, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_HEADS: tl.constexpr,
):  # fmt: skip
    """Triton kernel for a gated RMS norm. Each program normalizes TILE_HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
    elements = tl.arange(0, PADDED_DIM)[None, :]
    mask = (heads < NUM_HEADS) & (elements < HEAD_DIM)
    places = heads * HEAD_DIM + elements
    dtype = x.data.dtype.element_ty
    values = tl.load(x.data + token * x.strides[0] + places, mask, 0.0).to(tl.float32)
    gates = tl.load(gate.data + token * gate.strides[0] + places, mask, 0.0).to(tl.float32)
    weights = tl.load(weight + elements, elements < HEAD_DIM, 0.0)
    rms = tl.sqrt_rn(tl.sum(values * values, axis=1) / HEAD_DIM + eps)
    normed = tl.div_rn(values, rms[:, None]).to(dtype).to(tl.float32)
    weighted = (weights.to(tl.float32) * normed).to(weights.dtype).to(tl.float32)
    silu = tl.div_rn(gates, 1.0 + tl.exp(-gates))
    tl.store(output + token * (NUM_HEADS * HEAD_DIM) + places, (weighted * silu).to(dtype), mask)
