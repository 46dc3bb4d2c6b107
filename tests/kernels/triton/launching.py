"""Launch the kernels around a model, and multiplications with quantised weights, for steps of many sizes.

    python -m tests.kernels.triton.launching

Triton's own launcher is used, with a driver that does nothing. This runs in a process of its own, because Triton
interprets in the process of the tests. Kernels are compiled for an H200. The program prints each kernel's name, the
number of its compiled variants, and the number of its launches.
"""

import torch
from triton.runtime import driver

from pagewire.kernels.sampling import FLOATS, INTEGERS
from pagewire.kernels.triton import gathering, linear, sampler
from testing.kernel_checks.gathering import make_tables
from testing.kernel_checks.linear import Layer, make_rows, make_weight
from testing.kernels.triton_driver import Driver, launches

NUM_ROWS, NUM_BLOCKS, NUM_LOGPROBS = (1, 2, 5, 16, 40, 1024), (1, 3, 16, 2560), (None, 0, 1, 5, 16)
NUM_SLOTS, VOCAB_SIZE = 257, 151_936


def launch_step(num_rows: int) -> None:
    """Launch a step's kernels with rows at any offset in the uploaded tensors, and with every sampling feature."""
    cpu = torch.device("cpu")
    tables = make_tables(NUM_SLOTS, max(NUM_BLOCKS), 16, cpu, seed=1, num_layer_groups=3)
    slots = torch.zeros(num_rows + 4, dtype=torch.int32)[4:]
    for num_blocks in NUM_BLOCKS:
        gathering.gather_tokens(tables, slots, slots, slots, num_blocks)
    lines = torch.zeros((len(FLOATS) + len(INTEGERS), NUM_SLOTS), dtype=torch.int32)
    columns = gathering.gather_columns(lines, torch.zeros(NUM_SLOTS, dtype=torch.int64), slots, slots)
    target = sampler.TokenTarget(tables.token_ids, slots, torch.empty((2, num_rows), dtype=torch.int32))
    for num_logprobs in NUM_LOGPROBS:
        sampler.sample(torch.empty((num_rows, VOCAB_SIZE)), columns, None, num_logprobs, target)


def launch_products(num_rows: int) -> None:
    """Multiply by weights of several sizes. Only tiles differ, and there are three for these numbers of rows."""
    for in_size in (128, 512, 640):
        layer, generator = Layer(num_rows, 4096, in_size), torch.Generator().manual_seed(1)
        packed = linear.pack(make_weight(layer, generator), torch.device("cpu"))
        linear.multiply(make_rows(layer, num_rows, generator), packed)


def main() -> None:
    driver.set_active(Driver())
    for num_rows in NUM_ROWS:
        launch_step(num_rows)
        launch_products(num_rows)
    for kernel in (
        gathering._gather_tokens_kernel,
        gathering._gather_columns_kernel,
        sampler._scan_kernel,
        sampler._choose_kernel,
        sampler._logprobs_kernel,
        linear._multiply_kernel,
    ):
        (variants, *_) = kernel.device_caches[0]
        print(kernel.__name__, len(variants), launches[kernel.__name__])


if __name__ == "__main__":
    main()
