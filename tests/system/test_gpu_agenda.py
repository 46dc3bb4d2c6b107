"""`make gpu-next`, rehearsed on a CPU: the parts that it runs, their order, resumption, and its tables."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.checkpoint import GPU_SHAPES
from bench.gpu import agenda, plain_model, products, results_page, speed
from bench.gpu.agenda import ENTRIES, Entry, pending, run_entries
from testing import ledger
from testing.kernel_checks import MODULES
from testing.ledger import State
from testing.part import Report
from testing.record import write
from testing.services import command_line
from tests.gpu.service_checks import PARTS as CHECKS

pytestmark = pytest.mark.thorough

# A part of three cases. The first case starts a process that outlives it, and the second waits for a file.
SCRIPTED = """
import subprocess, sys, time
from pathlib import Path
from testing.part import Case, run_cases
folder = Path(sys.argv[1])
def wait():
    while not (folder / "go").exists():
        time.sleep(0.01)
    return {}
run_cases([
    Case("first", lambda: {"pid": subprocess.Popen(["sleep", "100"]).pid}),
    Case("second", wait),
    Case("third", lambda: {}),
], sys.argv[2:])
"""
HEADING = {"card": "cpu", "driver": None, "torch": "2", "triton": "3", "date": "2026-11-28T00:00:00"}
# Runs that part as an entry's `run` does.
PROCESS = f"""
import sys, time
from pathlib import Path
from testing.part import Report, run_part
folder = Path(sys.argv[1])
report = Report(folder / "gpu_speed.cpu.json", {HEADING!r}, ["scripted"], resumes=True)
command = [sys.executable, str(folder / "part.py"), str(folder)]
run_part("scripted", command, report, time.monotonic() + 60, time.monotonic() + float(sys.argv[2]))
report.end(["scripted"])
"""


def results_of(folder: Path, part: str = "scripted") -> tuple[bool, dict[str, dict]]:
    """Return whether a part is complete, and its results by name."""
    found = ledger.parts_of(folder / "gpu_speed.cpu.json")[part]
    return found["is_complete"], {result["name"]: result for result in found["results"]}


def wait_for(is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def test_a_run_that_is_killed_leaves_no_process_and_resumes_within_its_part(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(SCRIPTED)
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    killed = subprocess.Popen([*command, "60"], env=environ)
    path = tmp_path / "gpu_speed.cpu.json"
    wait_for(lambda: path.exists() and bool(results_of(tmp_path)[1]))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    is_complete, before = results_of(tmp_path)
    assert (is_complete, list(before)) == (False, ["first"])
    assert ledger.state(ledger.parts_of(path)["scripted"], ledger.digest_of("scripted")) is State.STARTED
    wait_for(lambda: not command_line(before["first"]["pid"]))
    # Running out of budget within the second case is not a failure; the part is resumed.
    subprocess.run([*command, "1"], env=environ, check=True)
    assert results_of(tmp_path) == (False, before)
    (tmp_path / "go").touch()
    subprocess.run([*command, "60"], env=environ, check=True)
    is_complete, after = results_of(tmp_path)
    assert (is_complete, list(after)) == (True, ["first", "second", "third"])
    assert after["first"] == before["first"]


def test_a_part_of_other_source_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Report(path, HEADING, ["device"]).add("device", {"name": "copy", "wall_seconds": 0})
    assert Report(path, HEADING, ["device"], resumes=True).names("device") == ["copy"]
    assert Report(path, HEADING | {"torch": "3"}, ["device"], resumes=True).names("device") == []


def test_a_rehearsal_runs_parts_to_their_end_and_then_only_what_is_left(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--output", str(tmp_path), "--budget", "600", "--parts"]
    parts = ["testing.kernel_checks.gathering", "first_token_small"]
    assert agenda.main([*flags, *parts[:1]]) == 0
    before = json.loads((tmp_path / "gpu_kernels_bench.cpu.json").read_text())
    assert agenda.main([*flags, *parts]) == 0
    is_complete, results = results_of(tmp_path, "first_token_small")
    assert is_complete
    assert all(result["prompt_tokens_per_s"] > 0 for result in results.values())
    # No part is run twice.
    checked = ledger.parts_of(tmp_path / "gpu_kernels_bench.cpu.json")[parts[0]]
    assert checked == before["parts"][parts[0]]
    assert {result["unavailable"] for result in checked["results"]} == {"there is nothing to time on cpu"}


def test_the_rest_of_a_budget_goes_to_what_it_holds(tmp_path: Path) -> None:
    """Parts that were begun come first, then parts never measured, stale and failed.

    Parts that exceed the budget come last.
    """
    ran = []

    def run(entry: Entry, device: str, folder: Path, card: str, limit: float, pause_at: float) -> int:
        ran.append(entry.part)
        return 0

    def part(name: str, *, digest: str | None = None, is_complete: bool = True, **result: str) -> dict:
        found = {"name": "case", "wall_seconds": 1.0, **result}
        return {"digest": digest or ledger.digest_of(name), "is_complete": is_complete, "results": [found]}

    known = {
        "decode_small": part("decode_small", error="no"),
        "decode_large": part("decode_large", digest="old"),
        "idle": part("idle", is_complete=False),
        "swap": part("swap"),
    }
    write(tmp_path / "gpu_speed.card.json", {"parts": known})
    names = ("decode_small", "decode_large", "peer_steps_large", "idle", "swap", "throughput")
    entries = [Entry("speed", name, 300 if name == "peer_steps_large" else 50) for name in names]
    states = {each.entry.part: (each.state, each.seconds) for each in pending(entries, tmp_path, "card")}
    assert states == {
        "idle": (State.STARTED, 50),
        "peer_steps_large": (State.NEVER, 300),
        "throughput": (State.NEVER, 50),
        "decode_large": (State.STALE, 11),
        "decode_small": (State.FAILED, 11),
    }
    assert run_entries(entries, "cpu", tmp_path, "card", 100, run) == 0
    assert ran == ["idle", "throughput", "decode_large", "decode_small", "peer_steps_large"]


def test_the_list_needs_no_torch_and_names_every_part_of_every_command() -> None:
    by_command = {command: {each.part for each in ENTRIES if each.command == command} for command in agenda.RUNNERS}
    benched = {"device", "bench.gpu.products", *MODULES}
    expected = {"kernels_bench": benched, "kernels_check": set(MODULES)}
    assert by_command == expected | {"speed": set(speed.PARTS), "check": set(CHECKS)}
    code = "import sys; sys.modules['torch'] = None; from bench.gpu import agenda; sys.exit(agenda.main([]))"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "parts are left, about" in listed
    names = [case.name for case in products.bench_cases()]
    assert len(set(names)) == len(names) == 2 * 5 * 5 * 4


def test_a_digest_is_of_what_a_part_measures() -> None:
    kernel = {str(path) for path in ledger.sources(("testing.kernel_checks.fused",))}
    assert {"kernels/triton/fused.py", "testing/kernel_checks/fused.py"} <= kernel
    assert not any(path.startswith(("worker_service/", "scheduler_service/")) for path in kernel)
    runner = {str(path) for path in ledger.sources(("worker_service.startup.loader",))}
    assert {"worker_service/device/computation.py", "kernels/triton/fused.py"} <= runner
    assert not any(path.startswith(("scheduler_service/", "kernels/cpu/", "worker_service/host/")) for path in runner)
    assert ledger.digest_of("decode_small") != ledger.digest_of("throughput")


def test_a_commit_is_named_where_there_is_no_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert ledger.commit() is None
    monkeypatch.setenv(ledger.COMMIT_VARIABLE, "0123abc")
    assert ledger.commit() == "0123abc"


def test_a_plain_model_computes_what_transformers_does() -> None:
    """The model that serves as a comparison is a real one: its logits equal Qwen3's at every position."""
    torch.manual_seed(1)
    shape = {**GPU_SHAPES["tiny"], "tie_word_embeddings": True}
    theirs = Qwen3ForCausalLM(Qwen3Config(**shape, rope_theta=1e6)).eval()
    ours = plain_model.make(shape, 2, 16, torch.device("cpu"), torch.float32)
    weights = {name.removeprefix("model.").replace("mlp.", ""): value for name, value in theirs.state_dict().items()}
    for target, names in (("self_attn.qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        prefix = target.rpartition(".")[0] and "self_attn."
        for layer in range(shape["num_hidden_layers"]):
            rows = [weights.pop(f"layers.{layer}.{prefix}{name}_proj.weight") for name in names]
            weights[f"layers.{layer}.{target}.weight"] = torch.cat(rows)
    ours.load_state_dict(weights)
    tokens = torch.randint(0, 500, (2, 10))
    with torch.inference_mode():
        expected = theirs(tokens).logits
        found = [ours.logits(tokens[:, index], torch.tensor([index])) for index in range(10)]
    torch.testing.assert_close(torch.stack(found, 1), expected, rtol=1e-4, atol=1e-5)


def test_tables_say_what_is_older_than_the_code(tmp_path: Path) -> None:
    prompt = {"name": "first token, x", "seconds": 0.0125, "prompt_tokens_per_s": 81_920.0, "wall_seconds": 1}
    heading = {
        "card": "NVIDIA H200",
        "date": "2026-11-28T10:00:00",
        "commit": "0123abc",
        "torch": "2.11",
        "is_complete": True,
    }
    current = {**heading, "is_complete": True, "digest": ledger.digest_of("first_token_small"), "results": [prompt]}
    goals = [{"name": "first token, x, fast", "value": 12.5, "goal": "at most 10 ms", "is_met": False}]
    path = ledger.path_of("speed", "NVIDIA H200", tmp_path)
    write(path, {"parts": {"first_token_small": current}, "goals": goals})
    text = results_page.tables(tmp_path)
    assert "`first_token_small` (0123abc, 2026-11-28, torch 2.11):" in text
    assert "| first token, x | 12.5 ms | 81,920 tok/s |" in text
    assert "| first token, x, fast | **12.5** | at most 10 ms | – |" in text
    assert "| `speed` | first_token_small | – | step_tables_small" in text
    write(path, {"parts": {"first_token_small": current | {"digest": "old"}}, "goals": goals})
    assert "(0123abc, 2026-11-28, torch 2.11, older than the code):" in results_page.tables(tmp_path)
