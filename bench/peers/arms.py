"""The arms of the peers benchmark: Pagewire and its peers, each of which runs alone on the machine.

An arm that accepts batches of requests reports the seconds of each batch. llama.cpp's own benchmark reports rates
itself.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TextIO

from bench.peers.environment import BF16, FORMATS, Environments
from pagewire import AsyncClient, SamplingParams
from pagewire.bench.run import run
from pagewire.bench.workload import LengthRange, PlannedRequest, Workload
from pagewire.cli.services import API_OPTIONS
from pagewire.client.errors import CommandError
from pagewire.hosting import local_server
from pagewire.progress import Progress

PROGRAMS = Path(__file__).parent / "programs"
ANSWER = "peer: "
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
# Output tokens of the warm-up batch of each shape, in which the engine compiles, packs and allocates.
WARM_UP_LEN = 4
MIXED_INPUT, MIXED_OUTPUT = LengthRange(64, 256), LengthRange(32, 128)
STOP_TIMEOUT_S = 20
# A prefill is short, so the median of several is used.
NUM_PREFILLS = 3
# At this level, llama.cpp's log names the buffers that contain the weights.
LLAMA_CPP_VERBOSITY = 4


class PeerFailedError(Exception):
    """An arm failed after it had started. The text gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads that are measured. Lengths are in tokens."""

    num_streams: tuple[int, ...] = (1, 8, 32)
    input_len: int = 160
    output_len: int = 80
    prefill_len: int = 512
    num_mixed: int = 32
    mixed_input: LengthRange = MIXED_INPUT
    mixed_output: LengthRange = MIXED_OUTPUT
    depths: tuple[int, ...] = ()  # lengths of prompts after which one stream is decoded

    @property
    def names(self) -> list[str]:
        by_depth = map(depth_name, self.depths)
        mixed = [self.mixed_name] if self.num_mixed else []
        return [*map(decode_name, self.num_streams), *by_depth, self.prefill_name, *mixed]

    @property
    def prefill_name(self) -> str:
        return f"prefill of {self.prefill_len} tokens"

    @property
    def mixed_name(self) -> str:
        return f"{self.num_mixed} mixed requests, end to end"

    @property
    def max_sequence_len(self) -> int:
        mixed_len = self.mixed_input.max + self.mixed_output.max
        longest = max(self.input_len, *self.depths, 0) + self.output_len
        return max(longest, self.prefill_len + WARM_UP_LEN, mixed_len)


def decode_name(num_streams: int) -> str:
    return f"decode, {num_streams} stream{'s' if num_streams > 1 else ''}"


def depth_name(depth: int) -> str:
    return f"decode after {depth:,} tokens"


# For models and machines on which a round of all loads takes hours.
QUICK = Loads(input_len=32, output_len=40, num_mixed=0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent all at once."""

    prompts: list[list[int]]
    output_lens: list[int]

    def cut_to(self, output_len: int) -> "Batch":
        return replace(self, output_lens=[output_len] * len(self.prompts))


@dataclass(frozen=True, slots=True)
class Model:
    """A bf16 checkpoint, and the weight format in which it is measured. Prompts are drawn from `vocab_size` token
    ids."""

    name: str
    path: Path
    vocab_size: int
    weight_format: str = BF16


class Arm(Protocol):
    """One engine of the comparison. `formats` are the members of FORMATS that the arm supports."""

    name: str
    formats: Sequence[str]

    def prepare(self, model: Model) -> None:
        """Prepare everything that the arm needs, unmeasured. Raises CannotMakeError."""

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        """Return tokens per second by the name of the load. Unsupported loads are left out. Raises PeerFailedError."""


Seconds = Callable[[Batch], float]


def rates(seconds: Seconds, loads: Loads, vocab_size: int, seed: int) -> dict[str, float]:
    """Measure all loads of an arm that accepts batches. Every batch has new prompts.

    The time of decoding excludes prefill. It is the time of a batch minus the time of a batch of the same size with one
    output token per request. After long prompts, these batches repeat one prompt, so that prefix caches have it: the
    time of its prefill would vary by more than the time of decoding.
    """
    rng = random.Random(seed)

    def batch(num_prompts: int, input_len: int, output_len: int) -> Batch:
        prompts = [rng.choices(range(vocab_size), k=input_len) for _ in range(num_prompts)]
        return Batch(prompts, [output_len] * num_prompts)

    found = {}
    for num_streams in loads.num_streams:
        seconds(batch(num_streams, loads.input_len, WARM_UP_LEN))
        found[decode_name(num_streams)] = _decode_rate(
            seconds, batch(num_streams, loads.input_len, 1), batch(num_streams, loads.input_len, loads.output_len)
        )
    for depth in loads.depths:
        repeated = batch(1, depth, loads.output_len)
        seconds(repeated.cut_to(WARM_UP_LEN))
        found[depth_name(depth)] = _decode_rate(seconds, repeated.cut_to(1), repeated)
    seconds(batch(1, loads.prefill_len, WARM_UP_LEN))
    prefills = [seconds(batch(1, loads.prefill_len, 1)) for _ in range(NUM_PREFILLS)]
    found[loads.prefill_name] = loads.prefill_len / statistics.median(prefills)
    if not loads.num_mixed:
        return found
    workload = Workload(loads.num_mixed, loads.mixed_input, loads.mixed_output, seed=seed)
    requests = workload.requests(vocab_size)
    mixed = Batch([list(r.prompt_token_ids) for r in requests], [r.num_output_tokens for r in requests])
    again = Workload(loads.num_mixed, loads.mixed_input, loads.mixed_output, seed=seed + 1).requests(vocab_size)
    seconds(Batch([list(r.prompt_token_ids) for r in again], [WARM_UP_LEN] * len(again)))
    found[loads.mixed_name] = sum(mixed.output_lens) / seconds(mixed)
    return found


