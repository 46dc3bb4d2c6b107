"""Checks that many fresh starts of a worker compute the same bits with torch's vectorised functions.

MKL detects the processor at its first call, without a lock. The race shows only on Intel processors. The benchmark
therefore preloads a library that makes MKL believe the processor is from Intel. Each start is a process that is forked
after the imports, before any vectorised function has run, with two threads. All starts must compute the same bits of a
model's configuration and of these functions. With `--as-torch`, each start calls torch's cosine without preparation.
This shows that the benchmark detects the fault.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.report import parser_of

_PRELOADED = "int mkl_serv_intel_cpu(void) { return 1; }\nint mkl_serv_intel_cpu_true(void) { return 1; }\n"
_NUM_THREADS = 2
_NUM_POSITIONS, _HEAD_DIM = 768, 128


def main(flags: Sequence[str]) -> int:
    parser = parser_of("fresh_starts", __doc__)
    parser.add_argument("--starts", type=int, default=20_000)
    parser.add_argument("--as-torch", action="store_true", help="call torch's cosine without preparation")
    parser.add_argument("--is-faked", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(flags)
    if not arguments.is_faked:
        return _run_as_intel(flags)
    digests = count_digests(_torch_start() if arguments.as_torch else _worker_start(), arguments.starts)
    print(f"{arguments.starts} starts, {len(digests)} digests")
    for digest, num_starts in digests.items():
        print(f"{digest.hex()[:16]}: {num_starts}")
    return 0 if len(digests) == 1 else 1


def count_digests(start: Callable[[], bytes], num_starts: int) -> Counter[bytes]:
    """Fork `num_starts` processes that call `start`, and return how many of them computed each digest."""
    digests: Counter[bytes] = Counter()
    for _ in range(num_starts):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, start())
            os._exit(0)
        os.close(writing)
        digests[os.read(reading, 32)] += 1
        os.close(reading)
        os.waitpid(pid, 0)
    return digests


def _worker_start() -> Callable[[], bytes]:
    """Return a function that does the same as a worker's start, and then calls the functions that steps may call
    first."""
    import torch

    from pagewire.network.rope import RopeConfig
    from worker_service.models.rope import RotaryEmbedding
    from worker_service.startup.warm_up import initialize_vector_math

    torch.set_num_threads(1)
    values = torch.linspace(0.001, 0.999, _NUM_POSITIONS * _HEAD_DIM).view(_NUM_POSITIONS, _HEAD_DIM)
    rope = RotaryEmbedding(RopeConfig(theta=500_000.0), _HEAD_DIM, _NUM_POSITIONS)

    def start() -> bytes:
        initialize_vector_math()
        torch.set_num_threads(_NUM_THREADS)
        rope.finish_loading()
        digest = hashlib.sha256(rope.digest)
        for computed in (values.cos(), values.exp(), values.tanh(), values.log(), values.softmax(-1), values.sigmoid()):
            digest.update(computed.numpy())
        return digest.digest()

    return start


def _torch_start() -> Callable[[], bytes]:
    import torch

    torch.set_num_threads(1)
    values = torch.linspace(0, 1000, _NUM_POSITIONS * _HEAD_DIM)

    def start() -> bytes:
        torch.set_num_threads(_NUM_THREADS)
        return hashlib.sha256(values.cos().numpy()).digest()

    return start


def _run_as_intel(flags: Sequence[str]) -> int:
    """Run this program again with MKL believing that the processor is from Intel. Return its exit code.

    Raises OSError if there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("there is no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "preloaded.c", Path(folder) / "preloaded.so"
        source.write_text(_PRELOADED)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        command = [sys.executable, "-m", "bench", "fresh_starts", "--is-faked", *flags]
        environ = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "OMP_NUM_THREADS": str(_NUM_THREADS),
            "OMP_WAIT_POLICY": "passive",
        }
        return subprocess.run(command, env=environ, check=False).returncode
