"""Mixed batches, to be checked without pytest: the cases and tolerances are those of prefills."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from kernels import reference
from kernels.triton.paged_attention import paged_attention
from kernels.triton.split_plan import ANY_LEN, SplitPlan
from tests.kernels.triton.checks.case import BenchCase, CompileCase, DeviceCase
from tests.kernels.triton.checks.prefill_attention import E4M3, Case, compare, make_batch


def check_paged_attention(device: torch.device, case: Case, num_decodes: int, *, splits: bool) -> None:
    """The first rows decode, in splits or not."""
    batch = make_batch(case, device)
    scales = (0.5, 1.7) if case.cache_dtype == E4M3 else (1.0, 1.0)
    scoring = (case.head_dim**-0.5, case.window, batch.alibi_slopes, case.softcap, *scales)
    selection = (batch.selected_blocks, batch.num_selected)
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables)
    expected = reference.paged_attention(*tensors, batch.seq_lens, batch.query_start_loc, *scoring, *selection)
    integers = {"dtype": torch.int32, "device": device}
    seq_lens = torch.tensor(batch.seq_lens, **integers)
    plan = None
    if splits:
        heads = (batch.query.shape[1], case.num_kv_heads, case.head_dim)
        plan = SplitPlan.allocate(num_decodes, *heads, device, num_programs=8 * case.num_kv_heads, min_chunk=16)
        plan.decide(seq_lens[:num_decodes], case.window or ANY_LEN)
    scale, *others = scoring
    starts = torch.tensor(batch.query_start_loc, **integers)
    output = paged_attention(*tensors, seq_lens, starts, num_decodes, scale, plan, *others, *selection)
    compare(output, expected, batch, f"{case}, {num_decodes} decode, {splits=}")


_REAL = Case(((1, 4000), (1, 17), (1, 0), (300, 4000), (1000, 1000), (2, 900)), torch.bfloat16, None, 8, 4, 128)


def device_cases() -> Iterator[DeviceCase]:
    features: dict[str, dict[str, object]] = {
        "plain": {},
        "e4m3": {"cache_dtype": E4M3},
        "window": {"window": 1000},
        "selected": {"is_selected": True},
    }
    for name, changes in features.items():
        for splits in (False, True):
            run = functools.partial(check_paged_attention, case=replace(_REAL, **changes), num_decodes=3, splits=splits)
            yield DeviceCase(f"paged_attention {name}{', in splits' if splits else ''}", run)


def bench_cases() -> Iterator[BenchCase]:
    """None of its own: it launches what others time."""
    yield from ()


def compile_cases() -> Iterator[CompileCase]:
    yield from ()
