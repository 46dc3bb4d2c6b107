"""Clients that read detached requests while their connections break."""

import asyncio
from pathlib import Path

import pytest

import pagewire
from pagewire import AsyncClient, Output, SamplingParams
from pagewire.client import client as client_module
from pagewire.client.completion import Attachment, TokenLogprobs, Usage
from testing.scheduler_stack import VOCAB_SIZE, expected_tokens, serve
from tests.contract.cut_proxy import proxied

PROMPT = [5, 6, 7, 8, 9]


async def test_nothing_is_lost_or_repeated_when_connections_break(checkpoint: Path) -> None:
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=150, n=3, logprobs=0, prompt_logprobs=0)
    async with (
        proxied(checkpoint) as (stack, proxy),
        AsyncClient(stack.url) as direct,
        AsyncClient(proxy.url) as client,
    ):
        stack.worker.step_seconds = 0.005
        request_id = await direct.submit(None, sampling, prompt_token_ids=PROMPT)
        outputs: list[Output] = []
        num_cuts = 0
        async for output in client.attach(request_id):
            outputs.append(output)
            num_tokens = sum(len(each.token_ids) for each in outputs)
            if num_tokens > 40 * (num_cuts + 1) and num_cuts < 8:
                num_cuts += 1
                proxy.cut()
        result = await direct.result(request_id)
    assert num_cuts == 8
    assert proxy.num_connections > 4
    assert result.state == "finished"
    for index, whole in enumerate(result.outputs):
        parts = [output for output in outputs if output.index == index]
        tokens = [token for output in parts for token in output.token_ids]
        assert tokens == expected_tokens(PROMPT, 150, sample_index=index)
        assert "".join(output.text for output in parts) == whole.text
        assert [output.finish_reason for output in parts if output.finish_reason] == ["length"]
        assert [entry for output in parts for entry in output.logprobs or ()] == list(whole.logprobs or ())
        assert parts[-1].usage == whole.usage
    prompt_logprobs = [entry.token_id for output in outputs for entry in output.prompt_logprobs or ()]
    assert prompt_logprobs == PROMPT[1:]


@pytest.mark.parametrize("max_reconnects", [0, 3])
async def test_attempts_are_bounded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, max_reconnects: int) -> None:
    monkeypatch.setattr(client_module, "DELAYS_S", (0.01, 0.02))
    async with (
        proxied(checkpoint) as (stack, proxy),
        AsyncClient(stack.url) as direct,
        AsyncClient(proxy.url) as client,
    ):
        stack.worker.step_seconds = 0.01
        request_id = await direct.submit(None, SamplingParams(max_tokens=200), prompt_token_ids=PROMPT)
        outputs = client.attach(request_id, max_reconnects=max_reconnects)
        assert (await anext(outputs)).first_token == 0
        proxy.is_open = False
        proxy.cut()
        with pytest.raises(pagewire.Unavailable):
            [output async for output in outputs]
        await direct.abort(request_id)


async def test_what_the_server_says_is_not_tried_again(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        request_id = await client.submit(None, SamplingParams(max_tokens=20), prompt_token_ids=[1, VOCAB_SIZE - 1, 2])
        with pytest.raises(pagewire.InternalError, match="not numbers"):
            [output async for output in client.attach(request_id)]
        result = await client.result(request_id)
        assert result.state == "failed"
        assert isinstance(result.error, pagewire.InternalError)
        with pytest.raises(pagewire.NotFound):
            [output async for output in client.attach("unknown")]
        with pytest.raises(pagewire.NotFound):
            await client.result("unknown")
        with pytest.raises(pagewire.NotFound):
            await client.get_request("unknown")
        request_id = await client.submit(None, SamplingParams(max_tokens=5), prompt_token_ids=PROMPT)
        with pytest.raises(pagewire.OutOfRange, match="tokens"):
            [output async for output in client.attach(request_id, from_token=6)]
        assert [output async for output in client.attach(request_id)][-1].finish_reason == "length"
        with pytest.raises(pagewire.AlreadyExists):
            await client.submit(None, SamplingParams(max_tokens=5), prompt_token_ids=PROMPT, request_id=request_id)


async def test_a_server_that_shuts_down_says_so_at_once(checkpoint: Path) -> None:
    async with serve(checkpoint, drain_timeout=0.2) as stack, AsyncClient(stack.url) as client:
        stack.worker.step_seconds = 0.05
        request_id = await client.submit(None, SamplingParams(max_tokens=200), prompt_token_ids=PROMPT)
        reading = asyncio.create_task(_read_all(client, request_id))
        await stack.until(lambda loads: loads.num_generation_tokens > 1)
        stack.stop.set()
        with pytest.raises(pagewire.Unavailable, match="shut down"):
            await asyncio.wait_for(reading, 5)


async def _read_all(client: AsyncClient, request_id: str) -> list[Output]:
    return [output async for output in client.attach(request_id)]


# The new part of a delta


def output(index: int, first_token: int, token_ids: tuple[int, ...], *, last: bool = False, **fields: object) -> Output:
    values = {
        "request_id": "id",
        "index": index,
        "token_ids": token_ids,
        "text": "",
        "finish_reason": "length" if last else None,
        "logprobs": None,
        "cumulative_logprob": None,
        "prompt_logprobs": None,
        "usage": Usage(1, 0, first_token + len(token_ids)) if last else None,
        "first_token": first_token,
        "stop_reason": None,
    }
    return Output(**(values | fields))


def test_each_sample_goes_on_from_its_own_token() -> None:
    attachment = Attachment(2)
    assert list(attachment.reconnect()) == []
    deltas = [output(0, 2, (1, 2)), output(2, 2, (1,)), output(0, 4, (3,), last=True)]
    assert [attachment.take(delta) for delta in deltas] == deltas
    assert list(attachment.reconnect()) == [5, 2, 3]
    assert attachment.take(output(0, 5, (), last=True)) is None
    for rest in (output(1, 2, (7,), last=True), output(2, 3, (), last=True)):
        assert attachment.take(rest) is rest
    attachment.finish()


@pytest.mark.parametrize(
    ("deltas", "text"),
    [
        ([output(0, 1, (5,))], "token 1 where 0 is next"),
        ([output(0, 0, (5,)), output(0, 0, (5,))], "token 0 where 1 is next"),
        ([output(0, 0, (5,), last=True), output(0, 1, (5,))], "after its end"),
    ],
)
def test_a_broken_stream_is_an_error(deltas: list[Output], text: str) -> None:
    attachment = Attachment(0)
    for delta in deltas[:-1]:
        attachment.take(delta)
    with pytest.raises(pagewire.InternalError, match=text):
        attachment.take(deltas[-1])


@pytest.mark.parametrize("deltas", [[], [output(0, 0, (5,))], [output(1, 0, (5,), last=True)]])
def test_a_stream_without_its_end_is_an_error(deltas: list[Output]) -> None:
    attachment = Attachment(0)
    for delta in deltas:
        attachment.take(delta)
    with pytest.raises(pagewire.InternalError, match="ended before"):
        attachment.finish()


def test_prompt_logprobs_come_once() -> None:
    entries = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in range(10))
    attachment = Attachment(0)
    received: list[TokenLogprobs] = []
    for connection in ((entries[:4],), (entries[:3], entries[3:6]), (entries,)):
        attachment.reconnect()
        for part in connection:
            new = attachment.take(output(0, 0, (), prompt_logprobs=part))
            received += () if new is None else new.prompt_logprobs
    assert received == list(entries)
