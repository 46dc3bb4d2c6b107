"""A table of what each attention backend can compute, and the reasons why it refuses the rest."""

from dataclasses import dataclass

import torch

from worker_service.attention.backend import AttentionShape

ANY = range(1, 1 << 16)


class UnavailableError(ValueError):
    """A backend cannot compute what it is asked for. The text names flag, value and remedy."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Values that a backend takes. Every backend takes any window in any layer, any soft cap, and slopes."""

    backend: str
    device_types: tuple[str, ...]
    compute_capability: tuple[int, int] = (0, 0)  # of a GPU, at least
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    cache_dtypes: tuple[torch.dtype, ...] = ()  # besides the dtype that it computes in
    cache_compute_capability: tuple[int, int] = (0, 0)  # of a GPU that reads these, at least
    head_dims: range = ANY
    max_groups: int = ANY.stop  # query heads that share a KV head
    block_sizes: range = ANY
    takes_sinks: bool = True

    def check(self, shape: AttentionShape, device: torch.device) -> None:
        """Raises UnavailableError with the first thing that the backend cannot do."""
        if device.type not in self.device_types:
            kinds = " or ".join(self.device_types)
            raise self._error(f"computes on {kinds}, and --device is {device.type}", f"use --device {kinds}")
        if shape.dtype not in self.dtypes:
            names = " or ".join(map(_name, self.dtypes))
            raise self._error(f"computes in {names}, and --dtype is {_name(shape.dtype)}", f"use --dtype {names}")
        if shape.cache_dtype not in (shape.dtype, *self.cache_dtypes):
            caches = " or ".join(map(_name, (shape.dtype, *self.cache_dtypes)))
            raise self._error(
                f"reads a KV cache of {caches}, and --kv-cache-dtype asks for {_name(shape.cache_dtype)}",
                "use --kv-cache-dtype auto",
            )
        if shape.head_dim not in self.head_dims:
            raise self._error(
                f"computes heads of {_describe(self.head_dims)}, and the model's are {shape.head_dim}",
                other=_in_torch(shape, device),
            )
        num_groups = shape.num_heads // shape.num_kv_heads
        if num_groups > self.max_groups:
            raise self._error(
                f"lets at most {self.max_groups} query heads share a KV head, and in the model {num_groups} do",
                other=_in_torch(shape, device),
            )
        if shape.block_size not in self.block_sizes:
            raise self._error(
                f"reads blocks of {_describe(self.block_sizes)} positions, and --block-size is {shape.block_size}",
                f"use --block-size {self.block_sizes.start}",
            )
        if shape.has_sinks and not self.takes_sinks:
            raise self._error("knows no sinks, which the model's layers have")
        if device.type == "cuda":
            self._check_gpu(shape, device)

    def _check_gpu(self, shape: AttentionShape, device: torch.device) -> None:
        needed, what, remedy = self.compute_capability, "a GPU", ""
        if shape.cache_dtype != shape.dtype and needed < self.cache_compute_capability:
            needed, what = self.cache_compute_capability, f"for a KV cache of {_name(shape.cache_dtype)} a GPU"
            remedy = "use --kv-cache-dtype auto"
        actual = torch.cuda.get_device_capability(device) if any(needed) else needed
        if actual < needed:
            texts = [".".join(map(str, version)) for version in (needed, actual)]
            raise self._error(f"needs {what} of compute capability {texts[0]}, and this one has {texts[1]}", remedy)

    def _error(
        self, reason: str, remedy: str = "", other: str = "choose another --attention-backend"
    ) -> UnavailableError:
        return UnavailableError(
            f"attention backend {self.backend!r} {reason}: {remedy + ', or ' + other if remedy else other}"
        )


def _in_torch(shape: AttentionShape, device: torch.device) -> str:
    """What to do about heads that a backend does not take: torch takes all, on a GPU over a cache of its dtype."""
    is_quantized = device.type == "cuda" and shape.cache_dtype != shape.dtype
    return "use --attention-backend torch" + (" with --kv-cache-dtype auto" if is_quantized else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(numbers: range) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    bounds = f"{numbers[0]} to {numbers[-1]}"
    return bounds if numbers.step == 1 else f"{bounds} in steps of {numbers.step}"
