"""Every kernel compiles for an H200 to machine code, within the limits of its case.

The limits are on registers, shared memory, spills and waits for loads. The compiler included in Triton needs no GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing import kernel_checks

ROOT = Path(__file__).parents[3]
CHECKS = Path(kernel_checks.__file__).parent
MODULES = sorted(path.stem for path in CHECKS.glob("*.py") if path.stem not in {"__init__", "case"})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process without Triton's interpreter. Triton's cache provides variants compiled earlier."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_kernels_compile():
    """All kernels compile in one process, because its imports take as long as ten variants."""
    result = run("-m", "tests.kernels.triton.compilation", "--pairs")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" registers, ") > 100


def test_a_sample_has_every_pair_that_any_variant_has():
    """Each variant of the sample adds a pair that the preceding ones lack."""
    result = run("-c", _SAMPLES)
    modules = [line.split() for line in result.stdout.splitlines()]
    assert [name for name, *_ in modules] == MODULES, result.stderr
    assert all(of_sample == of_all for _, of_sample, of_all, *_ in modules)
    assert sum(int(count) for *_, count, _ in modules) < sum(int(count) for *_, count in modules) / 1.7


_SAMPLES = """
import importlib, itertools
from tests.kernels.triton.compilation import MODULES, in_pairs, traits

def pairs(cases):
    return {(case.kernel.__name__, *pair) for case in cases for pair in itertools.product(traits(case), repeat=2)}

for name in MODULES:
    cases = list(importlib.import_module(f"testing.kernel_checks.{name}").compile_cases())
    sample = in_pairs(cases)
    print(name, len(pairs(sample)), len(pairs(cases)), len(sample), len(cases))
"""


def test_kernels_are_compiled_once_wherever_rows_lie():
    """The position and number of rows in a step's tensors change from step to step."""
    result = run("-m", "tests.kernels.triton.specialization")
    assert result.stdout.splitlines() == [
        "_paged_prefill_kernel",
        "_paged_attention_v1_kernel",
        "_paged_attention_v2_kernel",
        "_plan_kernel",
        "_gather_tokens_kernel",
        "_gather_columns_kernel",
        "_scan_kernel",
        "_choose_kernel",
        "_logprobs_kernel",
        "_edit_kernel",
        "_choose_kernel",
        "_assign_kernel",
        "_multiply_kernel",
        "_multiply_kernel",
        "_round_kernel",
        "_multiply_kernel",
        "_convolve_kernel",
        "_delta_rule_kernel",
        "_reduction_kernel output output_stride",
    ], result.stderr


def test_kernels_around_the_model_compile_once_for_all_step_sizes():
    """All launches use Triton's launcher."""
    result = run("-m", "tests.kernels.triton.launching")
    assert result.stdout.splitlines() == [
        "_gather_tokens_kernel 1 24",
        "_gather_columns_kernel 1 6",
        "_scan_kernel 1 30",
        "_choose_kernel 1 30",
        "_logprobs_kernel 1 24",
        "_multiply_kernel 3 18",
    ], result.stderr


def test_triton_inspects_arguments_once_for_identical_layers():
    """The driver receives the same values as when Triton inspects the arguments."""
    result = run("-m", "tests.kernels.triton.relaunching")
    kernels = " _paged_attention_v2_kernel _reduction_kernel _paged_prefill_kernel"
    assert result.stdout.splitlines() == [
        f"dense:{kernels}",
        "dense:",
        f"merged:{kernels}",
        "merged:",
        f"shifted:{kernels}",
        f"shifted:{kernels}",
        f"output shifted:{kernels}",
        f"sinks:{kernels}",
        "sinks:",
        "dense:",
        "turned: _norm_rope_kernel",
        "turned:",
        "turned before they are normalized: _norm_rope_kernel",
        "turned without a norm of keys: _norm_rope_kernel",
        "turned where they are shifted: _norm_rope_kernel",
        "turned where they are shifted: _norm_rope_kernel",
        "turned as part of more: _norm_rope_kernel",
        "turned:",
    ], result.stderr


def test_a_variant_that_takes_too_much_is_refused():
    """The limits are compared with the compiler's output; each case here exceeds one."""
    result = run("-c", _BROKEN)
    lines = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert lines == [
        "loads nothing while it computes",
        "loads nothing while it computes",
        "17 programs are to fit a processor",
    ], result.stdout + result.stderr


_BROKEN = """
from dataclasses import replace
from testing.kernel_checks import blocks, prefill_attention
from tests.kernels.triton.compilation import compile_case

prefill, copy = next(prefill_attention.compile_cases()), next(blocks.compile_cases())
for case in (replace(prefill, num_stages=2), replace(copy, overlaps=True), replace(copy, min_programs=17)):
    try:
        print(compile_case(case))
    except ValueError as error:
        print(error)
"""
