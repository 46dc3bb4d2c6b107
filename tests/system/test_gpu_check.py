"""`make gpu-check`, rehearsed on a CPU: the parts that need no GPU run as they do on a GPU."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from pagewire import SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.part import Report, run_part
from tests.gpu import check
from tests.gpu.service_checks import PARTS, Setting, assert_same

pytestmark = pytest.mark.thorough

# A part that reports one case and begins another that never ends. Its argument is the number of finished cases.
ENDLESS = """
import json, subprocess, sys, time
pid = subprocess.Popen(["sleep", "100"], process_group=0).pid
print("RESULT", json.dumps({"name": "first", "pid": pid, "wall_seconds": 0}))
print("RESULT", json.dumps({"name": "second", "started": True}), flush=True)
time.sleep(100)
"""


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def rehearse(output: Path, *parts: str) -> int:
    return check.main(["--device", "cpu", "--jobs", "1", "--output", str(output), "--parts", *parts])


def results_of(output: Path) -> dict[str, list[dict]]:
    return {name: part["results"] for name, part in json.loads(output.read_text())["parts"].items()}


@pytest.mark.timeout(900)
def test_a_part_runs_in_a_process_of_its_own_and_its_results_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "results" / "gpu_check.json"
    # Each slice's process imports transformers, which takes seconds.
    monkeypatch.setattr(check, "CASES_PER_SLICE", 20)
    assert len(check.slices_of("graphs")) == 3
    assert rehearse(output, "sampling", "graphs") == 0
    before = results_of(output)
    (sampled,) = before["sampling"]
    assert sampled["sequences"] == 16
    assert all("needs --device cuda" in result["unavailable"] for result in before["graphs"])
    monkeypatch.setattr(check, "CASES_PER_SLICE", 40)
    assert rehearse(output, "graphs") == 0
    assert results_of(output)["sampling"] == before["sampling"]


def test_the_oracle_clamps_experts_as_their_checkpoint_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle applies the checkpoint's limit in any version of transformers; 5.17 clamps gpt-oss's experts at 7."""
    begin = GptOssExperts.__init__

    def begin_in_old_versions(experts: GptOssExperts, config: GptOssConfig) -> None:
        begin(experts, config)
        experts.limit, experts.alpha = 7.0, 1.702

    path = make_checkpoint(tmp_path, "gpt_oss", seed=1, swiglu_limit=1.5)
    expected = oracle.preferences(oracle.load(path), [1, 2, 3], temperature=0)
    monkeypatch.setattr(GptOssExperts, "__init__", begin_in_old_versions)
    assert torch.equal(oracle.preferences(oracle.load(path), [1, 2, 3], temperature=0), expected)


def test_a_part_ends_at_its_deadline_with_all_it_has_started(tmp_path: Path) -> None:
    report = Report(tmp_path / "results.json", {"card": "none"}, ["endless"])
    run_part("endless", [sys.executable, "-c", ENDLESS], report, time.monotonic() + 3)
    first, second = report.results
    assert second["name"] == "second"
    assert "out of time" in second["error"]
    assert not is_running(first["pid"])


def test_every_part_has_cases_with_names_of_their_own(tmp_path: Path) -> None:
    names = [case.name for part in PARTS.values() for case in part(Setting("cpu", tmp_path))]
    assert len(set(names)) == len(names) > 30


def test_a_rehearsal_names_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--device", "cpu"])
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=1 << 40)])
def test_sequences_may_part_at_a_near_tie_alone(tmp_path: Path, sampling: SamplingParams) -> None:
    """Two tokens with equal rows of the output head cannot be distinguished; any other tokens can."""
    model = oracle.load(make_checkpoint(tmp_path / "model", "llama", seed=2, tie_word_embeddings=False))
    prompt = [1, 2, 3]
    tokens = oracle.sampled(model, prompt, 8, temperature=0.8, seed=1 << 40, sample_index=0)
    if not sampling.temperature:
        tokens = oracle.greedy(model, prompt, 8)
    requests = [(prompt, sampling)]
    assert assert_same(model, requests, [tokens], [tokens])["near_ties"] == 0
    other = [*tokens[:3], (tokens[3] + 1) % 151, *tokens[4:]]
    with pytest.raises(AssertionError, match=r"token 3: \d+ instead of \d+"):
        assert_same(model, requests, [other], [tokens])
    with pytest.raises(AssertionError, match="has 7 tokens, not 8"):
        assert_same(model, requests, [tokens[:7]], [tokens])
    if not sampling.temperature:
        model.lm_head.weight.data[other[3]] = model.lm_head.weight.data[tokens[3]]
        assert assert_same(model, requests, [other], [tokens])["near_ties"] == 1
