"""generation_config.json through both services, compared with transformers and the same file."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from pagewire import AsyncClient, SamplingParams
from testing import oracle
from testing.checkpoints.families import make_checkpoint
from testing.forked import running

VOCAB_SIZE, NUM_TOKENS = 151, 24


def continued(path: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return transformers' continuations under the directory's generation_config.json."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    outputs = [model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS) for prompt in prompts]
    return [tuple(output[0, len(prompt) :].tolist()) for prompt, output in zip(prompts, outputs, strict=True)]


async def test_suppressed_tokens_and_greedy_choice_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3", seed=3)
    prompts = oracle.random_prompts(7, VOCAB_SIZE, (3, 20, 50))
    generation = {"do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(generation))
    free = continued(path, prompts)
    suppressed = sorted({token_id for tokens in free for token_id in tokens[::3]})
    generation |= {"suppress_tokens": [*suppressed, VOCAB_SIZE + 5]}
    (path / "generation_config.json").write_text(json.dumps(generation))
    expected = continued(path, prompts)
    assert all(ours != theirs for ours, theirs in zip(expected, free, strict=True))
    unset = SamplingParams(max_tokens=NUM_TOKENS, temperature=None)
    favoured = replace(unset, logit_bias=dict.fromkeys(suppressed, 100.0))
    with running(path, worker=["--dtype", "float32"]) as system:
        async with AsyncClient(system.url) as client:
            for sampling in (unset, favoured):
                answers = [await client.complete(sampling=sampling, prompt_token_ids=prompt) for prompt in prompts]
                assert [tuple(answer.outputs[0].token_ids) for answer in answers] == expected
            drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=2.0, seed=1, logprobs=1)
            answer = await client.complete(sampling=drawn, prompt_token_ids=prompts[0])
            assert not {*answer.outputs[0].token_ids} & {*suppressed}
            searched = SamplingParams(max_tokens=NUM_TOKENS, beam_width=3)
            answer = await client.complete(sampling=searched, prompt_token_ids=prompts[0])
            assert not {*answer.outputs[0].token_ids} & {*suppressed}