def _decode_rate(seconds: Seconds, one: Batch, whole: Batch) -> float:
    """Return the tokens per second of decoding, from batches with one token and with more tokens per request."""
    first, last = seconds(one), seconds(whole)
    output_len, num_streams = whole.output_lens[0], len(whole.prompts)
    if last <= first:
        raise PeerFailedError(f"{output_len} tokens took {last:.3f} s and one {first:.3f} s: the machine is busy")
    return num_streams * (output_len - 1) / (last - first)


class PagewireArm:
    """Both services as processes, called over gRPC by a client in this process.

    The KV cache has 16 bits, like the KV cache of every peer.
    """

    name = "Pagewire"
    formats = FORMATS

    def __init__(self, environments: Environments, num_threads: int, serve_flags: Sequence[str] = ()) -> None:
        self._environments = environments
        self._flags = [f"--num-threads={num_threads}", "--kv-cache-dtype=bfloat16", *serve_flags]

    def prepare(self, model: Model) -> None:
        self._served(model)

    def _served(self, model: Model) -> Path:
        """Return the checkpoint, or the same quantised file that llama.cpp receives."""
        return model.path if model.weight_format == BF16 else self._environments.gguf(model.path, model.weight_format)

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        try:
            serving = local_server.serving(str(self._served(model)), self._flags, flags_only=API_OPTIONS)
            with serving as (url, _), asyncio.Runner() as runner:
                client = AsyncClient(url)
                runner.run(client.__aenter__())
                try:
                    return rates(lambda batch: runner.run(_seconds(client, batch)), loads, model.vocab_size, seed)
                finally:
                    runner.run(client.__aexit__())
        except CommandError as error:
            raise PeerFailedError(str(error)) from None


async def _seconds(client: AsyncClient, batch: Batch) -> float:
    planned = [
        PlannedRequest(tuple(prompt), length, seed=0)
        for prompt, length in zip(batch.prompts, batch.output_lens, strict=True)
    ]
    ran = await run(client, planned, GREEDY, Progress(len(planned), None))
    if ran.was_interrupted:
        raise KeyboardInterrupt
    for record, length in zip(ran.records, batch.output_lens, strict=True):
        if record.num_output_tokens != length:
            raise PeerFailedError(record.error or f"a request has {record.num_output_tokens} tokens, not {length}")
    return ran.duration


class ProgramArm:
    """A program of bench/peers/programs in a separate interpreter, which reads the bf16 checkpoint."""

    formats: Sequence[str] = (BF16,)

    def __init__(
        self, name: str, program: str, flags: Callable[[], Sequence[str]], num_threads: int, python: Callable[[], Path]
    ) -> None:
        """Create the arm. `flags` is called at each start of the program, because flags may depend on the machine's
        state."""
        self.name = name
        self._program = program
        self._flags = flags
        self._num_threads = num_threads
        self._python = python

    def prepare(self, model: Model) -> None:
        self._python()

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        command = [str(self._python()), str(PROGRAMS / self._program), str(model.path), *self._flags()]
        return program_rates(command, self._num_threads, model, loads, seed)


class MistralRsArm:
    """mistral.rs, with the file that llama.cpp receives, and without a prefix cache."""

    name = "mistral.rs"
    formats = FORMATS

    def __init__(self, environments: Environments, num_threads: int) -> None:
        self._environments = environments
        self._num_threads = num_threads

    def prepare(self, model: Model) -> None:
        self._environments.mistral_rs()
        self._environments.gguf(model.path, model.weight_format)

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        weights = self._environments.gguf(model.path, model.weight_format)
        command = [str(self._environments.mistral_rs()), str(PROGRAMS / "mistralrs_peer.py"), str(weights)]
        return program_rates(command, self._num_threads, model, loads, seed)


