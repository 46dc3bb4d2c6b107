"""The Generate RPC without failures."""

import asyncio
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.grpc import generate_response
from testing.scheduler_stack import Result, Stack, expected_tokens, make_checkpoint, request, serve
from testing.serving.failures import failure_of
from tests.contract import vllm_client

PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def test_tokens_text_and_usage(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    async with serve(checkpoint) as stack:
        result = await stack.generate(request("once upon a time", max_tokens=40, seed=3))
        prompt = tokenizer.encode("once upon a time").ids
        tokens = expected_tokens(prompt, 40, seed=3)
        assert result.token_ids[0] == tokens
        assert result.texts[0] == tokenizer.decode(tokens)
        last = result.last[0]
        assert last.finish_reason == scheduler_pb2.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (len(prompt), 0)
        again = await stack.generate(request("once upon a time", max_tokens=40, seed=3))
        assert again.token_ids[0] == tokens
        assert again.last[0].usage.cached_tokens == (len(prompt) - 1) // 4 * 4


async def test_many_streams_at_once(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        requests = [request([seed, *PROMPT], max_tokens=30 + seed, seed=seed, n=1 + seed % 3) for seed in range(40)]
        results = await asyncio.gather(*(stack.generate(each) for each in requests))
        for seed, result in enumerate(results):
            for index in range(1 + seed % 3):
                expected = expected_tokens([seed, *PROMPT], 30 + seed, seed=seed, sample_index=index)
                assert result.token_ids[index] == expected
        loads = await stack.until_idle()
        assert loads.num_generation_tokens == sum((30 + seed) * (1 + seed % 3) for seed in range(40))


async def test_an_earlier_deadline_goes_first_where_deadlines_count(checkpoint: Path) -> None:
    for policy, first_prompts in (("deadline", [3, 2, 1]), ("priority", [1, 2, 3])):
        order: list[int] = []
        async with serve(checkpoint, policy=policy, max_num_seqs=1) as stack:
            stack.worker.step_seconds = 0.002

            async def generate(first: int, stack: Stack = stack, order: list[int] = order, **call: float) -> None:
                await stack.generate(request([first, *PROMPT], max_tokens=5), **call)
                order.append(first)

            running = asyncio.create_task(stack.generate(request(PROMPT, max_tokens=100)))
            await stack.until(lambda loads: loads.num_running == 1)
            waiting = []
            for num_waiting, (first, call) in enumerate([(1, {}), (2, {"timeout": 40.0}), (3, {"timeout": 20.0})], 1):
                waiting.append(asyncio.create_task(generate(first, **call)))
                await stack.until(lambda loads, num=num_waiting: loads.num_waiting == num)
            await asyncio.gather(running, *waiting)
        assert order == first_prompts


async def test_a_burst_of_calls_is_served_whole(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        requests = [request([seed % 200, 7], max_tokens=2, seed=seed) for seed in range(2000)]
        results = await asyncio.gather(*(stack.generate(each) for each in requests))
        for seed, result in enumerate(results):
            assert result.token_ids[0] == expected_tokens([seed % 200, 7], 2, seed=seed)


async def test_unset_max_tokens_fills_what_fits(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        result = await stack.generate(request(PROMPT))
        assert len(result.token_ids[0]) == 256 - len(PROMPT)


async def test_stop_token_ends_the_output(checkpoint: Path) -> None:
    tokens = expected_tokens(PROMPT, 60)
    stop = next(token for i, token in enumerate(tokens) if i > 5 and token not in tokens[:i])
    end = tokens.index(stop) + 1
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    async with serve(checkpoint) as stack:
        result = await stack.generate(request(PROMPT, max_tokens=60, stop_token_ids=[stop]))
        assert result.token_ids[0] == tokens[:end]
        assert result.last[0].finish_reason == scheduler_pb2.FINISH_REASON_STOP
        assert result.last[0].stop_token_id == stop
        assert result.texts[0] == tokenizer.decode(tokens[: end - 1])


async def test_stop_text_ends_the_output_and_is_cut_off(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = expected_tokens(PROMPT, 100)
    text = tokenizer.decode(tokens)
    position = next(
        i for i in range(20, len(text)) if "\ufffd" not in text[i : i + 3] and text.find(text[i : i + 3]) == i
    )
    stop = text[position : position + 3]
    async with serve(checkpoint) as stack:
        result = await stack.generate(request(PROMPT, max_tokens=100, stop=["never seen", stop]))
        kept = await stack.generate(request(PROMPT, max_tokens=100, stop=[stop], include_stop_str_in_output=True))
        await stack.until_idle()
    assert result.texts[0] == text[:position]
    assert kept.texts[0] == text[: position + 3]
    assert result.last[0].stop_text == stop
    num_tokens = len(result.token_ids[0])
    assert result.token_ids[0] == tokens[:num_tokens]
    assert stop in tokenizer.decode(tokens[:num_tokens])
    assert stop not in tokenizer.decode(tokens[: num_tokens - 1])


async def test_stop_text_ends_a_sequence_that_is_not_read(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = tokenizer.decode(expected_tokens(PROMPT, 100))
    position = next(i for i in range(30, len(text)) if text[i] != "\ufffd" and text.find(text[i]) == i)
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        call = stack.stub.Generate(request(PROMPT, max_tokens=240, stop=[text[position]]))
        await stack.until(lambda loads: loads.num_generation_tokens > 0)
        loads = await stack.until_idle()
        assert loads.num_generation_tokens < 240
        result = Result()
        async for response in call:
            result.add(response)
        assert result.texts[0] == text[:position]


async def test_logprobs(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        result = await stack.generate(request(PROMPT, max_tokens=9, logprobs=3, prompt_logprobs=2, n=2))
        for index in (0, 1):
            entries = [entry for response in result.responses if response.index == index for entry in response.logprobs]
            assert [entry.token_id for entry in entries] == result.token_ids[index]
            assert all(len(entry.top) == 3 and entry.rank == 1 for entry in entries)
            assert result.last[index].cumulative_logprob == sum(entry.logprob for entry in entries)
        prompt_entries = [
            (response.index, entry) for response in result.responses for entry in response.prompt_logprobs
        ]
        assert [entry.token_id for _, entry in prompt_entries] == PROMPT[1:]
        assert all(index == 0 and len(entry.top) == 2 for index, entry in prompt_entries)
        assert not any(response.token_ids for response in result.responses if response.prompt_logprobs)


async def test_a_slow_reader_gets_longer_deltas(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        call = stack.stub.Generate(request(PROMPT, max_tokens=200, logprobs=20))
        await stack.until(lambda loads: loads.num_generation_tokens == 200)
        result = Result()
        async for response in call:
            result.add(response)
        assert result.token_ids[0] == expected_tokens(PROMPT, 200)


async def test_a_checkpoint_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    async with serve(make_checkpoint(tmp_path / "bare", with_tokenizer=False)) as stack:
        result = await stack.generate(request(PROMPT, max_tokens=5))
        assert result.token_ids[0] == expected_tokens(PROMPT, 5)
        assert result.texts[0] == ""
        for bad, field in ((request("text"), "text"), (request(PROMPT, stop=["x"]), "sampling.stop")):
            refused = await failure_of(stack.generate(bad), grpc.StatusCode.INVALID_ARGUMENT)
            assert field in str(refused.trailing_metadata())


async def test_generation_config_gives_end_tokens_and_defaults(tmp_path: Path) -> None:
    tokens = expected_tokens(PROMPT, 30)
    end = next(i for i in range(4, 30) if tokens[i] not in tokens[:i])
    checkpoint = make_checkpoint(tmp_path / "ends", eos_token_id=[tokens[end], 1], temperature=0.5)
    async with serve(checkpoint) as stack:
        info = await stack.stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest())
        assert list(info.eos_token_ids) == sorted([tokens[end], 1])
        assert info.served_model_name == "ends"
        assert info.worker.block_size == 4
        result = await stack.generate(request(PROMPT, max_tokens=30))
        assert result.token_ids[0] == tokens[: end + 1]
        assert result.last[0].stop_token_id == tokens[end]
        ignoring = await stack.generate(request(PROMPT, max_tokens=30, ignore_eos=True))
        assert ignoring.token_ids[0] == tokens


async def test_a_request_that_waits_long_shows_a_sign_of_life(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends headers before the first token, so that proxies see a response. A request that fails early has
    none.
    """
    monkeypatch.setattr(generate_response, "SILENCE_S", 0.05)
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 3600.0
        calls = [
            stack.stub.Generate(request(PROMPT, max_tokens=2)),
            vllm_client.stub_of(stack).Generate(vllm_client.request(PROMPT, stream=True, max_tokens=2)),
        ]
        for call in calls:
            await asyncio.wait_for(call.initial_metadata(), 20)
            assert not call.done()
            call.cancel()


async def test_a_request_that_is_answered_soon_has_its_headers_with_the_answer(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        result = await stack.generate(request(PROMPT, max_tokens=2))
        assert result.token_ids[0] == expected_tokens(PROMPT, 2)
