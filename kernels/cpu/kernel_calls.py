"""The C kernels as functions on tensors. `pagewire.kernels.reference` specifies each function under the same name.

All tensors are on the CPU, and all have one dtype, float32 or bfloat16. There are two exceptions. If the rest is
float32, a cache or a weight may have any 16-bit dtype. A cache of 8 bits (float8_e4m3fn, or int8 with scales:
`pagewire.kernels.cache_rows`) works with either dtype. Arithmetic is in float32. A value that plain torch would store
in the dtype between two operations is rounded to the dtype here too.

All arguments are checked before memory is read or written, except for indexes inside tensors (block tables, slots),
which are trusted.
"""

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.arguments import NormRopeParams, Scoring
from pagewire.kernels.cpu.abi import Structure, address_of, check, constants, element_of, ffi
from pagewire.kernels.cpu.library import Library
from pagewire.kernels.cpu.linear import PackedExperts, PackedLinear, PanelFormat
from pagewire.kernels.cpu.paged import PagedRows, paged_step
from pagewire.kernels.quantized import GROUP_SIZE, round_scale, round_scales
from pagewire.kernels.weight import BLOCK, FLOAT8, StoredWeight, unit_size

# The dtypes to which the input of a matmul can be rounded, by the element type of the weight.
_OVER = {
    torch.float32: (torch.float32,),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float16: (torch.float32,),
    FLOAT8: (torch.bfloat16,),
    torch.int8: (torch.int8,),
}
_ACTIVATIONS = (torch.float32, torch.bfloat16)  # of kernels between matmuls
# The floating-point dtypes for scales, smallest first.
_FLOAT_SCALES = (torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32)
_EXPONENT_BITS = 0x7F800000  # of float32


