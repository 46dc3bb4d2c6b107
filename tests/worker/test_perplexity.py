"""The arithmetic of the table of the formats' accuracy."""

import math
import shutil
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from bench.core.perplexity import (
    ARMS,
    K_QUANTS,
    Arm,
    compared,
    file_figures,
    files_of,
    measure_arms,
    peer,
    perplexity,
    table,
)
from bench.peers.environment import Environments
from pagewire.kernels.cpu import NATIVE
from testing.checkpoints.gguf_files import dequantized, requantized
from testing.kernels.variants import load_variant
from testing.logits import LlamaCppModel, OurModel, mean_divergence

pytestmark = pytest.mark.thorough

QUANTIZED = Path(__file__).parent / "fixtures" / "bundled-Q4_K_M.gguf"


def test_perplexity_is_that_of_the_tokens_that_come_next():
    token_ids = [[0, 1, 2], [2, 2, 0]]
    probabilities = torch.full((6, 4), 0.1)
    following = {0: 1, 1: 2, 3: 2, 4: 0}
    for position, token in following.items():
        probabilities[position, token] = 0.7
    # The prediction at the last position of a sequence does not count.
    probabilities[2], probabilities[5] = torch.tensor([0.97, 0.01, 0.01, 0.01]), torch.tensor([0.25] * 4)
    assert perplexity(probabilities.log() + 3, token_ids) == pytest.approx(1 / 0.7)
    assert perplexity(torch.zeros(6, 4), token_ids) == pytest.approx(4)


def test_divergence_is_the_mean_over_positions_in_nats():
    expected, actual = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.75, 0.25], [0.9, 0.1]])
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert mean_divergence(expected.log(), actual.log() - 2) == pytest.approx(first / 2)


def test_a_format_is_compared_with_exact_logits():
    exact = torch.tensor([[3.0, 1.0], [1.0, 3.0], [2.0, 0.0], [0.0, 2.0]])
    found = compared(exact, exact.flip(-1)[[0, 1, 3, 2]], [[0, 1], [1, 0]])
    assert found["same_choice"] == 0.5
    assert found["divergence"] == pytest.approx(0.5 * mean_divergence(exact[:2], exact[:2].flip(-1)))
    assert compared(exact, exact, [[0, 1], [1, 0]]) | {"perplexity": 0} == {
        "divergence": 0,
        "same_choice": 1,
        "perplexity": 0,
    }


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_files_of_formats_hold_the_weights_of_an_equal_model_off_the_grid(tmp_path: Path) -> None:
    (_, exact), *_ = islice(files_of(QUANTIZED, tmp_path, None), 1)
    before, found = dequantized(QUANTIZED), dequantized(exact)
    assert found.keys() == before.keys()
    projections = [name for name in before if name.startswith("blk.") and before[name].ndim == 2]
    assert len(projections) >= 7
    assert all((found[name] != before[name]).mean() > 0.9 for name in projections)
    requantized(QUANTIZED, tmp_path / "same.gguf", "F32")
    given, same = (
        OurModel(path, dtype=torch.float32, cache_dtype=torch.float32, kernels=load_variant(NATIVE)).logits([range(50)])
        for path in (tmp_path / "same.gguf", exact)
    )
    assert mean_divergence(given, same) < 1e-7
    before = found
    arms = {arm.name: path for arm, path in files_of(QUANTIZED, tmp_path, None)}
    assert arms["bfloat16"] == exact
    errors = [
        abs(dequantized(arms[name])["blk.0.ffn_up.weight"] - before["blk.0.ffn_up.weight"]).mean()
        for name in ("Q8_0", "Q4_0")
    ]
    assert 0 < 8 * errors[0] < errors[1]
    figures = file_figures(arms["Q8_0"])
    assert figures["shares"].keys() == {"Q8_0", "F32"}
    norms = figures["shares"]["F32"]
    assert 0 < norms < 0.01
    assert figures["bits_per_weight"] == pytest.approx(8.5 * (1 - norms) + 32 * norms)


