"""The kinds of cases that a module of checks yields, so that kernels can be checked and timed without pytest.

Each other module of this package has `device_cases()`, `bench_cases()` and `compile_cases()`, which yield cases of
these types. Creating a case does not use a device; memory is allocated when the case runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# The references of a goal, besides the names of other cases.
COPY = "copy"
MATMUL = "matmul"


@dataclass(frozen=True)
class DeviceCase:
    """A comparison with the specification at a realistic size.

    Attributes:
        name: unique among all cases.
        run: runs the comparison on a device. It raises AssertionError, with the case and its seed, if the results
            differ.
    """

    name: str
    run: Callable[[torch.device], None]


@dataclass(frozen=True)
class Goal:
    """A lower bound on the speed of a case, relative to a reference.

    Attributes:
        share: the least acceptable value of a ratio. For `COPY` and `MATMUL` the ratio is the speed of the case divided
            by the speed of the device. The speed of the device is its copy bandwidth (`COPY`: bytes read and written by
            a copy, per second) or its rate in a large bfloat16 matrix multiplication (`MATMUL`). For a bench case, the
            ratio is the time of that case divided by the time of this case.
        of: `COPY`, `MATMUL`, or the name of a bench case.
    """

    share: float
    of: str = COPY


@dataclass(frozen=True)
class BenchCase:
    """A function to time: one of our kernels, or a function that it is compared with, which has no goals.

    Attributes:
        name: unique among all cases.
        make: allocates random inputs on a device and returns one function to time per set of inputs. If the working set
            of the kernel would otherwise stay in the device's cache, there are several sets that together exceed the
            cache. The functions are called in rotation, any number of times, and must not wait for the device. `make`
            raises `NotImplementedError` with the reason if this machine's torch lacks an operation.
        bytes_moved: bytes read and written by one call.
        flops: floating-point operations of one call.
        goals: the goals; empty if the case has no goals.
    """

    name: str
    make: Callable[[torch.device], Sequence[Callable[[], object]]]
    bytes_moved: int = 0
    flops: int = 0
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True)
class CompileCase:
    """A variant of a kernel to compile for a GPU, on a machine that may have no GPU.

    Attributes:
        name: unique among all cases.
        kernel: the `@triton.jit` function.
        signature: Triton's type of every argument that is not constexpr: "*bf16", "*fp32", "*fp8e4nv", "*i32", "i64",
            "fp32", named tuples of these, or None for an absent argument. In a real launch Triton specializes pointers
            and strides that are multiples of 16. Here all pointers are specialized, and so are the arguments and fields
            that `divisible_by_16` names.
        constexprs: values of the constexpr arguments.
        num_warps, num_stages: launch options.
        overlaps: whether the kernel has loops over tiles in memory, each of which must load the next tile while one
            tile is computed.
        min_programs: number of programs that must fit a processor at the same time.
        max_stack: bytes that a thread may spill. If this is not 0, a comment at the case gives the reason.
    """

    name: str
    kernel: object
    signature: dict[str, object]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: tuple[str, ...] = field(default=())
    overlaps: bool = False
    min_programs: int = 1
    max_stack: int = 0
