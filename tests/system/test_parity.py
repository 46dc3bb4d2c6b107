"""The tokens through both services over gRPC equal transformers' tokens."""

import pytest
from tokenizers import Tokenizer

from pagewire import AsyncClient
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running
from testing.parity import (
    CASES,
    STORYTELLER,
    assert_logprobs,
    assert_the_cache_was_used,
    generate_all,
    prompts_of,
    sample_alone,
    sample_together,
    serve_twice,
    tokens_of,
)

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", CASES)
async def test_greedy_float32_is_what_transformers_generates(name, tmp_path):
    case, seed = CASES[name], list(CASES).index(name)
    path = make_checkpoint(tmp_path / "model", case.family, seed=seed, **case.overrides)
    model, prompts = oracle.load(path), prompts_of(seed)
    with running(path, worker=case.worker_flags) as system:
        served = await serve_twice(system.url, prompts, case.num_output_tokens)
    tokens = tokens_of(served.first)
    assert {len(each) for each in tokens} == {case.num_output_tokens}
    best = [oracle.best_after(model, prompt, each) for prompt, each in zip(prompts, tokens, strict=True)]
    assert tokens == tokens_of(served.again) == best
    assert_the_cache_was_used(case, served)
    assert_logprobs(model, prompts, served.first)


async def test_seeded_samples_are_equal_alone_in_a_batch_and_under_preemption(tmp_path):
    """The noise is a pure function of seed, sample index and position."""
    path = make_checkpoint(tmp_path / "model", "qwen3", seed=5)
    with running(path, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            alone = await sample_alone(client)
            batch = await sample_together(client)
    with running(path, worker=["--dtype", "float32", "--num-device-blocks", 24]) as system:
        async with AsyncClient(system.url) as client:
            squeezed = await sample_together(client)
            assert (await client.loads()).num_preemptions > 0
    assert batch == alone
    assert squeezed == alone
    assert all(first != second for first, second in alone)


async def test_greedy_bfloat16_is_what_transformers_generates_but_for_near_ties():
    """The bundled model as published, with prompts as text and as token ids."""
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    exact = oracle.load(STORYTELLER)
    rounded = oracle.load_rounded(STORYTELLER)
    texts = ["Once", "Once upon a time", "The little fox", "Mia was a clever", "There once was a brave turtle"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    prompts += oracle.random_prompts(6, exact.config.vocab_size, (1, 40, 300, 700))
    expected = [oracle.greedy(rounded, prompt, 60) for prompt in prompts]
    with running(STORYTELLER, worker=["--dtype", "bfloat16"]) as system:
        completions = await generate_all(system.url, prompts, 60)
    differences, shortfall, rounding = 0, 0.0, 0.0
    for prompt, ours, tokens in zip(prompts, tokens_of(completions), expected, strict=True):
        differences += ours != tokens
        shortfall = max(shortfall, oracle.shortfalls(exact, prompt, ours).max().item())
        rounding = max(rounding, oracle.rounding_error(rounded, exact, prompt + ours))
    print(f"{differences} of {len(prompts)} differ from some near tie on")
    print(f"the furthest below the best: {shortfall:.3f}; transformers' bf16 moves a logit by up to {rounding:.3f}")
    assert shortfall <= rounding
