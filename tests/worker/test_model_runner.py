"""The runner on real checkpoints: the tokens equal transformers' tokens for any chunks, batches and blocks."""

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire.common.process.child_process import EXIT_WITH_PARENT, MEMORY_PREFIX
from pagewire.common.process.memory_size import describe_memory
from pagewire.common.wire.messages import (
    Candidates,
    Logprobs,
    PromptLogprobs,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepParts,
    StepPlan,
    StepResult,
    WorkerProtocolError,
)
from testing.checkpoints.families import FAMILIES, FIRST_FAMILIES, make_checkpoint
from testing.kernels.compiler import skip_without_compiler
from testing.plans import Row, num_blocks_needed, plan_for, plan_steps
from testing.seeds import seeded
from testing.worker.host_blocks import host_block
from tests.thorough import thorough
from tests.worker.runners import load
from worker_service.config import WorkerConfig
from worker_service.engine import LoadedWorker
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.device_memory import StepSize
from worker_service.startup.loader import load_worker
from worker_service.startup.memory_profile import largest_step

pytestmark = pytest.mark.one_of_each

VOCAB_SIZE = 151
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(root / family, family, seed=7) for family in FAMILIES}


def generate(worker: LoadedWorker, rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Return each row's output tokens."""
    worker.runner.reset(1)
    outputs: list[list[int]] = [[] for _ in rows]
    for step in plan_for(worker.ready, rows, budget):
        result = worker.runner.execute(step.plan)
        assert result.statuses == ()
        for slot, token_id in zip(step.sampling_slots, result.token_ids, strict=True):
            outputs[slot].append(token_id)
    return outputs


def reference_tokens(path: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens
    )
    return output[0, len(prompt) :].tolist()


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = seeded(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "budget"), [(16, 2048), (8, 7)])
def test_greedy_tokens_equal_those_of_transformers(
    checkpoints: dict[str, Path], family: str, block_size: int, budget: int
) -> None:
    worker = load(checkpoints[family], block_size=block_size)
    prompts = random_prompts(11, [1, 5, 33, 16])
    expected = [reference_tokens(checkpoints[family], prompt, 12) for prompt in prompts]
    assert generate(worker, [Row(prompt, 12) for prompt in prompts], budget) == expected


@pytest.mark.parametrize("family", [*FIRST_FAMILIES, *thorough(*FAMILIES[len(FIRST_FAMILIES) :])])
def test_dummy_weights_need_no_checkpoint_and_are_the_same_every_time(
    checkpoints: dict[str, Path], family: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints[family] / "config.json").read_bytes())
    rows = [SamplingParams(), SamplingParams(temperature=1.0, num_logprobs=5)]
    outputs = []
    for _ in range(2):
        worker = load(tmp_path, load_format="dummy")
        assert worker.ready.model_digest == load(checkpoints[family]).ready.model_digest
        prompts = random_prompts(17, [20, 33])
        outputs.append(generate(worker, [Row(*row) for row in zip(prompts, (30, 30), rows, strict=True)], budget=64))
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0][1])) > 10


def test_seeded_rows_draw_the_same_alone_and_together(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen3"])
    sampling = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=20),
        SamplingParams(temperature=1.3, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        GREEDY,
    ]
    prompts = random_prompts(3, [3, 40, 9, 17, 5])

    def rows() -> list[Row]:
        return [
            Row(prompt, 10, params, seed=i << 33)
            for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        ]

    together = generate(worker, rows(), budget=13)
    assert together == [generate(worker, [row], budget=2048)[0] for row in rows()]
    assert len({tuple(tokens) for tokens in together}) == len(together)


LISTED = (7, 0, 150, 33)


