"""Beam search over gRPC, compared with a reference that has no cache, blocks or steps."""

import asyncio
import math
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from pagewire.common.wire.messages import SamplingParams
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import BeamParams, EarlyStopping, Request
from testing.core.beam_oracle import Hypotheses, search
from testing.scheduler_stack import (
    EOS,
    VOCAB_SIZE,
    Result,
    details,
    expected_tokens,
    make_checkpoint,
    request,
    serve,
    status_of,
)
from testing.seeds import seeded
from testing.serving.failures import failure_of

PROMPT = [5, 6, 7, 8, 9, 10, 11]
EARLY_STOPPING = {
    None: EarlyStopping.HEURISTIC,
    scheduler_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    scheduler_pb2.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    scheduler_pb2.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    scheduler_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def expected_hypotheses(prompt: list[int], **sampling: object) -> Hypotheses:
    beam = BeamParams(
        beam_width=sampling["beam_width"],
        length_penalty=sampling.get("length_penalty", 1.0),
        early_stopping=EARLY_STOPPING[sampling.get("early_stopping")],
    )
    stop_token_ids = (*sampling.get("stop_token_ids", ()), EOS)
    params = SamplingParams(min_tokens=sampling.get("min_tokens", 0), stop_token_ids=stop_token_ids)
    n, max_tokens = sampling.get("n", 1), sampling["max_tokens"]
    return search(Request("", "", tuple(prompt), params, max_tokens, n=n, beam=beam), VOCAB_SIZE)


def check(result: Result, expected: Hypotheses, tokenizer: Tokenizer) -> None:
    assert sorted(result.last) == list(range(len(expected)))
    for index, (token_ids, cumulative_logprob, stop_token_id) in enumerate(expected):
        last = result.last[index]
        assert tuple(result.token_ids[index]) == token_ids
        assert last.cumulative_logprob == pytest.approx(cumulative_logprob, abs=1e-5)
        with_text = token_ids if stop_token_id is None else token_ids[:-1]
        assert result.texts[index] == tokenizer.decode(list(with_text))
        reason = scheduler_pb2.FINISH_REASON_LENGTH if stop_token_id is None else scheduler_pb2.FINISH_REASON_STOP
        assert last.finish_reason == reason
        assert last.HasField("stop_token_id") == (stop_token_id is not None)
        assert last.usage.prompt_tokens == len(PROMPT)


async def test_hypotheses_equal_the_reference_under_load(checkpoint: Path) -> None:
    seed = 5
    rng = seeded(seed)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    cases = []
    for index in range(24):
        sampling = {"beam_width": rng.choice([1, 2, 3, 4, 6]), "max_tokens": rng.choice([1, 2, 9, 30])}
        sampling["n"] = rng.randint(1, sampling["beam_width"])
        if rng.random() < 0.7:
            sampling["length_penalty"] = rng.choice([-1.0, 0.0, 0.5, 2.0])
            sampling["early_stopping"] = rng.choice([0, 1, 2, 3])
        if rng.random() < 0.5:
            # Every vocabulary entry is a likely continuation of some beam at some step.
            sampling["stop_token_ids"] = rng.sample(range(VOCAB_SIZE - 1), 12)
        if rng.random() < 0.2:
            sampling["min_tokens"] = 1
        cases.append(([index, *PROMPT[1:]], sampling))
    async with serve(checkpoint) as stack:
        other = asyncio.create_task(stack.generate(request([99, 98], max_tokens=200)))
        results = await asyncio.gather(*(stack.generate(request(prompt, **sampling)) for prompt, sampling in cases))
        for (prompt, sampling), result in zip(cases, results, strict=True):
            check(result, expected_hypotheses(prompt, **sampling), tokenizer)
        assert (await other).token_ids[0] == expected_tokens([99, 98], 200)
        await stack.until_idle()
    assert any(last.finish_reason == scheduler_pb2.FINISH_REASON_STOP for r in results for last in r.last.values())


async def test_the_checkpoints_own_sampling_does_not_count(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "warm", temperature=0.7, top_k=5, top_p=0.5, min_p=0.1)
    async with serve(path) as stack:
        sampling = {"beam_width": 3, "n": 3, "max_tokens": 8}
        result = await stack.generate(request(PROMPT, temperature=0, top_k=0, top_p=1, min_p=0, **sampling))
        check(result, expected_hypotheses(PROMPT, **sampling), Tokenizer.from_file(str(path / "tokenizer.json")))
        again = await stack.generate(request(PROMPT, **sampling))
        assert again.token_ids == result.token_ids


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"beam_width": 17}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"early_stopping": scheduler_pb2.EARLY_STOPPING_FIRST}, "early_stopping"),
        ({"beam_width": 2, "early_stopping": 9}, "early_stopping"),
        ({"beam_width": 2, "temperature": 1.0}, "temperature"),
        ({"beam_width": 2, "top_k": 3}, "top_k"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs"),
        ({"beam_width": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"beam_width": 2, "stop": ["x"]}, "stop"),
    ],
)
async def test_what_beam_search_does_not_take(checkpoint: Path, sampling: dict[str, object], field: str) -> None:
    async with serve(checkpoint) as stack:
        running = asyncio.create_task(stack.generate(request(PROMPT, max_tokens=40)))
        error = await failure_of(
            stack.generate(request(PROMPT, max_tokens=4, **sampling)), grpc.StatusCode.INVALID_ARGUMENT
        )
        assert details(error)[0].field_violations[0].field == f"sampling.{field}"
        assert field in error.details()
        assert (await running).token_ids[0] == expected_tokens(PROMPT, 40)


async def test_more_beams_than_rows(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=4) as stack:
        error = await failure_of(
            stack.generate(request(PROMPT, max_tokens=4, beam_width=5)), grpc.StatusCode.INVALID_ARGUMENT
        )
        assert details(error)[0].field_violations[0].field == "sampling.beam_width"
        assert await status_of(stack, request(PROMPT, max_tokens=4, beam_width=4)) is None


async def test_an_aborted_search_ends_all_its_samples(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.01
        message = request(PROMPT, beam_width=3, n=2)
        message.request_id = "mine"
        running = asyncio.create_task(stack.generate(message))
        await stack.until(lambda loads: loads.num_running > 1)
        await stack.stub.Abort(scheduler_pb2.AbortRequest(request_id="mine"))
        result = await running
        assert [last.finish_reason for last in result.last.values()] == [scheduler_pb2.FINISH_REASON_ABORT] * 2
        for index, last in result.last.items():
            assert last.HasField("cumulative_logprob")
            assert last.usage.completion_tokens == len(result.token_ids[index])
        await stack.until_idle()
