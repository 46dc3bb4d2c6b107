"""A model as one call of C: the list of operations that `source/decoder.h` runs on tensors.

Each operation names the buffers that it reads and writes. A buffer is [T, width] float32 for a step of T tokens.
`worker_service/host/cpu_decoder.py` builds the list from a model.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cache_rows import head_dim_of
from pagewire.kernels.cpu.abi import Structure, address_of, check, constants, element_of, ffi
from pagewire.kernels.cpu.kernel_calls import CpuKernels
from pagewire.kernels.cpu.linear import PackedExperts, PackedLinear
from pagewire.kernels.cpu.paged import PagedRows, cache_step, put_rows
from pagewire.kernels.states import StateRows
from pagewire.network.expert_routing import ExpertRouting
from pagewire.network.operations import AttendPaged, AttentionHeads, Convolve, QkNormRopeStore

# The parts that a step's time is divided into. The time of all-reduces is not included.
PARTS = ("norms", "products", "rotary", "attention", "head")
_STATE_COLUMNS = tuple(field.name for field in fields(StateRows))
_CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


class DecoderKernel:
    """A model whose whole forward pass runs in C. It contains a list of operations that compute logits from token ids,
    and C runs the list once per step. Activations are float32, and each matrix multiplication rounds its input as its
    packed weight specifies. The KV cache may have any dtype of `_CACHES`."""

    def __init__(
        self,
        kernels: CpuKernels,
        operations: Sequence[Any],
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Build the C structures of a model from its operations and packed weights.

        Args:
            operations: operations of `pagewire.network.operations`. The last one is the head. In place of each weight,
                an operation contains what the kernels need: a `PackedLinear` for a matrix, a list of `PackedLinear` for
                the matrices of experts, the cosines and sines of all positions for a rope, and otherwise a tensor, in
                float32 except for tables.
            all_reduce: returns the sum of the tensors of all ranks, [T, width] float32. It is needed for `AllReduce`.

        Raises ValueError if the shapes of two weights do not match, or an operation reads a buffer that no earlier
        operation has written.
        """
        self._decode = kernels.library.decode
        self._model = tuple(map(_by_inputs, operations))
        self._head: PackedLinear = self._model[-1].head
        self._numbers = {"nothing": 0}  # buffer numbers by name
        self._held: list[Any] = []  # keeps alive the memory that the structures point to
        self._operations = ffi.new("operation[]", len(self._model))
        for at, operation in zip(self._operations, self._model, strict=True):
            kind = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(operation).__name__)
            at.kind = getattr(constants, f"OPERATION_{kind.upper()}")
            self._put_fields(at, operation)
        if len(self._numbers) > constants.MAX_BUFFERS:
            raise ValueError(
                f"the model needs {len(self._numbers) - 1} buffers; the limit is {constants.MAX_BUFFERS - 1}"
            )
        names = [ffi.new("char[]", name.encode()) for name in self._numbers]
        self._held += [names, ffi.new("char *[]", names), ffi.new("int64_t[]", len(names))]
        # An exception of an all-reduce is kept here, and raised after the step has returned.
        self._errors: list[BaseException] = []
        self._callback = ffi.callback(
            "int64_t(void)",
            self._run_all_reduce,
            error=constants.LOST_RANKS,
            onerror=lambda *error: self._errors.append(error[1]),
        )
        self._all_reduce, self._exchanged = all_reduce, torch.empty(0)
        self._decoder = Structure(
            "decoder",
            operations=self._operations,
            num_operations=len(self._model),
            num_buffers=len(names),
            names=self._held[-2],
            widths=self._held[-1],
            all_reduce=self._callback if all_reduce else ffi.NULL,
        )
        kernels.library.plan_decoder(self._decoder.at)
        if rejection := ffi.string(self._decoder.at.misfit):
            raise ValueError(rejection.decode())
        self._cache: tuple[Sequence[LayerCache], Sequence[Scoring]] = [], []  # the cache and scorings of the last step
        self._layers: dict[int, Structure] = {}  # describe the layers of the cache above
        self._last_group = 0  # the highest layer group of a layer
        # These structures describe the rows, the tokens and the states of a step.
        self._step, self._tokens, self._states = map(Structure, ("attention_step", "decoder_step", "state_rows"))

    def _put_fields(self, at: Any, values: Any) -> None:
        """Fill in the members of a C structure from the fields of the Python object `values`, which describes one
        operation of the model. The type of a field's value decides how it is stored. A string is the name of a C
        constant if the member is an enum, and otherwise the name of a buffer."""
        members = dict(ffi.typeof(at).fields)
        for name in (field.name for field in fields(values)):
            match getattr(values, name):
                case None:
                    continue
                case str(text) if members[name].type.kind == "enum":
                    setattr(at, name, members[name].type.relements[f"{name}_{text}".upper()])
                case str(text):
                    setattr(at, name, self._numbers.setdefault(text, len(self._numbers)))
                case Tensor() as tensor:
                    _put_tensor(getattr(at, name), f"{type(values).__name__}'s {name}", tensor)
                case (Tensor(), Tensor()) as parts:
                    for place, part in zip(getattr(at, name), parts, strict=True):
                        _put_tensor(place, name, part)
                case ExpertRouting() as routing:
                    self._put_fields(getattr(at, name), routing)
                case AttentionHeads() as heads:  # scoring arrives with the cache
                    at.num_heads, at.num_kv_heads, at.head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
                case PackedLinear(layer=layer):
                    at.linear = layer
                case [*linears]:
                    self._held.append(PackedExperts(linears).layers)
                    at.linear, at.num_linears = self._held[-1], len(linears)
                case number:
                    setattr(at, name, number)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        rows: PagedRows,
        scorings: Sequence[Scoring],
        kv_cache: Sequence[LayerCache],
        layer_groups: Sequence[int] = (),
        states: StateRows | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step through all layers of the model. Write the keys and values of the new tokens to the KV cache,
        and update the states.

        Args:
            token_ids, positions: [T] int64; the values are not checked.
            logit_rows: [R] int64, indexes of the tokens whose logits are computed; R is at most T. The values are not
                checked.
            rows: the rows of the step, T tokens in total.
            scorings: one per layer. Sinks come from the operations.
            kv_cache: one per layer; all have the same dtype.
            layer_groups: the layer group of each layer, whose block tables in `rows` it uses; empty: all use the first.
            states: the states of the rows, for a model with states. Indexes and counts are not checked.

        Returns:
            The final hidden states [T, hidden_size], the logits [R, out_size of the head], and the index of the highest
            logit of each row, [R] int64. Among equal logits it is the lowest index; it is -1 if a row contains NaN.

        Raises:
            ValueError: shapes, strides or dtypes do not fit, or a model with states gets none.
            MemoryError: there is not enough memory for the step.
            Exception: any exception that `all_reduce` raised.
        """
        (num_tokens,), (num_logits,) = token_ids.shape, logit_rows.shape
        self._use_cache(kv_cache, scorings, layer_groups)
        self._check_sizes(num_tokens, len(positions), num_logits, rows)
        put_rows(self._step, rows, num_tokens)
        self._use_states(states)
        hidden = torch.empty(num_tokens, self._head.in_size)
        logits = torch.empty(num_logits, self._head.out_size)
        highest = torch.empty(num_logits, dtype=torch.int64)
        self._tokens.put(
            token_ids=token_ids,
            positions=positions,
            logit_rows=logit_rows,
            num_logits=num_logits,
            hidden=hidden,
            logits=logits,
            highest=highest,
        )
        if self._all_reduce:
            self._exchanged = torch.empty(num_tokens, self._decoder.at.exchanged_width)
            self._tokens.put(exchanged=self._exchanged)
        status = self._decode(self._decoder.at, self._step.at, self._tokens.at)
        if status == constants.NO_MEMORY:
            raise MemoryError(f"no memory for a step of {num_tokens} tokens")
        if status == constants.LOST_RANKS:
            raise self._errors.pop()
        return hidden, logits, highest

    def _check_sizes(self, num_tokens: int, num_positions: int, num_logits: int, rows: PagedRows) -> None:
        if num_logits > num_tokens:
            raise ValueError(
                f"logit_rows has {num_logits} entries for {num_tokens} tokens; it must not have more than that"
            )
        num_groups, num_slots = rows.slot_mapping.shape
        if not num_tokens == num_positions == num_slots:
            found = f"{num_slots} in rows, and {num_positions} positions"
            raise ValueError(f"there are {num_tokens} token_ids and {found}; their numbers must be equal")
        if num_groups <= self._last_group:
            raise ValueError(
                f"rows has block tables of {num_groups} layer groups, but the layers are in {self._last_group + 1}"
            )

    def _use_states(self, rows: StateRows | None) -> None:
        """Write the addresses of the states to the C structures. Raises ValueError if they do not fit the model."""
        size = self._decoder.at.state_size
        if not size:
            return
        if rows is None:
            raise ValueError("the model has states, but the step has none")
        num_rows, num_saves = len(rows.reads), len(rows.save_counts)
        lengths = len(rows.query_start_loc), len(rows.save_start_loc), len(rows.save_states)
        if rows.states.shape[1:] != (size,) or lengths != (num_rows + 1, num_rows + 1, num_saves):
            raise ValueError(
                f"states are {tuple(rows.states.shape)} for a model with {size} values, and {num_rows} reads and "
                f"{num_saves} save_counts come with {lengths[0]} query_start_loc, {lengths[1]} save_start_loc and "
                f"{lengths[2]} save_states"
            )
        self._states.put(num_rows=num_rows, state_size=size, **{name: getattr(rows, name) for name in _STATE_COLUMNS})
        self._tokens.put(states=self._states.at)

    def _run_all_reduce(self) -> int:
        """Sum the exchange buffer over all ranks. The C code calls this function in the middle of a step, where the
        model needs an all-reduce. Return a status code for the C code."""
        assert self._all_reduce is not None
        self._exchanged.copy_(self._all_reduce(self._exchanged))
        return constants.DONE

    def times(self) -> dict[str, int]:
        """Return the duration of each part of the last step (norms, matmuls, rotary embedding, attention, head) in
        nanoseconds, keyed by `PARTS`.

        The duration of all-reduces is not included. The duration of activation functions is included in the matmuls
        ("products").
        """
        return dict(zip(PARTS, self._tokens.at.times, strict=False))

    def _use_cache(
        self, kv_cache: Sequence[LayerCache], scorings: Sequence[Scoring], layer_groups: Sequence[int]
    ) -> None:
        """Write the addresses and strides of a KV cache to the attention operations, so that the next step uses this
        cache. The cache is a pair of tensors per layer. Raises ValueError if the layers differ in dtype, or do not fit
        the model."""
        if kv_cache is self._cache[0]:
            return
        dtypes = {cache.dtype for layer in kv_cache for cache in layer}
        if len(dtypes) > 1 or not dtypes <= {*_CACHES}:
            found = " and ".join(sorted(map(str, dtypes)))
            raise ValueError(f"caches are {found}; all layers need one dtype of {', '.join(map(str, _CACHES))}")
        attending = {operation.layer: operation.heads for operation in self._model if type(operation) is AttendPaged}
        layers = {layer: self._layer(heads, scorings[layer], *kv_cache[layer]) for layer, heads in attending.items()}
        for at, operation in zip(self._operations, self._model, strict=True):
            if type(operation) in (QkNormRopeStore, AttendPaged):
                at.key_cache, at.value_cache = map(address_of, kv_cache[operation.layer])
                at.attention = layers[operation.layer].at
                at.layer_group = layer_groups[operation.layer] if layer_groups else 0
        self._decoder.put(cache_element=element_of(kv_cache[0][0].dtype))
        self._cache, self._layers = (kv_cache, scorings), layers
        self._last_group = max(layer_groups, default=0)

    def _layer(self, heads: AttentionHeads, scoring: Scoring, key_cache: Tensor, value_cache: Tensor) -> Structure:
        """Return a C structure with the heads, cache and scoring of one layer. Raises ValueError if they do not fit."""
        held = key_cache.shape[2], head_dim_of(key_cache)
        if held != (heads.num_kv_heads, heads.head_dim):
            raise ValueError(
                f"the model has {heads.num_kv_heads} KV heads of size {heads.head_dim}, but the cache has {held[0]} of "
                f"size {held[1]}"
            )
        query_stride = heads.num_heads * heads.head_dim
        return cache_step(scoring, heads.num_heads, query_stride, key_cache, value_cache)


def _by_inputs(operation: Any) -> Any:
    """Return a convolution with its weight transposed to [kernel_size, width], so that the weights of consecutive
    channels are consecutive. Return other operations unchanged."""
    if type(operation) is not Convolve:
        return operation
    weight: Any = operation.weight
    return replace(operation, weight=weight.view(-1, operation.kernel_size).t().contiguous())


def _put_tensor(place: Any, name: str, tensor: Tensor) -> None:
    """Store a tensor's address, element type and size in the member `place` of a C structure. Raises ValueError if the
    tensor is not contiguous."""
    check(name, tensor, tensor.dtype, tuple(tensor.shape))
    place.values, place.element = address_of(tensor), element_of(tensor.dtype)
    place.num_rows, place.width = tensor.numel() // max(tensor.shape[-1], 1), tensor.shape[-1]
