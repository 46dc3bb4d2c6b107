"""A model in one call: the list of operations that `source/decoder.h` carries out, on tensors.

Operations name the buffers that they read and write: [T, width] of float32 for a step of T tokens. The list is made of
a model by `worker_service/host/decoder.py`.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cache_rows import head_dim_of
from pagewire.kernels.cpu.linear import ELEMENTS, LinearLayer, PackedExperts, PackedLinear
from pagewire.kernels.cpu.operations import CpuKernels
from pagewire.kernels.cpu.paged import (
    CACHE_ELEMENTS,
    NO_ROWS,
    PagedRows,
    PagedStep,
    address_of,
    cache_step,
    check,
    put_rows,
)
from pagewire.kernels.experts import ExpertRouting


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """output = table[token] * factor + positions[position]."""

    output: str
    table: Tensor | PackedLinear  # [vocab_size, width] of any dtype that kernels know, or what has such a weight
    positions: Tensor | None = None  # [number of positions, width] of any dtype that kernels know
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """input += update * factor."""

    input: str
    update: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Normalize:
    """input += update * factor, where there is one; then output = input / rms(input) * weight; or, centered, layer
    normalization: (input - mean) / deviation * weight + bias."""

    input: str
    output: str
    weight: Tensor  # [width] float32
    eps: float
    update: str | None = None
    bias: Tensor | None = None
    is_centered: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class NormalizeParts:
    """output = input, of which the first values, and those behind them, are each divided by their rms and multiplied
    with a weight."""

    input: str
    output: str
    weights: tuple[Tensor, Tensor]  # float32, as long as the parts
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Multiply:
    """output = input W^T + b; gated, silu of its first half times its second (`can_gate`)."""

    input: str
    output: str
    linear: PackedLinear
    is_gated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Activate:
    """output = f(input); gated, that of the first half of the input times the second. The input may have several parts
    as wide as one another, each with such halves: the slots of a token.

    `clamped_swiglu` is gated: (up + 1) * gate * sigmoid(alpha * gate), of gates up to a limit, and ups up to it on both
    sides.
    """

    input: str
    output: str
    function: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]
    is_gated: bool = False
    num_parts: int = 1
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The experts of each token and their weights, which others read as `routes`: see `route_tokens` in
    `kernels/experts.py`, whose words are used here."""

    input: str  # [T, num_experts], a router's logits
    routes: str
    routing: ExpertRouting
    correction: Tensor | None = None  # [num_experts] float32


@dataclass(frozen=True, slots=True, eq=False)
class MultiplyRouted:
    """output = x W^T + b of each slot, with the weight and bias of its expert; gated as `Multiply`."""

    input: str  # [T, in_size] of tokens, or [T, num_chosen * in_size] of slots
    output: str  # [T, num_chosen * out_size]
    routes: str
    linears: Sequence[PackedLinear]  # of each expert: of the same sizes, and over inputs of one kind
    is_gated: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SumSlots:
    """output = the slots of each token, times the weights of their experts, summed up in the order of the experts."""

    input: str  # [T, num_chosen * width]
    output: str  # [T, width]
    routes: str


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """output = input * sigmoid(gate)."""

    input: str
    gate: str  # [T, 1]
    output: str


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Of heads (queries, then keys, then values), normalizes those of queries and keys where there is a weight, turns
    them by their position where there are cosines, gives the queries, and stores keys and values."""

    input: str  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    output: str  # [T, num_heads * head_dim]
    layer: int
    head_dim: int
    query_norm: Tensor | None = None  # [head_dim] float32
    key_norm: Tensor | None = None
    eps: float = 0.0
    cos: Tensor | None = None  # [positions, head_dim] float32, as `CpuKernels.norm_rope` takes them
    sin: Tensor | None = None
    query_scales: Tensor | None = None  # [positions] float32, of queries that are turned


@dataclass(frozen=True, slots=True, eq=False)
class AttendTo:
    """Queries to all that a layer has stored of their row."""

    input: str
    output: str
    layer: int
    sinks: Tensor | None = None  # [num_heads] float32; see `Scoring`


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """output = input, bounded to -limit and limit; NaN stays."""

    input: str
    output: str
    limit: float


@dataclass(frozen=True, slots=True, eq=False)
class Predict:
    """The input is the final hidden states, and the head's product of it, times a factor, the logits; with a softcap
    they are bounded to softcap * tanh(logit / softcap)."""

    input: str
    head: PackedLinear
    factor: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """output = the sum of what all ranks have as input."""

    input: str
    output: str


Operation: TypeAlias = (
    Embed
    | Add
    | Normalize
    | NormalizeParts
    | Multiply
    | Activate
    | Route
    | MultiplyRouted
    | SumSlots
    | Gate
    | Turn
    | AttendTo
    | Predict
    | AllReduce
    | Clip
)

# The orders of source/decoder.h.
_KINDS = get_args(Operation)
_FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
_SCORINGS = ("softmax", "sigmoid")
# What operations and their mirrors have by the same names; of most kinds, some of it.
_BUFFERS = ("input", "output", "update", "routes")
_TENSORS = ("weight", "bias", "query_norm", "key_norm", "cos", "sin", "query_scales", "sinks")
_NUMBERS = ("eps", "softcap", "limit", "is_centered", "is_gated", "num_parts")
_NO_BUFFER, _MAX_BUFFERS = -1, 32
MAX_EXPERTS = 1024
_NO_MEMORY, _LOST_RANKS = 1, 2  # what a step may end with
_AllReduce = ctypes.CFUNCTYPE(ctypes.c_int)
PARTS = ("norms", "products", "rotary", "attention", "head")
_NUM_TIMES = len(PARTS) + 1  # and what ranks take to sum up


class _ExpertRouting(ctypes.Structure):
    """Mirrors `expert_routing` of source/experts.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_experts", "num_chosen", "scoring", "renormalizes")),
        *((name, ctypes.c_int64) for name in ("num_groups", "num_chosen_groups")),
        ("factor", ctypes.c_float),
        ("correction", ctypes.c_void_p),
    )


