"""Sees that attention kernels are not compiled again for where in a step's tensors the rows lie.

Run as a process of its own, `python -m tests.kernels.triton.specialization`: in that of the tests Triton interprets.
Prints each kernel's name and the arguments whose address or stride makes another variant of it.
"""

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from pagewire.kernels.triton import decode_attention, prefill_attention, split_plan

KERNELS = {
    prefill_attention._paged_prefill_kernel: ("block_tables", "seq_lens", "query_start_loc", "table_stride_row"),
    decode_attention._paged_attention_v1_kernel: ("block_tables", "seq_lens", "table_stride_row"),
    decode_attention._paged_attention_v2_kernel: ("block_tables", "seq_lens", "table_stride_row"),
    split_plan._plan_kernel: ("seq_lens", "num_rows", "max_splits"),
    # What is aligned in every step, to see that a difference would be noticed.
    decode_attention._reduction_kernel: ("output", "output_stride_row"),
}
ALIGNED = torch.zeros(64)


def variant(kernel: JITFunction, changes: dict[str, object]) -> object:
    """What the arguments are compiled for."""
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    arguments = {param.name: 1 if param.is_constexpr else ALIGNED for param in kernel.params}
    return binder(**arguments | changes)[1]


def main() -> None:
    for kernel, names in KERNELS.items():
        differing = []
        for name in names:
            is_number = "stride" in name or name.startswith(("num_", "max_"))
            values: tuple[object, ...] = (1, 16, 17) if is_number else (ALIGNED, ALIGNED[1:])
            if len({str(variant(kernel, {name: value})) for value in values}) > 1:
                differing.append(name)
        print(kernel.__name__, *differing)


if __name__ == "__main__":
    main()
