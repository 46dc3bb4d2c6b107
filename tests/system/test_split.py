"""The benchmark `split` ends when one of its arms fails, at any time."""

import argparse
from pathlib import Path

import pytest

from bench.services.split import ARMS, Arm
from testing.checkpoints.families import make_checkpoint

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_that_raises_in_a_round_ends(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The prompts have tokens that this model lacks."""
    model = make_checkpoint(tmp_path / "model", "llama", seed=1)
    arm = Arm(name, argparse.Namespace(model=model, num_seqs=2, input_len=8, output_len=4))
    try:
        arm.wait_until_ready()
        with pytest.raises(SystemExit, match=f"{name} ended with exit code 1"):
            arm.round(0)
    finally:
        arm.close()
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_that_cannot_start_ends(name: str, tmp_path: Path) -> None:
    arm = Arm(name, argparse.Namespace(model=tmp_path, num_seqs=2, input_len=8, output_len=4))
    try:
        with pytest.raises(SystemExit, match=f"{name} ended with exit code 1"):
            arm.wait_until_ready()
    finally:
        arm.close()
