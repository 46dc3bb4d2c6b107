"""A recorder of launches of attention kernels, on a device and in the interpreter."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from pagewire.kernels.triton import decode_attention, prefill_attention

_KERNELS = {
    "paged_attention_v1": decode_attention,
    "paged_attention_v2": decode_attention,
    "paged_prefill": prefill_attention,
}


def record_attention(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Return a list to which every launch appends the name of the kernel and its grid."""
    launched: list[tuple[str, tuple[int, ...]]] = []
    for name, module in _KERNELS.items():
        monkeypatch.setattr(module, f"_{name}_kernel", _Recorded(name, module, launched))
    return launched


class _Recorded:
    def __init__(self, name: str, module: ModuleType, launched: list[tuple[str, tuple[int, ...]]]) -> None:
        self._name = name
        self._kernel = getattr(module, f"_{name}_kernel")
        self._launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            """Record and launch. Return no variant, so that `RepeatedLaunch` cannot launch without the recorder."""
            self._launched.append((self._name, grid))
            self._kernel[grid](*arguments, **options)

        return launch