def test_llama_cpp_makes_k_quants_of_the_floats(tmp_path: Path) -> None:
    llama_cpp = Environments(tmp_path / "peers")
    quantizer = llama_cpp.llama_cpp_source / "build" / "bin" / "llama-quantize"
    executable(quantizer, '#!/bin/sh\necho "$1 as $3" > "$2"\n')
    (llama_cpp.llama_cpp_source / "CMakeLists.txt").touch()
    for arm in ARMS:
        (tmp_path / f"{arm.file_type}.gguf").touch()
    for name in K_QUANTS:
        (tmp_path / f"{name}.gguf").unlink()
    assert {arm.name for arm, _ in files_of(QUANTIZED, tmp_path, None)} == {arm.name for arm in ARMS} - set(K_QUANTS)
    arms = {arm.name: path for arm, path in files_of(QUANTIZED, tmp_path, llama_cpp)}
    assert list(arms) == [arm.name for arm in ARMS]
    assert {name: arms[name].read_text() for name in K_QUANTS} == {
        name: f"{tmp_path}/F32.gguf as {name}\n" for name in K_QUANTS
    }


def test_without_llama_cpp_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert peer(tmp_path) is None
    assert "llama.cpp are left out: there is no cmake to build it with" in capsys.readouterr().err


LLAMA_LOGITS = """
import array, sys
print(*sys.argv[1:], file=open(sys.argv[0] + ".called", "a"))
for token in sys.stdin.read().split():
    array.array("f", [float(token), *[0.0] * 1023]).tofile(sys.stdout.buffer)
"""


def test_llama_cpp_computes_over_the_same_files(tmp_path: Path) -> None:
    """A program in llama.cpp's place sets only the logit of token 0, to the id of each input token."""
    program = executable(tmp_path / "program", f"#!{sys.executable}\n{LLAMA_LOGITS}")
    logits = LlamaCppModel(program, QUANTIZED, "f16").logits([[7, 8], [9]])
    assert (logits.shape, logits[:, 0].tolist(), logits[:, 1:].any()) == ((3, 1024), [7, 8, 9], False)
    arms = [ARMS[0], Arm("bfloat16"), Arm("Q4_K_M", file_type="Q4_K_M", llama_cpp_cache="bf16")]
    kernels, token_ids = load_variant(NATIVE), [[0, 1, 0], [0, 2, 0]]
    figures = measure_arms(((arm, QUANTIZED) for arm in arms), kernels, program, token_ids, token_ids[0])
    assert ["llama_cpp" in figure for figure in figures] == [True, False, True]
    assert (tmp_path / "program.called").read_text().splitlines() == [
        f"{QUANTIZED} {name}" for name in ("f16", "f32", "bf16")
    ]
    exact, _, quantized = figures
    assert exact["divergence"] == 0 < quantized["divergence"] < quantized["llama_cpp"]["divergence"]
    # Before the tokens 1 and 2 all logits are equal. Before the token 0 after each, its logit is 1 or 2.
    expected = [math.log(1024), math.log(1023 + math.e) - 1, math.log(1024), math.log(1023 + math.e**2) - 2]
    assert quantized["llama_cpp"]["perplexity"] == pytest.approx(math.exp(sum(expected) / 4))
    row = table(figures).splitlines()[-1]
    assert row.startswith("| Q4_K_M | ")
    same = [100 * each["same_choice"] for each in (quantized, quantized["llama_cpp"])]
    assert row.endswith(f"| {same[0]:.1f}; {same[1]:.1f} |")
    assert not any(
        "llama_cpp" in each for each in measure_arms(iter([(ARMS[0], QUANTIZED)]), kernels, None, token_ids, [])
    )


def test_every_format_is_there_once():
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    described = {(arm.dtype, arm.cache_dtype, arm.file_type, str(arm.options), arm.is_calibrated) for arm in ARMS}
    assert len(described) == len(ARMS)
