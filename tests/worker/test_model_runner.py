"""The runner on real checkpoints: the same tokens as transformers, whatever the chunks, the batch and the blocks."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from tests.worker.checkpoints import FAMILIES, make_checkpoint
from tests.worker.plans import Row, num_blocks_needed, plan_steps
from worker_service.config import WorkerConfig
from worker_service.engine import LoadedWorker
from worker_service.loader import largest_step, load_worker
from worker_service.session import ProtocolError
from worker_service.step import Logprobs, PromptLogprobs, RowOpening, RowStatus, SamplingParams, StepPlan, StepResult

VOCAB_SIZE = 151
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(root / family, family, seed=7) for family in FAMILIES}


def load(path: Path, **options: int) -> LoadedWorker:
    return load_worker(WorkerConfig(model=str(path), device="cpu", **{"num_device_blocks": 200, **options}), "worker")


def generate(worker: LoadedWorker, rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Each row's output tokens."""
    worker.runner.reset()
    outputs: list[list[int]] = [[] for _ in rows]
    steps = plan_steps(rows, block_size=worker.ready.block_size, max_num_batched_tokens=budget)
    for step in steps:
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
    print("seed", seed)
    rng = random.Random(seed)
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


@pytest.mark.parametrize(("num_prompt_tokens", "budget", "firsts"), [(29, 12, [1, 13, 25]), (300, 2048, [1])])
def test_logprobs_equal_those_of_transformers(
    checkpoints: dict[str, Path], num_prompt_tokens: int, budget: int, firsts: list[int]
) -> None:
    path = checkpoints["llama"]
    worker = load(path)
    prompt = random_prompts(5, [num_prompt_tokens])[0]
    row = Row(prompt, 6, SamplingParams(num_logprobs=3, num_prompt_logprobs=2))
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
            assert_top(expected[position - 1], chunk.logprobs, i, 2)
    assert sum(len(chunk.logprobs.chosen) for chunk in prompt_chunks) == len(prompt) - 1
    for i, (token_id, logprobs) in enumerate(sampled):
        assert_logprob(expected[len(prompt) + i - 1], token_id, logprobs.chosen[0], logprobs.ranks[0])
        assert_top(expected[len(prompt) + i - 1], logprobs, 0, 3)


def assert_logprob(expected: torch.Tensor, token_id: int, chosen: float, rank: int) -> None:
    assert chosen == pytest.approx(expected[token_id].item(), abs=1e-4)
    assert rank == int((expected > expected[token_id]).sum()) + 1


def assert_top(expected: torch.Tensor, logprobs: Logprobs, position: int, num_top: int) -> None:
    values, token_ids = expected.topk(num_top)
    part = slice(position * num_top, (position + 1) * num_top)
    assert list(logprobs.top_token_ids[part]) == token_ids.tolist()
    assert list(logprobs.top_logprobs[part]) == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(4, 64), (8, 3), (2, 4096)])
def test_largest_step_fits_its_limits(
    checkpoints: dict[str, Path], max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    config = WorkerConfig("m", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    plan, num_blocks = largest_step(config, max_model_len=1024)
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    result = load(checkpoints["qwen2"], num_device_blocks=num_blocks, **options).runner.execute(plan)
    assert len(result.token_ids) == len(plan.work_slots) == min(max_num_seqs, max_num_batched_tokens)


def test_bfloat16_tokens_are_near_the_choice(checkpoints: dict[str, Path]) -> None:
    """Teacher-forced in float32, every token lies within a margin of the best one: logits spread over several units."""
    path = checkpoints["qwen3"]
    worker = load_worker(WorkerConfig(str(path), device="cpu", dtype="bfloat16", num_device_blocks=20), "worker")
    assert worker.ready.dtype == "bfloat16"
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
    # Two full blocks are shared; the rest goes to a block of its own.
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
    # The row goes on until the scheduler has heard of it.
    assert worker.runner.execute(StepPlan(1, 3)).statuses == (RowStatus.NAN_LOGITS, RowStatus.OK)


def test_plan_without_work_yields_an_empty_result(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    result = worker.runner.execute(StepPlan(1, 1))
    assert replace(result, duration_us=0) == StepResult(1, 1, last_moved_step=1)


def test_bad_plan_raises_before_anything_is_written(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"], num_device_blocks=3)
    before = worker.runner._cache.storage.clone()
    plan = StepPlan(1, 1, openings=(opening(0, [1, 2, 3], 0, (4,)),), work_slots=(0,), work_num_tokens=(3,))
    with pytest.raises(ProtocolError, match="ids are 1 to 3"):
        worker.runner.execute(plan)
    assert torch.equal(worker.runner._cache.storage.view(torch.int32), before.view(torch.int32))


def test_block_zero_stays_zero(checkpoints: dict[str, Path]) -> None:
    worker = load(checkpoints["qwen2"])
    rows = [Row(prompt, 5) for prompt in random_prompts(2, [1, 17, 30])]
    generate(worker, rows, budget=20)
    assert num_blocks_needed(rows, 16) <= 200
    assert not worker.runner._cache.storage[0].any()


def opening(slot: int, tokens: Sequence[int], num_computed: int, blocks: tuple[int, ...]) -> RowOpening:
    return RowOpening(slot, slot, tuple(tokens), len(tokens), num_computed, blocks, GREEDY, 0, 0)
