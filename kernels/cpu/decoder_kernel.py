"""A model in one call: the list of operations that `source/decoder.h` carries out, on tensors.

Operations name the buffers that they read and write: [T, width] of float32 for a step of T tokens. The list is made of
a model by `worker_service/host/cpu_decoder.py`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.arguments import LayerCache, Scoring
from pagewire.kernels.cache_rows import head_dim_of
from pagewire.kernels.cpu.abi import Structure, address_of, check, constants, element_of, ffi
from pagewire.kernels.cpu.kernel_calls import CpuKernels
from pagewire.kernels.cpu.linear import PackedExperts, PackedLinear
from pagewire.kernels.cpu.paged import PagedRows, cache_step, put_rows
from pagewire.network.expert_routing import ExpertRouting
from pagewire.network.operations import AttendPaged, AttentionHeads, QkNormRopeStore

# What a step's time goes to, but for what ranks take to sum up.
PARTS = ("norms", "products", "rotary", "attention", "head")
_CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


class DecoderKernel:
    """A model as a list of operations, from token ids to logits.

    Activations are float32, and rounded as its products say. The cache may be of any dtype that kernels know.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        operations: Sequence[Any],
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """
        Args:
            operations: of `pagewire.network.operations`, and in place of each weight what it is computed with: a
                tensor (float32, but of tables), a pair of them for a rope (cosines and sines of all positions), a
                `PackedLinear`, or one of each expert. The last one is the head.
            all_reduce: gives the sum of what all ranks pass, [T, width] float32; for `AllReduce`.

        Raises ValueError if a weight does not fit, or a buffer is read that nothing has written.
        """
        self._decode = kernels.library.decode
        self._model = tuple(operations)
        self._head: PackedLinear = self._model[-1].head
        self._numbers = {"nothing": 0}  # of buffers
        self._held: list[Any] = []  # what the structures point to
        self._operations = ffi.new("operation[]", len(self._model))
        for at, operation in zip(self._operations, self._model, strict=True):
            kind = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(operation).__name__)
            at.kind = getattr(constants, f"OPERATION_{kind.upper()}")
            self._put_fields(at, operation)
        if len(self._numbers) > constants.MAX_BUFFERS:
            raise ValueError(f"there are {len(self._numbers) - 1} buffers; {constants.MAX_BUFFERS - 1} fit")
        names = [ffi.new("char[]", name.encode()) for name in self._numbers]
        self._held += [names, ffi.new("char *[]", names), ffi.new("int64_t[]", len(names))]
        # An error of ranks waits until the step has ended.
        self._errors: list[BaseException] = []
        self._callback = ffi.callback(
            "int64_t(void)",
            self._sum_up,
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
        if misfit := ffi.string(self._decoder.at.misfit):
            raise ValueError(misfit.decode())
        self._cache: tuple[Sequence[LayerCache], Sequence[Scoring]] = [], []  # that of the last step
        self._step = Structure("attention_step")  # over that cache
        self._tokens = Structure("decoder_step")

    def _put_fields(self, at: Any, values: Any) -> None:
        """Each by what it is: texts name buffers, or what C has a number for."""
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
                case AttentionHeads(num_heads=num_heads, head_dim=head_dim):  # how these score is told with the cache
                    at.num_heads, at.head_dim = num_heads, head_dim
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
        (num_tokens,), (num_logits,) = token_ids.shape, logit_rows.shape
        if num_logits > num_tokens:
            raise ValueError(f"{num_logits} of {num_tokens} tokens are to have logits; all can at most")
        if not token_ids.shape == positions.shape == rows.slot_mapping.shape:
            found = f"{len(rows.slot_mapping)} in rows, and {len(positions)} positions"
            raise ValueError(f"there are {num_tokens} token_ids and {found}; they must agree")
        self._use_cache(kv_cache, scorings)
        put_rows(self._step, rows, num_tokens)
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

    def _sum_up(self) -> int:
        """Called by C."""
        assert self._all_reduce is not None
        self._exchanged.copy_(self._all_reduce(self._exchanged))
        return constants.DONE

    def times(self) -> dict[str, int]:
        """Nanoseconds of the last step by part, `PARTS`, without what ranks take to sum up; activations are a part of
        the products."""
        return dict(zip(PARTS, self._tokens.at.times, strict=False))

    def _use_cache(self, kv_cache: Sequence[LayerCache], scorings: Sequence[Scoring]) -> None:
        """Points the operations to a cache. Raises ValueError if its layers differ in dtype, shape or strides."""
        if kv_cache is self._cache[0]:
            return
        first_key, first_value = kv_cache[0]
        heads = [self._decoder.at.num_kv_heads, self._decoder.at.head_dim]
        held = [first_key.shape[2], head_dim_of(first_key)]
        if heads not in ([0, 0], held):
            raise ValueError(f"there are {heads[0]} KV heads of {heads[1]}, and a cache for {held[0]} of {held[1]}")
        forms = {(*cache.shape, cache.stride(), cache.dtype) for layer in kv_cache for cache in layer}
        if len(forms) > 1 or first_key.dtype not in _CACHES:
            found = " and ".join(map(str, sorted(forms, key=str)))
            raise ValueError(f"caches are {found}: all layers have one shape, in one of {', '.join(map(str, _CACHES))}")
        for at, operation in zip(self._operations, self._model, strict=True):
            if type(operation) in (QkNormRopeStore, AttendPaged):
                at.key_cache, at.value_cache = map(address_of, kv_cache[operation.layer])
                at.window = scorings[operation.layer].window
        self._decoder.put(cache_element=element_of(first_key.dtype))
        # The stride of queries is the operation's, and rows are put in at each step.
        self._step = cache_step(scorings[0], self._decoder.at.num_heads, 0, first_key, first_value)
        self._cache = kv_cache, scorings


def _put_tensor(place: Any, name: str, tensor: Tensor) -> None:
    """It must be dense."""
    check(name, tensor, tensor.dtype, tuple(tensor.shape))
    place.values, place.element = address_of(tensor), element_of(tensor.dtype)
    place.num_rows, place.width = tensor.numel() // max(tensor.shape[-1], 1), tensor.shape[-1]