@pytest.mark.parametrize(
    ("num_top", "num_prompt_top", "listed"), [(3, 2, ()), (VOCAB_SIZE, VOCAB_SIZE, ()), (4, 0, LISTED)]
)
@pytest.mark.parametrize(("num_prompt_tokens", "budget", "firsts"), [(29, 12, [1, 13, 25]), (300, 2048, [1])])
def test_logprobs_equal_those_of_transformers(
    checkpoints: dict[str, Path],
    num_prompt_tokens: int,
    budget: int,
    firsts: list[int],
    num_top: int,
    num_prompt_top: int,
    listed: tuple[int, ...],
) -> None:
    """Log-probabilities of the most likely tokens, of the whole vocabulary, and of listed tokens."""
    path = checkpoints["llama"]
    worker = load(path)
    prompt = random_prompts(5, [num_prompt_tokens])[0]
    sampling = SamplingParams(num_logprobs=num_top, num_prompt_logprobs=num_prompt_top, logprob_token_ids=listed)
    row = Row(prompt, 6, sampling)
    prompt_chunks: list[PromptLogprobs] = []
    sampled: list[tuple[int, Logprobs]] = []
    for step in plan_steps([row], block_size=16, max_num_batched_tokens=budget):
        result = worker.runner.execute(step.plan)
        prompt_chunks += result.prompt_logprobs
        sampled += [(token_id, result.logprobs) for token_id in result.token_ids]
    tokens = prompt + [token_id for token_id, _ in sampled]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert [chunk.first_position for chunk in prompt_chunks] == firsts
    for chunk in prompt_chunks:
        for i, (chosen, rank) in enumerate(zip(chunk.logprobs.chosen, chunk.logprobs.ranks, strict=True)):
            position = chunk.first_position + i
            assert_logprob(expected[position - 1], tokens[position], chosen, rank)
            assert_top(expected[position - 1], chunk.logprobs, i, num_prompt_top)
    assert sum(len(chunk.logprobs.chosen) for chunk in prompt_chunks) == len(prompt) - 1
    for i, (token_id, logprobs) in enumerate(sampled):
        assert_logprob(expected[len(prompt) + i - 1], token_id, logprobs.chosen[0], logprobs.ranks[0])
        assert_top(expected[len(prompt) + i - 1], logprobs, 0, num_top, listed)


def assert_logprob(expected: torch.Tensor, token_id: int, chosen: float, rank: int) -> None:
    assert chosen == pytest.approx(expected[token_id].item(), abs=1e-4)
    assert rank == int((expected > expected[token_id]).sum()) + 1


def assert_top(
    expected: torch.Tensor, logprobs: Logprobs, position: int, num_top: int, listed: tuple[int, ...] = ()
) -> None:
    part = slice(position * num_top, (position + 1) * num_top)
    token_ids = list(logprobs.top_token_ids[part])
    assert len(set(token_ids)) == num_top
    assert list(logprobs.top_logprobs[part]) == pytest.approx(expected[token_ids].tolist(), abs=1e-4)
    if listed:
        assert token_ids == list(listed)
    else:  # tokens of nearly equal logits may be in any order
        assert expected[token_ids].tolist() == pytest.approx(expected.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(4, 64), (8, 3), (2, 4096)])
def test_largest_step_fits_its_limits(
    checkpoints: dict[str, Path], max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    size = StepSize(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))
    plan, counts = largest_step(size, max_model_len=1024, block_size=16)
    assert counts.num_states == 0
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    result = load(checkpoints["qwen2"], num_device_blocks=counts.num_blocks, **options).runner.execute(plan)
    assert len(result.token_ids) == len(plan.work_slots) == min(max_num_seqs, max_num_batched_tokens)