class _Operation(ctypes.Structure):
    """Mirrors `operation` of source/decoder.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "input", "output", "update")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("part_sizes", ctypes.c_int64 * 2),
        ("is_centered", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "factor", "softcap", "limit")),
        ("layer", LinearLayer),
        *((name, ctypes.c_int64) for name in ("is_gated", "function", "num_parts", "routes")),
        ("routing", _ExpertRouting),
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("table", "positions")),
        *((name, ctypes.c_int64) for name in ("table_element", "positions_element")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm", "cos", "sin", "query_scales")),
        ("rotary_size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("key_cache", "value_cache")),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    )


class _Decoder(ctypes.Structure):
    """Mirrors `decoder` of source/decoder.h."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_operations", "num_buffers")),
        ("widths", ctypes.c_void_p),
        ("cache_element", ctypes.c_int64),
        ("all_reduce", _AllReduce),
    )


class _DecoderStep(ctypes.Structure):
    """Mirrors `decoder_step` of source/decoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "logit_rows")),
        ("num_logits", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "logits", "highest", "exchanged")),
    )


class DecoderKernel:
    """A model as a list of operations, from token ids to logits.

    Activations are float32, and rounded as its products say. The cache may be of any dtype that kernels know.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        operations: Sequence[Operation],
        num_heads: int,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """
        Args:
            operations: one of them predicts, the last.
            num_heads: those of queries.
            all_reduce: gives the sum of what all ranks pass, [T, width] float32; for `AllReduce`.

        Raises ValueError if a weight does not fit, or a buffer is read that nothing has written.
        """
        self._library = kernels.library
        self._joined: list[Tensor] = []  # weights, which operations point to
        self._experts: list[PackedExperts] = []  # the same
        self._model = tuple(operations)
        self._num_heads = num_heads
        self._widths = _Widths(self._model, num_heads).of
        if len(self._widths) > _MAX_BUFFERS:
            raise ValueError(f"there are {len(self._widths)} buffers; {_MAX_BUFFERS} fit")
        (self._head,) = [operation.head for operation in operations if isinstance(operation, Predict)]
        self._buffers = {name: number for number, name in enumerate(self._widths)}
        self._operations = (_Operation * len(self._model))(*map(self._mirror, self._model))
        self._sizes = (ctypes.c_int64 * len(self._widths))(*self._widths.values())
        self._decoder = _Decoder(
            ctypes.addressof(self._operations), len(self._model), len(self._widths), ctypes.addressof(self._sizes)
        )
        self._exchange = _Exchange(all_reduce) if all_reduce is not None else None
        exchanged = {self._widths[operation.output] for operation in operations if isinstance(operation, AllReduce)}
        if exchanged and (self._exchange is None or len(exchanged) > 1):
            raise ValueError(f"ranks are to sum up widths of {exchanged}; one can be, where there are ranks")
        self._exchanged_width = max(exchanged, default=0)
        if self._exchange is not None:
            self._decoder.all_reduce = self._exchange.callback
        self._kv_cache: Sequence[LayerCache] | None = None
        self._scorings: Sequence[Scoring] = ()
        self._step: PagedStep | None = None  # over that cache
        self._times = (ctypes.c_int64 * _NUM_TIMES)()

    def _mirror(self, operation: Operation) -> _Operation:
        mirror = _Operation(
            kind=_KINDS.index(type(operation)),
            **{name: self._number(getattr(operation, name, None)) for name in _BUFFERS},
            **{name: address_of(getattr(operation, name, None)) for name in _TENSORS},
            **{name: getattr(operation, name, 0) for name in _NUMBERS},
            factor=getattr(operation, "factor", 1.0),
        )
        match operation:
            case Embed(table=table, positions=positions):
                if isinstance(table, PackedLinear):
                    mirror.layer = table.layer()
                else:
                    mirror.table, mirror.table_element = table.data_ptr(), ELEMENTS[table.dtype]
                if positions is not None:
                    mirror.positions, mirror.positions_element = positions.data_ptr(), ELEMENTS[positions.dtype]
            case NormalizeParts(weights=weights):
                self._joined.append(torch.cat(weights))
                mirror.weight = address_of(self._joined[-1])
                mirror.part_sizes[:] = [len(weight) for weight in weights]
            case Multiply():
                mirror.layer = operation.linear.layer()
            case Activate():
                mirror.function, mirror.factor = _FUNCTIONS.index(operation.function), operation.alpha
            case Route():
                mirror.output = self._number(operation.routes)
                mirror.routing = _routing(operation, self._widths[operation.input])
            case MultiplyRouted(linears=linears):
                self._experts.append(PackedExperts(linears))
                mirror.experts = self._experts[-1].address()
                mirror.routing.num_experts = len(linears)
                mirror.routing.num_chosen = self._widths[operation.routes] // 2
            case SumSlots():
                mirror.routing.num_chosen = self._widths[operation.routes] // 2
            case Gate():
                mirror.routes = self._number(operation.gate)
            case Turn():
                mirror.rotary_size = 0 if operation.cos is None else operation.cos.shape[1]
            case Predict():
                mirror.layer = operation.head.layer()
        return mirror

    def _number(self, buffer: str | None) -> int:
        return _NO_BUFFER if buffer is None else self._buffers[buffer]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        rows: PagedRows,
        scorings: Sequence[Scoring],
        kv_cache: Sequence[LayerCache],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step through all layers; writes its keys and values to the cache.

        Args:
            token_ids, positions: [T] int64; trusted.
            logit_rows: [R] int64, the tokens that have logits, R at most T; trusted.
            rows: the step's; they hold T tokens.
            scorings: of each layer; all but the window is the first one's, and sinks are the operations'.
            kv_cache: of each layer, all of the same dtype, shape and strides.

        Returns:
            Final hidden states [T, hidden_size], logits [R, out_size of the head], and which logit is the highest of
            each row, [R] int64: the first of equals, -1 where there is a NaN.

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
            MemoryError: there is none to compute in.
            Whatever `all_reduce` raises.
        """
        num_tokens, num_logits = len(token_ids), len(logit_rows)
        check("token_ids", token_ids, torch.int64, (num_tokens,))
        check("positions", positions, torch.int64, (num_tokens,))
        check("logit_rows", logit_rows, torch.int64, (num_logits,))
        if num_logits > num_tokens:
            raise ValueError(f"{num_logits} of {num_tokens} tokens are to have logits; all can at most")
        if len(rows.slot_mapping) != num_tokens:
            raise ValueError(f"there are {num_tokens} token_ids and {len(rows.slot_mapping)} in rows; they must agree")
        self._use_cache(kv_cache, scorings)
        assert self._step is not None
        step = self._step
        put_rows(step, rows, num_tokens)
        hidden = torch.empty(num_tokens, self._head.in_size)
        logits = torch.empty(num_logits, self._head.out_size)
        highest = torch.empty(num_logits, dtype=torch.int64)
        tokens = _DecoderStep(
            token_ids.data_ptr(),
            positions.data_ptr(),
            logit_rows.data_ptr(),
            num_logits,
            hidden.data_ptr(),
            logits.data_ptr(),
            highest.data_ptr(),
        )
        if self._exchange is not None:
            tokens.exchanged = self._exchange.begin(num_tokens, self._exchanged_width)
        status = self._library.decode(*map(ctypes.addressof, (self._decoder, step, tokens, self._times)))
        if status == _NO_MEMORY:
            raise MemoryError(f"no memory for a step of {num_tokens} tokens")
        if self._exchange is not None:
            self._exchange.end(status == _LOST_RANKS)
        return hidden, logits, highest

    def times(self) -> dict[str, int]:
        """Nanoseconds of the last step by part, `PARTS`, without what ranks take to sum up; activations are a part of
        the products."""
        return dict(zip(PARTS, self._times, strict=False))

    def _use_cache(self, kv_cache: Sequence[LayerCache], scorings: Sequence[Scoring]) -> None:
        """Points the operations to a cache. Raises ValueError if its layers differ in dtype, shape or strides."""
        if kv_cache is self._kv_cache:
            return
        first_key, first_value = kv_cache[0]
        self._check_heads(first_key.shape[2], head_dim_of(first_key))
        for key, value in kv_cache:
            found = (key.shape, key.stride(), value.shape, value.stride(), key.dtype, value.dtype)
            first = (first_key.shape, first_key.stride(), first_value.shape, first_value.stride())
            if found != (*first, first_key.dtype, first_key.dtype) or key.dtype not in CACHE_ELEMENTS:
                raise ValueError(
                    f"caches of {key.dtype} {tuple(key.shape)} with strides {key.stride()} and of {first_key.dtype} "
                    f"{tuple(first_key.shape)} with strides {first_key.stride()}: all layers have one shape, in one of "
                    f"{', '.join(map(str, CACHE_ELEMENTS))}"
                )
        for mirror, operation in zip(self._operations, self._model, strict=True):
            if isinstance(operation, Turn | AttendTo):
                key, value = kv_cache[operation.layer]
                mirror.key_cache, mirror.value_cache = key.data_ptr(), value.data_ptr()
                mirror.window = scorings[operation.layer].window
        self._decoder.cache_element = CACHE_ELEMENTS[first_key.dtype]
        # The stride of queries is the operation's, and rows are put in at each step.
        self._step = cache_step(NO_ROWS, scorings[0], 0, self._num_heads, 0, first_key, first_value)
        self._kv_cache, self._scorings = kv_cache, scorings

    def _check_heads(self, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError unless heads have this number and size."""
        num_all = self._num_heads + 2 * num_kv_heads
        for operation in self._model:
            if isinstance(operation, AttendTo):
                check("sinks", operation.sinks, torch.float32, (self._num_heads,))
            if not isinstance(operation, Turn):
                continue
            sizes = (self._widths[operation.input], self._widths[operation.output])
            if sizes != (num_all * head_dim, self._num_heads * head_dim):
                raise ValueError(
                    f"heads are {sizes[0]} wide and queries {sizes[1]}; {self._num_heads} query heads and "
                    f"{num_kv_heads} KV heads of {head_dim} need {num_all * head_dim} and {self._num_heads * head_dim}"
                )
            for name in ("query_norm", "key_norm"):
                check(name, getattr(operation, name), torch.float32, (head_dim,))
            for name in ("cos", "sin"):
                table = getattr(operation, name)
                if table is not None:
                    check(name, table, torch.float32, (len(table), head_dim))
            if operation.query_scales is not None:
                check("query_scales", operation.query_scales, torch.float32, (len(operation.query_scales),))


