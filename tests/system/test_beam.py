"""Beam search through both services gives the results of transformers' `generate(num_beams=k)`."""

import asyncio
import random
from collections import Counter

import pytest

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running
from testing.oracle import BeamSearch
from tests.thorough import thorough

VOCAB_SIZE = 151
SCORE_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("beam") / "model", "qwen3", seed=12)


def sampling_of(search: BeamSearch) -> SamplingParams:
    return SamplingParams(
        n=search.n,
        beam_width=search.beam_width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        stop_token_ids=search.stop_token_ids,
        max_tokens=search.max_tokens,
        ignore_eos=True,
    )


def likely_stops(reference, prompts: list[list[int]], num_stops: int) -> tuple[int, ...]:
    """Return tokens that beams often emit, but not at the beginning."""
    counts: Counter[int] = Counter()
    for prompt in prompts:
        for hypothesis in oracle.beams(reference, prompt, BeamSearch(beam_width=4, n=4)):
            counts.update(set(hypothesis.token_ids[4:]))
    return tuple(token_id for token_id, _ in counts.most_common(num_stops))


def random_search(rng: random.Random, stops: tuple[int, ...]) -> BeamSearch:
    beam_width = rng.choice((2, 3, 4, 5, 6))
    return BeamSearch(
        beam_width=beam_width,
        n=rng.randint(1, beam_width),
        length_penalty=rng.choice((-1.0, 0.0, 0.5, 1.0, 1.0, 2.0)),
        early_stopping=rng.choice(tuple(oracle.EARLY_STOPPING)),
        stop_token_ids=rng.choice(((), stops[:1], stops)),
        max_tokens=rng.randint(1, 32),
    )


def assert_equal(completion, expected: list[oracle.Hypothesis], search: BeamSearch) -> None:
    assert [output.index for output in completion.outputs] == list(range(search.n))
    assert [list(output.token_ids) for output in completion.outputs] == [h.token_ids for h in expected], search
    for output, hypothesis in zip(completion.outputs, expected, strict=True):
        scale = len(output.token_ids) ** search.length_penalty
        # A negative penalty makes scores so large that transformers' float32 cannot resolve 1e-4. The sums always can.
        assert output.cumulative_logprob == pytest.approx(hypothesis.score * scale, abs=SCORE_TOLERANCE), search
        if search.length_penalty >= 0:
            assert output.cumulative_logprob / scale == pytest.approx(hypothesis.score, abs=SCORE_TOLERANCE), search
        stopped = output.token_ids[-1] in search.stop_token_ids
        assert output.finish_reason == ("stop" if stopped else "length")


async def search_all(client: AsyncClient, searches: list[tuple[list[int], BeamSearch]]) -> list:
    calls = (client.complete(None, sampling_of(search), prompt_token_ids=prompt) for prompt, search in searches)
    return await asyncio.gather(*calls)