def test_a_parent_hears_what_memory_is_taken(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The report comes before the allocation, because the system may kill the worker for it."""
    load(checkpoints["qwen2"])
    assert capfd.readouterr().out == ""
    monkeypatch.setenv(EXIT_WITH_PARENT, str(os.getppid()))
    worker = load(checkpoints["qwen2"], kv_cache_memory="512MiB", num_device_blocks=None)
    (line,) = capfd.readouterr().out.splitlines()
    assert line.startswith(MEMORY_PREFIX)
    assert "KiB of weights" in line
    # The computed format may be larger than the stored one, which is float32 here, and is rounded up to whole packed
    # panels.
    stored_bytes = sum(file.stat().st_size for file in checkpoints["qwen2"].glob("*.safetensors"))
    assert worker.ready.weight_format == "float32"
    assert stored_bytes / 2 < worker.ready.weight_bytes < 2 * stored_bytes
    cache_bytes = (worker.ready.num_device_blocks + 1) * worker.ready.block_bytes
    assert f"and {describe_memory(cache_bytes)} of KV cache; " in line


def test_bfloat16_tokens_are_near_the_choice(checkpoints: dict[str, Path]) -> None:
    """Teacher-forced in float32, the logit of every token is within a margin of the best logit."""
    path = checkpoints["qwen3"]
    worker = load_worker(WorkerConfig(str(path), device="cpu", dtype="bfloat16", num_device_blocks=20), "worker")
    assert worker.ready.dtype == "bfloat16"
    assert "bfloat16" in worker.ready.weight_format
    prompt = random_prompts(8, [30])[0]
    output = generate(worker, [Row(prompt, 10)], budget=16)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    margins = logits.amax(1) - logits.gather(1, torch.tensor([output]).T).squeeze(1)
    assert margins.max().item() < 0.5


def test_prefix_in_the_cache_is_not_computed_again(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    prompt = random_prompts(9, [40])[0]
    whole = StepPlan(1, 1, openings=(opening(0, prompt, 0, (1, 2, 3)),), work_slots=(0,), work_num_tokens=(40,))
    first = worker.runner.execute(whole)
    # Two full blocks are shared; the other tokens are in a separate block.
    again = (opening(0, prompt, 32, (1, 2, 9)),)
    shared = StepPlan(1, 2, (0,), openings=again, work_slots=(0,), work_num_tokens=(8,))
    assert worker.runner.execute(shared).token_ids == first.token_ids


def test_consumer_of_a_prefix_may_stand_in_the_plan_that_computes_it(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    prompt = random_prompts(9, [40])[0]
    plan = StepPlan(
        1,
        1,
        openings=(opening(0, prompt, 32, (1, 2, 9)), opening(1, prompt, 0, (1, 2, 3))),
        work_slots=(0, 1),
        work_num_tokens=(8, 40),
    )
    token_ids = worker.runner.execute(plan).token_ids
    assert token_ids[0] == token_ids[1] == reference_tokens(checkpoints["qwen2"], prompt, 1)[0]


def test_nan_logits_fail_their_row_only(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    prompts = random_prompts(9, [20, 20])
    openings = (opening(0, prompts[0], 0, (1, 2)), opening(1, prompts[1], 0, (3, 4)))
    worker.runner.execute(StepPlan(1, 1, openings=openings, work_slots=(0, 1), work_num_tokens=(20, 20)))
    worker.runner._cache.storage[1] = float("nan")
    result = worker.runner.execute(StepPlan(1, 2))
    assert result.statuses == (RowStatus.NAN_LOGITS, RowStatus.OK)
    assert result.token_ids == (reference_tokens(checkpoints["qwen2"], prompts[1], 2)[1],)
    # The row continues until the scheduler has received the result.
    assert worker.runner.execute(StepPlan(1, 3)).statuses == (RowStatus.NAN_LOGITS, RowStatus.OK)


@pytest.mark.parametrize(("family", "kernels"), [("qwen3", "require"), ("gpt2", "require"), ("gpt2", "off")])
def test_parts_of_a_step_add_up(
    checkpoints: dict[str, Path], family: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_compiler()
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", kernels)
    worker = load(checkpoints[family])
    row = opening(0, random_prompts(5, [60])[0], 0, (1, 2, 3, 4))
    result = worker.runner.execute(StepPlan(1, 1, openings=(row,), work_slots=(0,), work_num_tokens=(60,)))
    parts = asdict(result.parts)
    assert 0 <= result.duration_us - sum(parts.values()) <= len(parts), "more than what rounding down takes"
    assert (parts["products_us"] > 0) == (kernels == "require")
    assert min(parts["model_us"], parts["batch_us"], parts["head_us"], parts["sampling_us"]) > 0


def test_plan_without_work_yields_an_empty_result(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    result = worker.runner.execute(StepPlan(1, 1))
    assert replace(result, duration_us=0, parts=StepParts()) == StepResult(1, 1, last_moved_step=1)


def test_bad_plan_raises_before_anything_is_written(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"], num_device_blocks=3)
    before = worker.runner._cache.storage.clone()
    plan = StepPlan(1, 1, openings=(opening(0, [1, 2, 3], 0, (4,)),), work_slots=(0,), work_num_tokens=(3,))
    with pytest.raises(WorkerProtocolError, match="ids are 1 to 3"):
        worker.runner.execute(plan)
    assert torch.equal(worker.runner._cache.storage.view(torch.int32), before.view(torch.int32))


def test_block_zero_stays_zero(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    rows = [Row(prompt, 5) for prompt in random_prompts(2, [1, 17, 30])]
    generate(worker, rows, budget=20)
    assert num_blocks_needed(rows, 16) <= 200
    assert not worker.runner._cache.storage[0].any()


# Moves, copies, forks


def sampled(worker: LoadedWorker, plan: StepPlan) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the tokens of a step and their log-probabilities, for bit-wise comparison."""
    result = worker.runner.execute(plan)
    assert result.last_moved_step == plan.step
    assert result.statuses == ()
    return result.token_ids, result.logprobs.chosen


WATCHED = SamplingParams(temperature=0.8, num_logprobs=0)


def run_on(worker: LoadedWorker, step: int, num_steps: int, **columns: Any) -> list[Any]:
    """Run steps, of which the first has the given plan fields."""
    plans = [StepPlan(1, step, **columns), *(StepPlan(1, step + i) for i in range(1, num_steps))]
    return [sampled(worker, plan) for plan in plans]


def test_swapped_row_goes_on_bit_for_bit(checkpoints: dict[str, Path]) -> None:
    prompt = random_prompts(21, [37])[0]
    start = opening(0, prompt, 0, (3, 4, 9, 10), WATCHED, seed=5)
    undisturbed = load(checkpoints["qwen3"])
    expected = run_on(undisturbed, 1, 12, openings=(start,), work_slots=(0,), work_num_tokens=(37,))

    worker = load(checkpoints["qwen3"], num_host_blocks=8)
    storage = worker.runner._cache.storage
    tokens = run_on(worker, 1, 5, openings=(start,), work_slots=(0,), work_num_tokens=(37,))
    # The plan that releases the row also moves its blocks out; nothing is computed.
    left = worker.runner.execute(StepPlan(1, 6, (0,), swap_out_device_blocks=(3, 4, 9), swap_out_host_blocks=(5, 6, 2)))
    assert (left.token_ids, left.last_moved_step) == ((), 6)
    other = opening(1, random_prompts(22, [60])[0], 0, (9, 4, 3, 10))
    assert len(
        worker.runner.execute(StepPlan(1, 7, openings=(other,), work_slots=(1,), work_num_tokens=(60,))).token_ids
    )
    storage[[3, 4, 9, 10, 20, 21, 15]] = float("nan")
    worker.runner.execute(StepPlan(1, 8, (1,), swap_in_host_blocks=(5, 6, 2), swap_in_device_blocks=(20, 21, 15)))
    known = [*prompt, *(token_ids[0] for token_ids, _ in tokens)]
    back = opening(2, known, len(known) - 1, (20, 21, 15), WATCHED, seed=5, num_prompt_tokens=37)
    tokens += run_on(worker, 9, 7, openings=(back,), work_slots=(2,), work_num_tokens=(1,))
    assert tokens == expected


def test_move_starts_after_what_was_computed_before(checkpoints: dict[str, Path]) -> None:
    """One plan fills a block, and the next plan moves it out while another row writes it."""
    prompts = random_prompts(23, [16, 16])
    worker = load(checkpoints["qwen2"], num_host_blocks=1)
    first = (opening(0, [*prompts[0], 1], 0, (7, 8)),)
    worker.runner.execute(StepPlan(1, 1, openings=first, work_slots=(0,), work_num_tokens=(16,)))
    filled = worker.runner._cache.storage[7].clone()
    columns = {"swap_out_device_blocks": (7,), "swap_out_host_blocks": (1,)}
    openings = (opening(1, prompts[1], 0, (7,)),)
    worker.runner.execute(StepPlan(1, 2, (0,), openings=openings, work_slots=(1,), work_num_tokens=(16,), **columns))
    assert torch.equal(host_block(worker.runner._cache, 1), filled)
    assert not torch.equal(worker.runner._cache.storage[7], filled)


@pytest.mark.parametrize("num_prompt_tokens", [31, 32, 33, 40])
def test_fork_goes_on_exactly_as_its_source(checkpoints: dict[str, Path], num_prompt_tokens: int) -> None:
    prompt = random_prompts(24, [num_prompt_tokens])[0]
    worker = load(checkpoints["llama"])
    start = (opening(0, prompt, 0, (1, 2, 3, 4), WATCHED, seed=9),)
    work = {"work_slots": (0,), "work_num_tokens": (num_prompt_tokens,)}
    run_on(worker, 1, 4, openings=start, **work)
    tail = (num_prompt_tokens + 3) // 16  # the block that both rows continue to write
    fork = {"fork_source_slots": (0,), "fork_target_slots": (3,)}
    copy = {"copy_source_blocks": (tail + 1,), "copy_target_blocks": (9,)}
    own = {"set_block_tables": (3,), "set_block_indexes": (tail,), "set_block_ids": (9,)}
    wake = {"work_slots": (3,), "work_num_tokens": (1,)}
    appended = {"append_tables": (3,), "append_block_ids": (10,)}
    for token_ids, logprobs in run_on(worker, 5, 6, **fork, **copy, **own, **appended, **wake):
        assert token_ids[0] == token_ids[1]
        assert logprobs[0] == logprobs[1]
    assert (worker.runner.table.token_ids[0] == worker.runner.table.token_ids[3]).all()


# Beams


def test_beams_report_candidates_and_take_the_tokens_they_are_given(checkpoints: dict[str, Path]) -> None:
    """Two beams of a prompt, forked by copies of their last block, follow their own tokens beside a decoding row."""
    path = checkpoints["qwen3"]
    worker = load(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt, other = random_prompts(25, [20, 9])
    beam = SamplingParams(num_candidates=6)
    openings = (opening(0, prompt, 0, (1, 2), beam), opening(1, other, 0, (3, 4)))
    result = worker.runner.execute(StepPlan(1, 1, openings=openings, work_slots=(0, 1), work_num_tokens=(20, 9)))
    assert_candidates(model, [prompt], result.candidates, 6)
    others = [*result.token_ids]
    beams = [[*prompt, result.candidates.token_ids[0]], [*prompt, result.candidates.token_ids[1]]]
    fork: dict[str, Any] = {
        "copy_source_blocks": (2,),
        "copy_target_blocks": (5,),
        "fork_source_slots": (0,),
        "fork_target_slots": (2,),
        "set_block_tables": (2,),
        "set_block_indexes": (1,),
        "set_block_ids": (5,),
    }
    for step in range(2, 14, 2):
        columns = {"append_token_slots": (0, 2), "append_token_ids": (beams[0][-1], beams[1][-1])}
        work = {"work_slots": (0, 2), "work_num_tokens": (1, 1)}
        result = worker.runner.execute(StepPlan(1, step, **fork, **columns, **work))
        assert_candidates(model, beams, result.candidates, 6)
        # At pipeline depth 2, a beam search runs in every second plan only; the row beside it runs in all plans.
        between = worker.runner.execute(StepPlan(1, step + 1))
        assert between.candidates == Candidates()
        others += [*result.token_ids, *between.token_ids]
        beams = [[*beams[0], result.candidates.token_ids[1]], [*beams[1], result.candidates.token_ids[6]]]
        fork = {}
    assert others == reference_tokens(path, other, len(others))


def assert_candidates(model: Any, beams: list[list[int]], candidates: Candidates, num: int) -> None:
    with torch.no_grad():
        logprobs = torch.stack([model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1) for tokens in beams])
    best = logprobs.topk(num, dim=1)
    assert list(candidates.token_ids) == best.indices.flatten().tolist()
    assert list(candidates.logprobs) == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


def test_nan_logits_of_a_beam_have_no_candidates(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    prompts = random_prompts(26, [20, 20, 20])
    beam = SamplingParams(num_candidates=3)
    openings = tuple(opening(i, prompts[i], 0, (1 + 2 * i, 2 + 2 * i), (beam, GREEDY, beam)[i]) for i in range(3))
    worker.runner.execute(StepPlan(1, 1, openings=openings, work_slots=(0, 1, 2), work_num_tokens=(20, 20, 20)))
    worker.runner._cache.storage[1] = float("nan")
    columns = {"append_token_slots": (0, 2), "append_token_ids": (1, 1)}
    result = worker.runner.execute(StepPlan(1, 2, **columns, work_slots=(0, 2), work_num_tokens=(1, 1)))
    assert result.statuses == (RowStatus.NAN_LOGITS, RowStatus.OK, RowStatus.OK)
    assert (len(result.token_ids), len(result.candidates.token_ids)) == (1, 3)


# Sliding windows


@pytest.mark.parametrize(("block_size", "budget"), [(16, 2048), (8, 7), (4, 13)])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral", {"sliding_window": 20}),
        ("mistral", {"sliding_window": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    ],
)
def test_blocks_out_of_the_window_are_never_read(
    tmp_path: Path, family: str, overrides: dict[str, Any], block_size: int, budget: int
) -> None:
    """As soon as a block is outside the window, it is filled with NaN and belongs to another row."""
    path = make_checkpoint(tmp_path, family, seed=27, **overrides)
    worker = load(path, block_size=block_size)
    window = worker.ready.windows[0]
    assert window == overrides["sliding_window"]
    prompts = random_prompts(27, [1, 5, 20, 45, 70])
    rows = [Row(prompt, 40) for prompt in prompts]
    table, storage = worker.runner.table, worker.runner._cache.storage
    outputs: list[list[int]] = [[] for _ in rows]
    num_poisoned = 0
    for step in plan_steps(rows, block_size=block_size, max_num_batched_tokens=budget):
        result = worker.runner.execute(step.plan)
        assert result.statuses == ()
        for slot, token_id in zip(step.sampling_slots, result.token_ids, strict=True):
            outputs[slot].append(token_id)
        for slot in table.occupied.nonzero()[0]:
            first = table.limits.first_block(int(table.num_computed_tokens[slot]), window)
            storage[table.block_tables[slot, :first]] = float("nan")
            num_poisoned += first
        storage[0] = 0
    assert num_poisoned > 100
    assert outputs == [reference_tokens(path, prompt, 40) for prompt in prompts]


def test_row_with_holes_goes_on_as_if_it_had_never_left(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mistral", seed=28, sliding_window=20)
    prompt = random_prompts(28, [60])[0]
    expected = reference_tokens(path, prompt, 10)
    worker = load(path, num_host_blocks=4, block_size=8)
    start = (opening(0, prompt, 0, tuple(range(1, 9))),)
    tokens = [*worker.runner.execute(StepPlan(1, 1, openings=start, work_slots=(0,), work_num_tokens=(60,))).token_ids]
    # Position 60 is next: it reads from position 41 on, in the block of index 5.
    worker.runner.execute(StepPlan(1, 2, (0,), swap_out_device_blocks=(6, 7, 8), swap_out_host_blocks=(1, 2, 3)))
    worker.runner._cache.storage[1:] = float("nan")
    worker.runner.execute(StepPlan(1, 3, swap_in_host_blocks=(1, 2, 3), swap_in_device_blocks=(20, 30, 40)))
    back = (opening(0, [*prompt, *tokens], 60, (0, 0, 0, 0, 0, 20, 30, 40, 50), num_prompt_tokens=60),)
    tokens += worker.runner.execute(StepPlan(1, 4, openings=back, work_slots=(0,), work_num_tokens=(1,))).token_ids
    for step in range(5, 13):
        tokens += worker.runner.execute(StepPlan(1, step)).token_ids
    assert tokens == expected
    assert not worker.runner._cache.storage[0].any()


# Host blocks


def test_host_pool_is_sized_by_count_or_by_memory(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    block_bytes = load(checkpoints["qwen2"]).ready.block_bytes
    assert load(checkpoints["qwen2"]).ready.num_host_blocks == 0
    for options in ({"num_host_blocks": 9}, {"swap_space": str(10 * block_bytes + 3)}):
        worker = load(checkpoints["qwen2"], **options)
        assert worker.ready.num_host_blocks == 9
        assert worker.ready.swap_bandwidth > 0
        size = f"{worker.ready.block_size} tokens, {describe_memory(10 * block_bytes)}"
        assert f"swap space: 9 blocks of {size}; blocks move at " in caplog.text
        assert worker.runner.execute(StepPlan(1, 1)).last_moved_step == 1


def check_nearly_likeliest(worker: LoadedWorker, path: Path, tolerance: float) -> None:
    """Check that the chosen logits are within `tolerance` standard deviations of transformers' highest logit."""
    prompts = random_prompts(17, [40, 3])
    outputs = generate(worker, [Row(prompt, 12) for prompt in prompts], budget=32)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= tolerance * logits.std()


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("fp8", 0.25), ("int8", 0.05)])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_cache_of_8_bits_chooses_nearly_the_likeliest(
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    cache_dtype: str,
    tolerance: float,
    dtype: str,
    kernels: str,
) -> None:
    monkeypatch.setenv("PAGEWIRE_CPU_KERNELS", kernels)
    worker = load(checkpoints[family], kv_cache_dtype=cache_dtype, dtype=dtype)
    check_nearly_likeliest(worker, checkpoints[family], tolerance)


@pytest.mark.parametrize("name", ["float16", "half"])
@pytest.mark.parametrize(("stored", "held"), [("float32", "float16"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_float16_is_float32_over_weights_of_16_bits(tmp_path: Path, name: str, stored: str, held: str) -> None:
    """Only the C kernels widen weights during multiplication, so only with them are float32 weights rounded."""
    path = make_checkpoint(tmp_path / "model", "qwen3", seed=31, dtype=stored)
    rounded = make_checkpoint(tmp_path / "rounded", "qwen3", seed=31, dtype=held)
    worker = load(path, dtype=name)
    assert (worker.ready.dtype, worker.ready.weight_format) == ("float32", held if load_cpu_kernels() else "float32")
    prompts = random_prompts(18, [40, 3])
    same = load(rounded if load_cpu_kernels() else path, dtype="float32")
    assert worker.ready.weight_bytes == same.ready.weight_bytes
    outputs = [generate(each, [Row(prompt, 12) for prompt in prompts], budget=32) for each in (worker, same)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("cache_dtype", "tolerance"), [("float16", 0.01), ("bfloat16", 0.05)])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_cache_of_16_bits_takes_half_the_memory_and_chooses_nearly_the_likeliest(
    checkpoints: dict[str, Path], family: str, cache_dtype: str, tolerance: float
) -> None:
    if load_cpu_kernels() is None:
        with pytest.raises(ValueError, match=f"--kv-cache-dtype asks for {cache_dtype}: use --kv-cache-dtype auto"):
            load(checkpoints[family], kv_cache_dtype=cache_dtype)
        return
    worker, exact = (load(checkpoints[family], kv_cache_dtype=dtype) for dtype in (cache_dtype, "auto"))
    assert 2 * worker.ready.block_bytes == exact.ready.block_bytes
    check_nearly_likeliest(worker, checkpoints[family], tolerance)


def test_bad_move_raises_before_anything_is_written(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"], num_device_blocks=3, num_host_blocks=2)
    cache = worker.runner._cache
    before = [storage.clone() for storage in (cache.storage, host_block(cache, 1), host_block(cache, 2))]
    swap_in = {"swap_in_host_blocks": (1,), "swap_in_device_blocks": (2,)}
    bad_row = {"openings": (opening(0, [1, 2, 3], 0, (4,)),)}
    bad_copy = {"copy_source_blocks": (1,), "copy_target_blocks": (4,)}
    for columns in (bad_row, bad_copy):
        with pytest.raises(WorkerProtocolError):
            worker.runner.execute(StepPlan(1, 1, **swap_in, **columns))
        worker.runner.reset(1)
    after = (cache.storage, host_block(cache, 1), host_block(cache, 2))
    for storage, expected in zip(after, before, strict=True):
        assert torch.equal(storage.view(torch.int32), expected.view(torch.int32))


def test_an_epoch_knows_nothing_of_the_moves_before(checkpoints: dict[str, Path]) -> None:
    runner = load(checkpoints["qwen2"], num_device_blocks=3, num_host_blocks=2).runner
    runner.reset(1)
    runner.execute(StepPlan(1, 1, swap_out_device_blocks=(2,), swap_out_host_blocks=(1,)))
    assert runner.last_moved_step() == 1
    runner.reset(2)
    assert runner.last_moved_step() == 0


def opening(
    slot: int,
    tokens: Sequence[int],
    num_computed: int,
    blocks: tuple[int, ...],
    sampling: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    num_prompt_tokens: int | None = None,
) -> RowOpening:
    num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return RowOpening(slot, slot, tuple(tokens), num_prompt_tokens, num_computed, blocks, sampling, seed, 0)
