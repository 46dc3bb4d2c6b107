"""Outputs match their schemas through both services, even if the worker dies.

The schemas of tests/schemas/schemas.jsonl resemble what users send: tools, extractions and records. Each schema has a
valid output within the context length of the bundled model. PyPI's `jsonschema` judges the validity.
"""

import asyncio
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from pagewire import AsyncClient, Completion, ResourceExhausted, SamplingParams
from pagewire.common.grammars import GrammarCompiler
from testing.forked import running
from testing.services import System
from testing.streams import until_connected, until_lost
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
STORYTELLER = ROOT / "models" / "storyteller"
SCHEMAS = [json.loads(line) for line in (ROOT / "tests" / "schemas" / "schemas.jsonl").read_text().splitlines()]
COMPILER = GrammarCompiler((STORYTELLER / "tokenizer.json").read_text(encoding="utf-8"), 1024)
SEEDS = (1, 2, 3)
MAX_CONCURRENT = 32
WORKER = ["--dtype", "float32"]
# A pool in which some requests must be preempted.
SMALL_POOL = {
    "worker": [*WORKER, "--num-device-blocks", 200, "--max-num-batched-tokens", 96],
    "scheduler": ["--pipeline-depth", 3],
}


def sampling_of(index: int, seed: int) -> SamplingParams:
    """Return the sampling parameters for the schema `index`; most have no special ones."""
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1200}
    match index % 10:
        case 0:
            options |= {"n": 2}
        case 1:
            options = {"max_tokens": 200, "beam_width": 2, "n": 1}
        case 2:
            options |= {"repetition_penalty": 1.1, "logprobs": 2}
        case 3:
            options |= {"ignore_eos": True, "min_tokens": 5}
        case 4:
            options |= {"top_k": 20, "logit_bias": {50: 20.0}}
        case 5:
            options |= {"temperature": 0.0}
    return SamplingParams(**options, seed=seed, structured_outputs={"json": SCHEMAS[index]["schema"]})


def faults(index: int, completion: Completion) -> list[str]:
    """Return what is wrong with the outputs for a schema."""
    title, schema, found = SCHEMAS[index]["title"], SCHEMAS[index]["schema"], []
    for output in completion.outputs:
        try:
            if output.finish_reason == "length":  # the beginning of a valid output
                matcher = COMPILER.compile("json_schema", json.dumps(schema), (0,))
                matcher.consume(output.token_ids)
            else:
                assert output.finish_reason == "stop"
                assert all(math.isfinite(value) for entry in output.logprobs or () for _, value in entry.top)
                jsonschema.validate(json.loads(output.text), schema)
        except (ValueError, AssertionError, jsonschema.ValidationError) as error:
            found.append(f"{title}: {output.finish_reason}: {output.text!r}: {error}")
    return found


def num_cut(completions: Iterable[Completion]) -> int:
    return sum(output.finish_reason == "length" for completion in completions for output in completion.outputs)


async def run_all(
    client: AsyncClient, keys: list[tuple[int, int]], ended: asyncio.Semaphore | None = None
) -> dict[tuple[int, int], Completion]:
    """Complete schemas, each with a seed. `ended` is released for each completed one."""
    places = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(index: int, seed: int) -> Completion:
        async with places:
            prompt = f"The card number {index} says: "
            completion = await client.complete(prompt, sampling_of(index, seed))
        if ended is not None:
            ended.release()
        return completion

    return dict(zip(keys, await asyncio.gather(*(run(*key) for key in keys)), strict=True))


def test_there_are_200_schemas_of_many_kinds() -> None:
    assert len(SCHEMAS) == 200 == len({row["title"] for row in SCHEMAS})
    for row in SCHEMAS:
        jsonschema.validators.validator_for(row["schema"]).check_schema(row["schema"])


def told(completion: Completion) -> list[tuple[Any, ...]]:
    return [(output.token_ids, output.text, output.finish_reason) for output in completion.outputs]


async def kill_now_and_then(
    system: System, client: AsyncClient, num_requests: int, num_kills: int, ended: asyncio.Semaphore
) -> None:
    """Kill the worker whenever another share of the requests has ended."""
    for number in range(num_kills):
        for _ in range(num_requests // (num_kills + 5)):
            await ended.acquire()
        await until_connected(client, True)
        system.worker.kill()
        await until_lost(client, number + 1)
        system.restart_worker()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("indexes", "num_kills"), [(range(1, 200, 7), 2), *thorough((range(200), 20))], ids=str)
async def test_schemas_give_valid_outputs_through_kills(indexes: range, num_kills: int) -> None:
    """The outputs equal a calm run's, though the worker dies repeatedly and its pool is small."""
    keys = [(index, SEEDS[index % len(SEEDS)]) for index in indexes]
    with running(STORYTELLER, worker=WORKER) as system:
        async with AsyncClient(system.url) as client:
            calm = await run_all(client, keys)
    with running(STORYTELLER, **SMALL_POOL) as system:
        async with AsyncClient(system.url) as client:
            ended = asyncio.Semaphore(0)
            killing = asyncio.create_task(kill_now_and_then(system, client, len(keys), num_kills, ended))
            disturbed = await run_all(client, keys, ended)
            await killing
            assert (await client.loads()).num_worker_losses == num_kills
    assert not [fault for (index, _), completion in disturbed.items() for fault in faults(index, completion)]
    assert num_cut(disturbed.values()) <= len(keys) // 10, "the most likely outputs of beams may go on and on"
    assert {key: told(completion) for key, completion in disturbed.items()} == {
        key: told(completion) for key, completion in calm.items()
    }


async def test_a_grammar_that_exceeds_a_limit_of_steps_ends_its_request_alone() -> None:
    """The grammar is valid, but ambiguous; it exceeds the limit only after several hundred tokens."""
    grammar = 'start: s "b"\ns: "a" s "a" | "a" s | s "a" | "a"'
    a = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json")).token_to_id("a")
    plain = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    bound = replace(plain, logit_bias={a: 100.0}, structured_outputs={"grammar": grammar})
    with running(STORYTELLER, worker=WORKER) as system:
        async with AsyncClient(system.url) as client:
            alone = await client.complete("Once", plain)
            both = client.complete("Once", bound), client.complete("Once", plain)
            failed, completion = await asyncio.gather(*both, return_exceptions=True)
            assert isinstance(failed, ResourceExhausted)
            assert "simplify the grammar" in str(failed)
            assert isinstance(completion, Completion)
            assert told(completion) == told(alone)
