"""What a module of checks offers about its kernels, so that they can be checked and timed without pytest.

Each module beside this one has `device_cases()`, `bench_cases()` and `compile_cases()`, which yield these. Making a
case touches no device: everything is allocated when it is run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# What a goal is a share of, besides the names of other cases.
COPY = "copy"
MATMUL = "matmul"


@dataclass(frozen=True)
class DeviceCase:
    """A comparison with the reference at a real size.

    Attributes:
        name: unique among all cases.
        run: compares on a device; raises AssertionError, with the case and its seed, where they differ.
    """

    name: str
    run: Callable[[torch.device], None]


@dataclass(frozen=True)
class Goal:
    """A bound on how fast a case is beside something else.

    Attributes:
        share: the least acceptable value of: the bytes or operations moved per second as a share of the device's copy
            bandwidth (`COPY`: bytes read and written by a copy, per second) or rate of a large bfloat16 product
            (`MATMUL`); or the time of the bench case `of` over this one's.
        of: `COPY`, `MATMUL`, or the name of a bench case.
    """

    share: float
    of: str = COPY


@dataclass(frozen=True)
class BenchCase:
    """Something to time: a kernel of ours, or what it is compared with (which has no goals).

    Attributes:
        name: unique among all cases.
        make: allocates random inputs on a device, several sets whose sum exceeds its cache where the kernel's working
            set would otherwise stay there, and returns a function to time per set. They are called in rotation, may be
            called any number of times, and must not wait for the device. It raises `NotImplementedError`, saying why,
            where this machine's torch cannot do it.
        bytes_moved: read and written by one call.
        flops: of one call.
        goals: none where there is nothing to meet.
    """

    name: str
    make: Callable[[torch.device], Sequence[Callable[[], object]]]
    bytes_moved: int = 0
    flops: int = 0
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True)
class CompileCase:
    """A variant of a kernel to compile for a GPU without one.

    Attributes:
        name: unique among all cases.
        kernel: the `@triton.jit` function.
        signature: Triton's type of every argument that is not constexpr: "*bf16", "*fp32", "*fp8e4nv", "*i32", "i64",
            "fp32", named tuples of these, or None for what is not there. Triton specializes pointers and strides to
            multiples of 16 at a real launch, and this does too for pointers and for the arguments and fields that
            `divisible_by_16` names.
        constexprs: values of the constexpr arguments.
        num_warps, num_stages: launch options.
        overlaps: whether it has loops over tiles in memory, all of which must load the next while one is computed.
        min_programs: that fit a processor side by side.
        max_stack: bytes to which a thread may spill; where this is not 0, what yields the case says why.
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