@pytest.mark.thorough
async def test_every_parameter_while_others_run(model):
    seed = 21
    print(f"seed {seed}")
    rng, reference = random.Random(seed), oracle.load(model)
    prompts = oracle.random_prompts(seed, VOCAB_SIZE, (1, 2, 15, 16, 17, 33, 64, 120))
    stops = likely_stops(reference, prompts[:4], 3)
    searches = [(rng.choice(prompts), random_search(rng, stops)) for _ in range(60)]
    expected = [oracle.beams(reference, prompt, search) for prompt, search in searches]
    others = oracle.random_prompts(seed + 1, VOCAB_SIZE, (5, 40, 70, 100))
    beside = [oracle.greedy(reference, prompt, 150) for prompt in others]
    greedy = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with running(model, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            running_beside = [
                asyncio.create_task(client.complete(None, greedy, prompt_token_ids=prompt)) for prompt in others
            ]
            found = await search_all(client, searches)
            greedy_found = [list((await task).outputs[0].token_ids) for task in running_beside]
            loads = await client.loads()
    for completion, hypotheses, (_, search) in zip(found, expected, searches, strict=True):
        assert_equal(completion, hypotheses, search)
    assert any(output.finish_reason == "stop" for completion in found for output in completion.outputs)
    assert greedy_found == beside
    assert loads.num_held_blocks == 0


@pytest.mark.parametrize("block_size", [4, *thorough(1, 16)])
async def test_tails_are_copied_right_at_every_prompt_length(model, block_size):
    reference = oracle.load(model)
    prompts = oracle.random_prompts(22, VOCAB_SIZE, (1, 3, 4, 5, 15, 16, 17, 31, 32, 33))
    searches = [(prompt, BeamSearch(beam_width=4, n=4, max_tokens=40)) for prompt in prompts]
    expected = [oracle.beams(reference, prompt, search) for prompt, search in searches]
    with running(model, worker=["--dtype", "float32", "--block-size", block_size]) as system:
        async with AsyncClient(system.url) as client:
            found = await search_all(client, searches)
            loads = await client.loads()
    for completion, hypotheses, (_, search) in zip(found, expected, searches, strict=True):
        assert_equal(completion, hypotheses, search)
    assert loads.num_held_blocks == 0


async def test_a_beam_of_one_is_greedy(model):
    prompt = oracle.random_prompts(23, VOCAB_SIZE, [30])[0]
    expected = oracle.greedy(oracle.load(model), prompt, 24)
    with running(model, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            completion = await client.complete(None, sampling_of(BeamSearch(1)), prompt_token_ids=prompt)
    assert list(completion.outputs[0].token_ids) == expected


@pytest.fixture(scope="module")
def crowd(model):
    """Return searches with hypotheses and greedy requests with tokens: far more than a small pool can hold."""
    reference = oracle.load(model)
    prompts = oracle.random_prompts(24, VOCAB_SIZE, (40, 64, 17, 90, 33, 5, 71, 58))
    stops = likely_stops(reference, prompts[:3], 2)
    searches = [
        (prompt, BeamSearch(beam_width=3 + i % 3, n=2, max_tokens=48, stop_token_ids=stops if i % 2 else ()))
        for i, prompt in enumerate(prompts)
    ]
    hypotheses = [oracle.beams(reference, prompt, search) for prompt, search in searches]
    return searches, hypotheses, prompts, [oracle.greedy(reference, prompt, 80) for prompt in prompts]


@pytest.mark.parametrize("mode", ["swap", *thorough("recompute", "auto")])
async def test_beams_that_are_preempted_find_the_same_hypotheses(model, crowd, mode):
    """A beam group is preempted as a whole."""
    searches, expected, prompts, beside = crowd
    greedy = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    worker = ["--dtype", "float32", "--block-size", 8, "--num-device-blocks", 64, "--num-host-blocks", 300]
    with running(model, worker=worker, scheduler=["--preemption", mode]) as system:
        async with AsyncClient(system.url) as client:
            calls = (client.complete(None, greedy, prompt_token_ids=prompt) for prompt in prompts)
            found, plain = await asyncio.gather(search_all(client, searches), asyncio.gather(*calls))
            loads = await client.loads()
    for completion, hypotheses, (_, search) in zip(found, expected, searches, strict=True):
        assert_equal(completion, hypotheses, search)
    assert [list(completion.outputs[0].token_ids) for completion in plain] == beside
    assert loads.num_preemptions > 0
    if mode == "swap":
        assert loads.num_swap_preemptions > 0
    assert (loads.num_held_blocks, loads.num_held_host_blocks) == (0, 0)


@pytest.mark.thorough
async def test_beams_survive_a_killed_worker(model):
    reference = oracle.load(model)
    prompts = oracle.random_prompts(25, VOCAB_SIZE, (40, 64, 17, 90))
    searches = [(prompt, BeamSearch(beam_width=4, n=4, max_tokens=200)) for prompt in prompts]
    expected = [oracle.beams(reference, prompt, search) for prompt, search in searches]
    with running(model, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            searching = asyncio.create_task(search_all(client, searches))
            while (await client.loads()).num_running < 16:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.005)
            system.worker.kill()
            system.restart_worker()
            found = await searching
            loads = await client.loads()
    assert loads.num_worker_losses == 1
    for completion, hypotheses, (_, search) in zip(found, expected, searches, strict=True):
        assert_equal(completion, hypotheses, search)
