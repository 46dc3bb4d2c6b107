"""Check that the position and number of rows in a step's tensors do not cause kernels to be compiled again.

    python -m tests.kernels.triton.specialization

This runs in a process of its own, because Triton interprets in the process of the tests. The program prints each
kernel's name, and the arguments or fields whose address or value selects another variant of the kernel.
"""

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from pagewire.kernels.triton import (
    decode_attention,
    experts,
    gathering,
    linear,
    prefill_attention,
    sampler,
    scaled,
    states,
)
from pagewire.kernels.triton.launching import Strided

ALIGNED = torch.zeros(64)
TENSORS, NUMBERS = (ALIGNED, ALIGNED[1:]), (1, 16, 17)
# The values of an argument, by the difference between them.
OF_STATES = {name: (name, TENSORS) for name in states._INDEX_NAMES}
OF_ROWS = {
    **{name: (name, TENSORS) for name in ("block_tables", "seq_lens")},
    **{name: (name, NUMBERS) for name in ("table_stride", "window")},
}
OF_OUTPUT = {
    "output": ("output", [Strided(tensor, (16, 16)) for tensor in TENSORS]),
    "output_stride": ("output", [Strided(ALIGNED, (number, 16)) for number in NUMBERS]),
}
KERNELS = {
    prefill_attention._paged_prefill_kernel: {
        **OF_ROWS,
        "query_start_loc": ("query_start_loc", TENSORS),
        "num_rows": ("num_rows", NUMBERS),
    },
    decode_attention._paged_attention_v1_kernel: OF_ROWS,
    decode_attention._paged_attention_v2_kernel: OF_ROWS,
    decode_attention._plan_kernel: {
        "seq_lens": ("seq_lens", TENSORS),
        "num_rows": ("num_rows", NUMBERS),
        "max_splits": ("max_splits", NUMBERS),
    },
    gathering._gather_tokens_kernel: {
        **{name: (name, TENSORS) for name in ("slots", "lengths", "row_slots")},
        **{name: (name, NUMBERS) for name in ("num_tokens", "num_rows", "num_blocks")},
    },
    gathering._gather_columns_kernel: {
        "slots": ("slots", TENSORS),
        **{name: (name, NUMBERS) for name in ("column_stride", "num_rows")},
    },
    sampler._scan_kernel: {"chunk_tiles": ("chunk_tiles", NUMBERS)},
    sampler._choose_kernel: {"num_chunks": ("num_chunks", NUMBERS)},
    sampler._logprobs_kernel: {name: (name, NUMBERS) for name in ("max_listed", "num_top")},
    sampler._edit_kernel: {name: (name, NUMBERS) for name in ("max_biases", "max_stops")},
    experts._choose_kernel: {"num_tokens": ("num_tokens", NUMBERS)},
    experts._assign_kernel: {name: (name, NUMBERS) for name in ("num_slots", "max_tiles")},
    experts._multiply_kernel: {"slots_of_row": ("slots_of_row", NUMBERS)},
    linear._multiply_kernel: {name: (name, NUMBERS) for name in ("num_slots", "slots_of_row")},
    scaled._round_kernel: {"num_rows": ("num_rows", NUMBERS)},
    scaled._multiply_kernel: {"num_rows": ("num_rows", NUMBERS)},
    states._convolve_kernel: OF_STATES,
    states._delta_rule_kernel: OF_STATES,
    # An output that is aligned in every step, to verify that a difference would be noticed.
    decode_attention._reduction_kernel: OF_OUTPUT,
}


def variant(kernel: JITFunction, changes: dict[str, object]) -> object:
    """Return the key of the variant that is compiled for the arguments."""
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    arguments = {param.name: 1 if param.is_constexpr else ALIGNED for param in kernel.params}
    return binder(**arguments | changes)[1]


def main() -> None:
    for kernel, differences in KERNELS.items():
        differing = [
            what
            for what, (name, values) in differences.items()
            if len({str(variant(kernel, {name: value})) for value in values}) > 1
        ]
        print(kernel.__name__, *differing)


if __name__ == "__main__":
    main()