class _Exchange:
    """What C calls to have ranks sum up. The error of one that could not waits until the step has ended."""

    def __init__(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        self.callback = _AllReduce(self._sum_up)
        self._all_reduce = all_reduce
        self._exchanged = torch.empty(0)
        self._error: BaseException | None = None

    def begin(self, num_tokens: int, width: int) -> int:
        """Return the address of what a step exchanges."""
        self._exchanged = torch.empty(num_tokens, width)
        return self._exchanged.data_ptr()

    def end(self, is_lost: bool) -> None:
        """Raises what kept ranks from summing up."""
        error, self._error = self._error, None
        if is_lost:
            assert error is not None
            raise error

    def _sum_up(self) -> int:
        try:
            self._exchanged.copy_(self._all_reduce(self._exchanged))
        except BaseException as error:
            self._error = error
            return 1
        return 0


def _routing(operation: Route, num_experts: int) -> _ExpertRouting:
    routing = operation.routing
    return _ExpertRouting(
        num_experts=num_experts,
        num_chosen=routing.num_chosen,
        scoring=_SCORINGS.index(routing.scoring),
        renormalizes=routing.renormalizes,
        num_groups=routing.num_groups,
        num_chosen_groups=routing.num_chosen_groups,
        factor=routing.factor,
        correction=address_of(operation.correction),
    )


class _Widths:
    """The width of each buffer, as operations write it. Raises ValueError if one reads another."""

    def __init__(self, operations: Sequence[Operation], num_heads: int) -> None:
        self.of: dict[str, int] = {}
        self._routed: dict[str, tuple[int, int]] = {}  # of routes: num_chosen, and of how many experts
        self._num_heads = num_heads
        for operation in operations:
            if isinstance(operation, Add):
                self._read(operation.update, self._read(operation.input))
            elif isinstance(operation, Predict):
                self._read(operation.input, operation.head.in_size)
            elif isinstance(operation, Route):
                self._write(operation.routes, self._routes_width(operation))
            elif isinstance(operation, MultiplyRouted | SumSlots):
                self._write(operation.output, self._chosen_width(operation))
            else:
                self._write(operation.output, self._width(operation))

    def _read(self, buffer: str, width: int | None = None) -> int:
        found = self.of.get(buffer)
        if found is None or width not in (None, found):
            raise ValueError(f"buffer {buffer} is {found or 'not written'}; {width or 'something'} is read from it")
        return found

    def _write(self, buffer: str, width: int) -> None:
        if self.of.setdefault(buffer, width) != width:
            raise ValueError(f"buffer {buffer} is {self.of[buffer]} wide and {width} elsewhere")

    def _width(
        self,
        operation: Embed | Normalize | NormalizeParts | Multiply | Activate | Gate | Turn | AttendTo | AllReduce | Clip,
    ) -> int:
        """The width of an operation's output."""
        match operation:
            case Embed(_, table, positions):
                width = _table_width("embedding", table)
                if positions is not None and _table_width("positions", positions) != width:
                    raise ValueError(f"positions are {positions.shape[1]} wide and tokens {width}")
            case Normalize():
                width = self._read(operation.input)
                check("norm", operation.weight, torch.float32, (width,))
                check("norm's bias", operation.bias, torch.float32, (width,))
                if operation.update is not None:
                    self._read(operation.update, width)
            case NormalizeParts(input, _, weights):
                width = self._read(input)
                for weight in weights:
                    check("part's norm", weight, torch.float32, (len(weight),))
                if sum(map(len, weights)) > width:
                    raise ValueError(f"parts of {[len(weight) for weight in weights]} are normalized of {width} values")
            case Multiply(input, _, linear, is_gated):
                self._read(input, linear.in_size)
                width = linear.out_size // (2 if is_gated else 1)
            case Activate(input):
                width = self._read(input) // (2 if operation.is_gated else 1)
                if width % operation.num_parts:
                    raise ValueError(f"buffer {input} does not have {operation.num_parts} parts of one width")
            case Gate(input, gate):
                self._read(gate, 1)
                width = self._read(input)
            case Turn(input):
                self._read(input)
                width = self._num_heads * operation.head_dim
            case AttendTo(input) | AllReduce(input) | Clip(input):
                width = self._read(input)
        return width

    def _routes_width(self, operation: Route) -> int:
        """An id and a weight for each expert of a token. Raises ValueError if it has more of them than there are."""
        num_experts, routing = self._read(operation.input), operation.routing
        if not 0 < routing.num_chosen <= num_experts <= MAX_EXPERTS:
            raise ValueError(f"{routing.num_chosen} of {num_experts} experts cannot be chosen; 1 to {MAX_EXPERTS} can")
        if num_experts % routing.num_groups or not 0 < routing.num_chosen_groups <= routing.num_groups:
            raise ValueError(
                f"{routing.num_chosen_groups} of {routing.num_groups} groups of {num_experts} experts cannot be chosen"
            )
        check("correction", operation.correction, torch.float32, (num_experts,))
        self._routed[operation.routes] = routing.num_chosen, num_experts
        return 2 * routing.num_chosen

    def _chosen_width(self, operation: MultiplyRouted | SumSlots) -> int:
        """The width of what is computed of slots."""
        if operation.routes not in self._routed:
            raise ValueError(f"buffer {operation.routes} is read as routes, which nothing has written to it")
        num_chosen, num_experts = self._routed[operation.routes]
        width = self._read(operation.input)
        if isinstance(operation, SumSlots):
            if width % num_chosen:
                raise ValueError(f"buffer {operation.input} is {width} wide: not {num_chosen} slots of one width")
            return width // num_chosen
        if len(operation.linears) != num_experts:
            raise ValueError(f"there are {len(operation.linears)} weights of {num_experts} experts")
        experts = PackedExperts(operation.linears)
        if width not in (experts.in_size, num_chosen * experts.in_size):
            raise ValueError(
                f"buffer {operation.input} is {width} wide; {experts.in_size} inputs are read of each slot"
            )
        return num_chosen * (experts.out_size // (2 if operation.is_gated else 1))


def _table_width(name: str, table: Tensor | PackedLinear) -> int:
    if isinstance(table, PackedLinear):
        return table.in_size
    check(name, table, table.dtype if table.dtype in ELEMENTS else torch.float32, (len(table), table.shape[1]))
    return table.shape[1]
