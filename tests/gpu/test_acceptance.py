"""The acceptance checks of a GPU as tests: `pytest -m gpu tests/gpu`.

`make gpu-check` runs the checks without pytest, in parallel, and `make gpu-check-kernels` runs the checks of the
kernels. The tests are skipped without a CUDA device.
"""

import json
from pathlib import Path

import pytest
import torch

from testing.kernel_checks import MODULES
from tests.gpu import check, check_kernels
from tests.gpu.service_checks import PARTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def failures(output: Path) -> list[str]:
    parts = json.loads(output.read_text())["parts"].values()
    return [f"{result['name']}: {result['error']}" for part in parts for result in part["results"] if "error" in result]


@pytest.mark.parametrize("part", [part for part in PARTS if part != "device_tests"])
def test_both_services(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # `check` sets it for everything in its process
    output = tmp_path / "results.json"
    status = check.main(["--parts", part, "--jobs", "1", "--output", str(output)])
    assert failures(output) == []
    assert status == 0


@pytest.mark.parametrize("module", MODULES)
def test_kernels_are_as_the_reference(module: str, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    status = check_kernels.main(["--modules", module, "--jobs", "1", "--output", str(output)])
    assert failures(output) == []
    assert status == 0