class CpuKernels:
    """The compiled C kernels as Python functions on tensors. The functions release the GIL and use
    `torch.get_num_threads()` threads."""

    def __init__(self, library: Library) -> None:
        self.library, self._path = library

    @property
    def variant(self) -> str:
        """The instruction set for which the kernels were compiled, one of `VARIANTS`."""
        return ffi.string(self.library.variant()).decode()

    @property
    def digest(self) -> str:
        """The SHA-256 of the compiled library, in hexadecimal. The memory layout of packed weights can change only
        together with this digest, so the digest identifies the layout of stored packed weights."""
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    # Attention

    def attend(
        self,
        rows: PagedRows,
        scoring: Scoring,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        group: int = 0,
    ) -> Tensor:
        """Write a step's keys and values to the KV cache of one layer, in place, then compute causal attention for the
        step's rows (one running sequence each).

        A row attends to all its cached positions, including the new ones. The step may mix rows with any number of
        queries. The kernel computes an online softmax in float32 (Milakov and Gimelshein, 2018,
        https://arxiv.org/abs/1805.02867) directly over the pages.

        Args:
            rows: the rows of the step. Positions after a row's end or before its window are not read.
            scoring: as in `pagewire.kernels.reference`.
            query: [T, num_heads, head_dim] in the cache's dtype or float32; any dtype if the cache has 8 bits. Tokens
                may be strided.
            key, value: [T, num_kv_heads, head_dim]; tokens may be strided. They are rounded to the cache's dtype.
            key_cache, value_cache: [num_blocks, block_size, num_kv_heads, row_size]; all strides but the last are free.
            group: the layer group whose block tables and slots are used.

        Returns:
            The attention output, [T, num_heads, head_dim].

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
            MemoryError: there is not enough memory for the task list.
        """
        step = paged_step(rows, scoring, query, key, value, key_cache, value_cache, group)
        output = torch.empty(query.shape, dtype=query.dtype)
        self._call("attend", query.dtype, key_cache.dtype, step.at, query, key, value, key_cache, value_cache, output)
        return output

    # Matrix multiplication

    def pack_linear(
        self, weight: StoredWeight, bias: Tensor | None = None, activation: torch.dtype = torch.float32
    ) -> PackedLinear:
        """Pack the weight of a linear layer into panels, the memory layout that the C matrix multiplication needs. The
        values do not change.

        Codes are stored in 4 bits if there are at most 16 distinct ones, and in 6 bits if all are from -32 to 31 or 0
        to 63. Their scales and minima are stored in the narrowest dtype that represents all of them exactly.

        Args:
            weight: the weight; a float8 weight must not contain NaN.
            bias: [out_size] float32.
            activation: the dtype to which `linear` rounds its input, if the weight is float32 or 16-bit: float32, or
                bfloat16 if the weight is bfloat16.

        Raises:
            ValueError: shapes, strides or dtypes do not fit, or `unit_size` supports no unit for the group size.
        """
        element, (out_size, in_size) = weight.element, weight.values.shape
        check("values", weight.values, element, (out_size, in_size))
        check("bias", bias, torch.float32, (out_size,))
        if element not in _OVER:
            raise ValueError(f"no kernel supports weights of {element}; use one of {', '.join(map(str, _OVER))}")
        activation = activation if weight.scale is None else _OVER[element][0]
        if activation not in _OVER[element]:
            raise ValueError(f"activations of {activation} are not supported with a weight of {element}")
        if not _is_narrow(weight):
            weight = weight.without_factors()
        empty = PackedLinear(
            torch.empty(0, dtype=torch.uint8), bias, in_size, out_size, activation, self._format_of(weight)
        )
        panels = torch.empty(self.library.packed_bytes(empty.layer), dtype=torch.uint8)
        source = Structure("held_weight", group_size=weight.group_size, **weight.parts())
        self._call("pack_linear", empty.layer, source.at, panels, torch.get_num_threads())
        return replace(empty, panels=panels)

    def _format_of(self, weight: StoredWeight) -> PanelFormat:
        """Return the format in which a weight's panels are stored: the one with the fewest bits that represents the
        weight exactly. Panels are the memory layout of the C matrix multiplication. Raises ValueError if the group size
        is not supported."""
        element, values = weight.element, weight.values
        if weight.scale is None:
            return PanelFormat(element)
        unit = unit_size(element, weight.group_size, values.shape[1])
        if not unit:
            raise ValueError(f"the group size {weight.group_size} is not supported for {values.shape[1]} inputs")
        if element == FLOAT8:
            return PanelFormat(element, unit)
        table = torch.zeros(16, dtype=torch.int8)
        bits = self.library.find_codes(address_of(values), values.numel(), address_of(table), torch.get_num_threads())
        floats = [part for part in (weight.scale, weight.minimum) if part is not None]
        dtypes = _FLOAT_SCALES if weight.scale_factor is None else (torch.int8,)
        return PanelFormat(
            element,
            unit,
            bits,
            scale_dtype=next(dtype for dtype in dtypes if all(_represents_exactly(dtype, part) for part in floats)),
            has_minima=weight.minimum is not None,
            table=tuple(table.tolist())[: {4: 16, 6: 1}.get(bits, 0)],
            has_zeros=weight.zero is not None,
        )

    def can_gate(self, packed: PackedLinear) -> bool:
        """Return whether one matrix multiplication with this weight can also apply the activation of a gated MLP. The
        first half of the weight's outputs must be the gates of the second half."""
        return bool(self.library.is_gateable(packed.layer))

    def quantize(self, values: Tensor, bits: int, importance: Tensor | None = None) -> StoredWeight:
        """Quantise a weight, float32 [rows, columns], to codes of 8, 6 or 4 bits. `pagewire.kernels.quantized.quantize`
        specifies the rounding, and the use of the `importance` of each column, float32 [columns].

        Raises:
            ValueError: shapes, strides or dtypes do not fit, or a value is not finite or too large.
        """
        num_rows, num_columns = values.shape
        check("values", values, torch.float32, (num_rows, num_columns))
        check("importance", importance, torch.float32, (num_columns,))
        unit = BLOCK if bits == 4 else GROUP_SIZE
        if bits not in (8, 6, 4) or num_columns % unit:
            raise ValueError(f"cannot quantise {num_columns} columns to {bits} bits in units of {unit}")
        codes = torch.empty(num_rows, num_columns, dtype=torch.int8)
        scale, num_threads = torch.empty(num_rows, num_columns // GROUP_SIZE), torch.get_num_threads()
        if bits != 4:
            self._call("quantize", values, scale.numel(), bits, codes, scale, num_threads)
            return StoredWeight(codes, round_scale(scale), GROUP_SIZE)
        minimum = torch.empty_like(scale)
        of_columns = importance, num_columns // GROUP_SIZE
        self._call("search_scales", values, scale.numel(), *of_columns, scale, minimum, num_threads)
        scales = round_scales(scale, minimum)
        plain = scales.without_factors()
        self._call("round_codes", values, scale.numel(), plain.scale, plain.minimum, codes, num_threads)
        return replace(scales, values=codes)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Compute the output of a linear layer, x W^T + b, in float32: [T, in_size] to [T, out_size]. The output of a
        row does not depend on other rows.

        Raises:
            ValueError: the shape, strides or dtype of `x` do not fit.
            MemoryError: there is not enough memory for the computation.
        """
        check("x", x, torch.float32, (len(x), packed.in_size))
        output = torch.empty(len(x), packed.out_size)
        self._call("linear", packed.layer, x, output, len(x), torch.get_num_threads())
        return output

    def multiply_routed(self, x: Tensor, experts: PackedExperts, ids: Tensor) -> Tensor:
        """Multiply each token by the weights of its chosen experts, in float32, as
        `pagewire.kernels.experts.multiply_routed` does.

        Each pair of a token and one of its chosen experts is called a slot. The output of a slot equals the output of
        `linear` and does not depend on other slots.

        Args:
            x: [T, in_size], a row per token, or [T * num_chosen, in_size], a row per slot.
            ids: [T, num_chosen] int64, ascending in each row; the values are not checked.

        Returns:
            One row per slot, [T * num_chosen, out_size].

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
            MemoryError: there is not enough memory for the computation.
        """
        num_tokens, num_chosen = ids.shape
        check("ids", ids, torch.int64, (num_tokens, num_chosen))
        num_rows = num_tokens if len(x) == num_tokens else ids.numel()
        check("x", x, torch.float32, (num_rows, experts.in_size))
        output = torch.empty(ids.numel(), experts.out_size)
        self._call(
            "multiply_experts",
            experts.layers,
            len(experts.linears),
            ids,
            x,
            num_rows // max(num_tokens, 1),
            output,
            num_tokens,
            num_chosen,
            torch.get_num_threads(),
        )
        return output

    def lookup_rows(self, packed: PackedLinear, indexes: Tensor) -> Tensor:
        """Return rows of a packed weight in float32, as an embedding looks them up: [T] int64 to [T, in_size].

        The values of the indexes are not checked. Raises ValueError if the indexes are not int64 or not contiguous.
        """
        check("indexes", indexes, torch.int64, (len(indexes),))
        output = torch.empty(len(indexes), packed.in_size)
        self._call("lookup_rows", packed.layer, indexes, output, len(indexes))
        return output

    # Between matmuls

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the root mean square normalization x / sqrt(mean(x^2) + eps), rounded, times weight
        (https://arxiv.org/abs/1910.07467).

        `x` is [T, size] and `weight` is [size]. Raises ValueError if shapes, strides or dtypes do not fit.
        """
        return self.add_rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `update` to the residual stream `x` in place, unless `update` is None, and return `rms_norm` of the sum.
        `x` and `update` are [T, size].

        Raises ValueError if shapes, strides or dtypes do not fit.
        """
        num_tokens, size = x.shape
        check("x", x, x.dtype, (num_tokens, size))
        check("weight", weight, x.dtype, (size,))
        check("update", update, x.dtype, (num_tokens, size))
        output = torch.empty_like(x)
        self._call("add_rms_norm", x.dtype, x, update, weight, output, num_tokens, size, eps, torch.get_num_threads())
        return output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, the activation of a gated MLP (https://arxiv.org/abs/2002.05202).

        `gate_up` is [T, 2 * size], gates first, and the result is [T, size]. Raises ValueError if the tensor is strided
        or its width is odd.
        """
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        check("gate_up", gate_up, gate_up.dtype, (num_tokens, 2 * size))
        output = gate_up.new_empty(num_tokens, size)
        self._call("silu_mul", gate_up.dtype, gate_up, output, num_tokens, size, torch.get_num_threads())
        return output

    def norm_rope(self, heads: Tensor, preparation: NormRopeParams) -> tuple[Tensor, Tensor, Tensor]:
        """Prepare query and key heads for attention, in place: normalize them, then apply rotary position embedding.

        With `rotates_first`, normalize after the rotation. Queries or keys without a norm weight are only rotated.

        Args:
            heads: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values. Values do not change.
            preparation: the norm weights and rotations, in the dtype of the heads.

        Returns:
            Views of `heads`: queries, keys and values.

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
        """
        num_heads, query_weight, key_weight, eps, cos, sin, rotates_first = preparation
        num_tokens, num_all_heads, head_dim = heads.shape
        num_kv_heads = (num_all_heads - num_heads) // 2
        if num_kv_heads < 1 or num_heads + 2 * num_kv_heads != num_all_heads or head_dim % 2:
            raise ValueError(
                f"heads are {tuple(heads.shape)} with {num_heads} query heads; the remaining heads must be half keys "
                "and half values, and head_dim must be even"
            )
        check("heads", heads, heads.dtype, tuple(heads.shape))
        for name, table in (("cos", cos), ("sin", sin)):
            check(name, table, heads.dtype, (num_tokens, head_dim))
        for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
            check(name, weight, heads.dtype, (head_dim,))
        self._call(
            "norm_rope",
            heads.dtype,
            heads,
            query_weight,
            key_weight,
            cos,
            sin,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            eps,
            rotates_first,
            torch.get_num_threads(),
        )
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return query, key, value

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the C library, passing tensors as pointers and dtypes as element numbers.

        Raises ValueError if the function does not support the dtypes, and MemoryError if memory ran out.
        """
        status = getattr(self.library, name)(*map(_to_c_argument, arguments))
        if status == constants.NO_KERNEL:
            found = " over ".join(str(argument) for argument in arguments if isinstance(argument, torch.dtype))
            raise ValueError(f"{found} is not supported by {name}; use one of {', '.join(map(str, _ACTIVATIONS))}")
        if status == constants.NO_MEMORY:
            raise MemoryError(f"no memory for {name} of {[tuple(x.shape) for x in arguments if isinstance(x, Tensor)]}")


def _to_c_argument(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return element_of(argument)
    return address_of(argument) if argument is None or isinstance(argument, Tensor) else argument


def _is_narrow(weight: StoredWeight) -> bool:
    """Return whether the weight can be packed with scales and minima in int8, and their shared factors in float16,
    without changing a value."""
    floats = {name: part for name, part in weight.parts().items() if name not in ("values", "zero")}
    dtypes = {name: torch.float16 if name.endswith("factor") else torch.int8 for name in floats}
    return "scale_factor" in floats and all(_represents_exactly(dtypes[name], part) for name, part in floats.items())


def _represents_exactly(dtype: torch.dtype, values: Tensor) -> bool:
    if dtype == torch.float8_e8m0fnu:
        return not (values.view(torch.int32) & ~_EXPONENT_BITS).any()
    return torch.equal(values.to(dtype).float(), values)