def program_rates(command: Sequence[str], num_threads: int, model: Model, loads: Loads, seed: int) -> dict[str, float]:
    """Run a peer's program, and return its rates."""
    with conversation(command, child_environ(num_threads)) as ask:
        return rates(lambda batch: float(ask(batch)), loads, model.vocab_size, seed)


def transformers_arms(num_threads: int, dtype: str) -> list[ProgramArm]:
    """Return the arms that run in this interpreter's environment, where transformers and torch are pinned."""

    def arm(mode: str) -> ProgramArm:
        flags = ["--mode", mode, "--num-threads", str(num_threads), "--dtype", dtype]
        return ProgramArm(
            f"transformers {mode}", "transformers_peer.py", lambda: flags, num_threads, lambda: Path(sys.executable)
        )

    return [arm(mode) for mode in ("generate", "generate_batch")]


class LlamaCppArm:
    """llama.cpp, measured by its own program llama-batched-bench, which does not support mixed requests."""

    name = "llama.cpp"
    formats = FORMATS

    def __init__(self, environments: Environments, num_threads: int) -> None:
        self._environments = environments
        self._num_threads = num_threads
        # By model and format: the names of the buffers that contain the weights, according to llama.cpp's log.
        self.buffers: dict[str, dict[str, list[str]]] = {}

    def prepare(self, model: Model) -> None:
        self._environments.gguf(model.path, model.weight_format)
        self._environments.llama_cpp_program("llama-batched-bench")
        self._environments.llama_cpp_environ()

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        """Measure each load in a process of its own, and leave out those that fail. Raises PeerFailedError if all
        fail."""
        runs = [(decode_name(num), loads.input_len, loads.output_len, num, "speed_tg") for num in loads.num_streams]
        runs += [(depth_name(depth), depth, loads.output_len, 1, "speed_tg") for depth in loads.depths]
        runs.append((loads.prefill_name, loads.prefill_len, WARM_UP_LEN, 1, "speed_pp"))
        found, failed = {}, ""
        for name, input_len, output_len, num_streams, speed in runs:
            try:
                [row] = self._run(model, input_len, output_len, num_streams)
            except PeerFailedError as error:
                failed = str(error)
                print(f"{self.name}, {model.weight_format}, {name} is left out: {error}", file=sys.stderr, flush=True)
            else:
                found[name] = row[speed]
        if not found:
            raise PeerFailedError(failed)
        return found

    def _run(self, model: Model, input_len: int, output_len: int, num_streams: int) -> list[dict]:
        program = self._environments.llama_cpp_program("llama-batched-bench")
        weights = self._environments.gguf(model.path, model.weight_format)
        shape = ["-c", num_streams * (input_len + output_len), "-b", 2048, "-ub", 512]
        shape += ["-npp", input_len, "-ntg", output_len, "-npl", num_streams]
        how = ["-t", self._num_threads, "--output-format", "jsonl", "-lv", LLAMA_CPP_VERBOSITY]
        command = [str(program), "-m", str(weights), *map(str, [*shape, *how])]
        environ = os.environ | self._environments.llama_cpp_environ()
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        rows = batched_bench_rows(ran.stdout)
        if ran.returncode or not rows:
            raise PeerFailedError(f"llama-batched-bench ended with exit code {ran.returncode}")
        self.buffers.setdefault(model.name, {})[model.weight_format] = weight_buffers(ran.stderr)
        return rows


def weight_buffers(log: str) -> list[str]:
    """Return the names of the buffers that contain the weights, such as CPU_REPACK, according to llama.cpp's log."""
    return re.findall(r"load_tensors:\s+(\S+) model buffer size", log)


def batched_bench_rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@contextmanager
def conversation(command: Sequence[str], environ: dict[str, str]) -> Iterator[Callable[[Batch], str]]:
    """Run a peer's program, and yield a function that sends a batch to it and returns its answer.

    The function raises PeerFailedError if the program ends.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        )
        try:
            _answer(process, errors)

            def ask(batch: Batch) -> str:
                assert process.stdin is not None
                try:
                    print(json.dumps({"prompts": batch.prompts, "output_lens": batch.output_lens}), file=process.stdin)
                    process.stdin.flush()
                except BrokenPipeError:
                    pass  # the program's last output is still read below
                return _answer(process, errors)

            yield ask
        finally:
            _end(process)


def _answer(process: "subprocess.Popen[str]", errors: TextIO) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ANSWER):
            return line.removeprefix(ANSWER).strip()
    code = process.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    raise PeerFailedError(f"it ended with exit code {code}: {lines[-1] if lines else 'it printed no error'}")


def _end(process: "subprocess.Popen[str]") -> None:
    """End a program by closing its input, and kill the processes that it leaves."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()


def child_environ(num_threads: int) -> dict[str, str]:
    """Return the environment variables of a peer, without this repository on its path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {"OMP_NUM_THREADS": str(num_threads), "RAYON_NUM_THREADS": str(num_threads)}
