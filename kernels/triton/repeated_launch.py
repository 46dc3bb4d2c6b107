"""One launch after another of the same kernel, with tensors that differ in their addresses alone."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

ALIGNMENT = 16  # bytes: kernels are compiled for whether addresses are multiples of it


@dataclass(frozen=True, slots=True)
class RepeatedLaunch:
    """A kernel with its grid and constants, which is told what kind of arguments it gets.

    At every launch Triton looks at all arguments to find the variant that is compiled for such, which takes ten times
    as long as the launch. Arguments of a kind that was launched before go to the variant that was launched then.

    Attributes:
        kernel: a function of `triton.jit`.
        grid: three numbers of programs.
        constants: the last parameters of the kernel, by name and in their order.
        options: of the compiler, by name.
    """

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    options: dict[str, Any]
    _variants: dict[Hashable, Callable[..., None]] = field(default_factory=dict)

    def __call__(self, kind: Hashable, *arguments: Any) -> None:
        """Launch it.

        `kind`: equal only where everything that a kernel is compiled for is: types, strides, numbers, and whether
        addresses are multiples of 16. None: of no kind that comes again.
        """
        launch = self._variants.get(kind)
        if launch is not None:
            launch(*arguments, *self.constants.values())
            return
        variant = self.kernel[self.grid](*arguments, **self.constants, **self.options)
        if kind is not None and variant is not None:  # the interpreter compiles nothing
            self._variants[kind] = variant[self.grid]
