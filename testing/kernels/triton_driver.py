"""A fake Triton driver of an H200 that counts launches instead of executing them."""

from collections import Counter
from typing import Any

from triton.backends.compiler import GPUTarget

launches: Counter[str] = Counter()


class Launcher:
    """A launcher that counts launches."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = source.fn.__name__

    def __call__(self, *arguments: Any) -> None:
        launches[self._name] += 1


class Library:
    """The functions of a CUDA driver that Triton uses."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}


class Driver:
    """The driver of a fake H200."""

    utils = Library()
    launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
