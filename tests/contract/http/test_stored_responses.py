"""Responses that are stored, continued, or run in the background, through OpenAI's client and any server."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest
from openai.types.responses import Response, ResponseItemList

from pagewire.common.wire.messages import RowStatus
from pagewire.common.wire.transport.message_size import MAX_MESSAGE_BYTES
from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.http.responses import stored_responses
from testing.serving.front_end import DEADLINE, serve_front_end
from testing.serving.http_server import HttpServer, serve_http
from testing.serving.tenants import KEYS, key_file, write_tenants
from tests.contract.detached import until as until_closed
from tests.contract.http.response_items import PATH, TOOLS, items
from tests.contract.http.scripted import CALL, WEATHER, Say, make_tool_checkpoint

THOUGHT = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
LONG = "x" * 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")


@asynccontextmanager
async def another_front_end(server: HttpServer, model: Path, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """Start another front end of the same scheduler."""
    port = free_port("127.0.0.1")
    async with (
        serve_front_end(model, server.stack.url, http_port=port, **options),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY", max_retries=0) as client,
    ):
        yield client


async def create(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    return await client.responses.create(**{"model": "chatty", "input": "hi"} | asked)


async def until(client: openai.AsyncOpenAI, response_id: str, *statuses: str) -> Response:
    async with asyncio.timeout(DEADLINE):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status in statuses:
                return response
            await asyncio.sleep(0.01)  # a client that polls has no event to wait for


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Response:
    response = await until(client, response_id, "completed", "incomplete", "failed", "cancelled")
    Response.model_validate(response.model_dump(warnings="error", by_alias=True))
    return response


async def until_expired(client: openai.AsyncOpenAI, response_id: str) -> None:
    with pytest.raises(openai.NotFoundError):
        await until(client, response_id, "none")


async def unknown(client: openai.AsyncOpenAI, response_id: str) -> str:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(response_id)
    assert caught.value.param == "response_id"
    return caught.value.message.replace(response_id, "ID")


# Storing


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_is_kept_before_its_client_knows(
    server: HttpServer, model: Path, say: Say, is_streamed: bool
) -> None:
    say(THOUGHT)
    async with another_front_end(server, model) as other:
        asked = {"tools": TOOLS, "metadata": {"a": "b"}, "instructions": "be kind", "stream": is_streamed}
        created = await create(server.openai, **asked)
        if is_streamed:
            async for event in created:
                if event.type == "response.completed":  # while the stream is still open
                    created = event.response
                    assert (await other.responses.retrieve(created.id)).output == created.output
        assert (created.store, created.background, created.previous_response_id) == (True, False, None)
        assert [item.type for item in created.output] == ["reasoning", "message", "function_call"]
        for client in (server.openai, other):
            assert await client.responses.retrieve(created.id) == created
        assert await unknown(server.openai, created.id.removeprefix("resp_"))


async def test_ids_of_items_are_the_responses(server: HttpServer, say: Say) -> None:
    say(THOUGHT)
    response = await create(server.openai, tools=TOOLS, extra_body={"request_id": "mine"})
    assert response.id == "resp_mine"
    assert [item.id for item in response.output] == ["rs_mine_0", "msg_mine_1", "fc_mine_2"]
    assert response.output[2].call_id == "call_mine_2"
    with pytest.raises(openai.ConflictError):
        await create(server.openai, extra_body={"request_id": "mine"})
    await server.openai.responses.delete(response.id)
    await create(server.openai, extra_body={"request_id": "mine"})


async def test_items_may_be_named(
    server: HttpServer, model: Path, say: Say, rendered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items of stored responses can be sent by id, as the AI SDK does in a loop of tool calls.

    Any server resolves the ids.
    """
    say(THOUGHT)
    first = await create(server.openai, tools=TOOLS, extra_body={"request_id": "a_1"})
    result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "5 degrees"}
    listed = (await server.openai.responses.input_items.list(first.id)).data
    whole = [item.model_dump() for item in (*listed, *first.output)]
    named = [{"type": "item_reference", "id": item["id"]} for item in whole]
    second = await create(server.openai, input=[*whole, result], tools=TOOLS)
    async with another_front_end(server, model) as other:
        third = await create(other, input=[*named, result], tools=TOOLS)
    assert rendered[-1] == rendered[-2]
    assert (third.usage.input_tokens, items(third)) == (second.usage.input_tokens, items(second))
    both = [{"type": "item_reference", "id": response.output[0].id} for response in (first, third)]
    await create(server.openai, input=[*both, {"role": "user", "content": "hi"}])
    assert [message.get("reasoning_content") for message in rendered[-1]] == ["hm", "hm", None]
    for unknown_id in ("rs_a_1_7", "msg_other_0", "x", "", None):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(server.openai, input=[{"type": "item_reference", "id": unknown_id}])
        assert (caught.value.param, "send the item itself" in caught.value.message) == ("input", True)
    monkeypatch.setattr(stored_responses, "_MAX_NAMED", 1)
    with pytest.raises(openai.BadRequestError, match="items of 2 responses, at most 1 are allowed"):
        await create(server.openai, input=both)


@pytest.mark.parametrize("seed", range(2))
async def test_ids_may_have_any_characters(server: HttpServer, say: Say, seed: int) -> None:
    say("hello")
    drawn = random.Random(seed)
    pieces = [
        "/",
        "//",
        "/cancel",
        "/input_items",
        "%",
        "%2F",
        "%25",
        "..",
        ".",
        "?stream=true",
        "#",
        "&",
        "+",
        " ",
        "a",
    ]
    pieces += ["\n", "\0", "ü", "é", "𝄞", "\\", "{", ":path", ";", "=", '"', "\x7f"]
    names = {"/cancel", "/input_items", "a/cancel/input_items", "..", "%2Fcancel", "a\n"}
    names |= {"".join(drawn.choices(pieces, k=drawn.randint(1, 6))) for _ in range(10)}
    responses = server.openai.responses
    kept = [await create(server.openai, extra_body={"request_id": name}) for name in names]
    server.stack.worker.step_seconds = 0.05
    for name, created in zip(names, kept, strict=True):
        response_id = f"resp_{name}"
        assert created.id == response_id
        assert await responses.retrieve(response_id) == created
        assert [item.id async for item in await responses.input_items.list(response_id)] == [f"msg_{name}_input_0"]
        for verb in (responses.cancel, partial(responses.retrieve, stream=True)):  # for background responses only
            with pytest.raises(openai.BadRequestError, match="was not made in background"):
                await verb(response_id)
        detached = f"/v1/requests/{quote('d' + name, safe='')}"
        asked = {"prompt": "x", "detached": True, "request_id": f"d{name}", "ignore_eos": True, "max_tokens": 200}
        assert (await server.post("/v1/completions", **asked)).json()["request_id"] == f"d{name}"
        for method in ("GET", "DELETE"):
            assert (await server.client.request(method, detached)).json()["request_id"] == f"d{name}"
    for created in kept:
        await responses.delete(created.id)
        assert await unknown(server.openai, created.id)


async def test_unstored_responses_look_unknown(model: Path, say: Say) -> None:
    say("hello")
    async with serve_http(model) as server:
        never = await unknown(server.openai, "resp_never")
        forgotten = await create(server.openai)
        await server.openai.responses.delete(forgotten.id)
        unkept = await create(server.openai, store=False)
        assert unkept.store is False
        # A stored request that is not a response.
        completion = await server.post("/v1/completions", prompt="x", detached=True, request_id="completion")
        assert completion.status_code == 200
        record = pb.KeepRecordRequest(request_id="record", record=b'{"input": []}')
        await server.stack.stub.KeepRecord(record)
        # A record of a background response, without its request.
        background = await create(server.openai, background=True, extra_body={"request_id": "background"})
        found = await server.stack.stub.GetResult(pb.GetResultRequest(request_id="background"))
        await server.stack.stub.KeepRecord(pb.KeepRecordRequest(request_id="copy", record=found.record))
        assert (await ended(server.openai, background.id)).status == "completed"
        never_made = ("resp_completion", "completion", "resp_record", "resp_copy", "resp_", "a/b")
        for name in (forgotten.id, unkept.id, *never_made):
            assert await unknown(server.openai, name) == never
        for name in (forgotten.id, "resp_never", "never"):  # status and code equal OpenAI's
            with pytest.raises(openai.BadRequestError) as caught:
                await create(server.openai, previous_response_id=name)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        for method, path in (("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("GET", "?stream=true")):
            response = await server.client.request(method, f"{PATH}/{forgotten.id}{path}")
            assert (response.status_code, response.json()["error"]["param"]) == (404, "response_id")
    async with serve_http(model, detached_retention=0.1) as server:
        expired = await create(server.openai)
        await until_expired(server.openai, expired.id)
        assert await unknown(server.openai, expired.id) == never


async def test_a_response_that_was_waited_for_is_no_detached_request(server: HttpServer, say: Say) -> None:
    say("hello")
    never = await server.client.get("/v1/requests/mine")
    await create(server.openai, extra_body={"request_id": "mine"})
    for query in ("", "?stream=true"):
        response = await server.client.get(f"/v1/requests/mine{query}")
        assert (response.status_code, response.json()) == (404, never.json())
    assert await server.openai.responses.retrieve("resp_mine")


async def test_a_response_that_is_too_large_is_refused_before_it_is_made(server: HttpServer) -> None:
    reasoning = {"type": "reasoning", "encrypted_content": "x" * (MAX_MESSAGE_BYTES - 1500)}
    large = {"input": [reasoning, {"role": "user", "content": "hi"}]}
    num_steps = server.stack.worker.num_steps
    for body in (large, large | {"background": True}):
        error = await server.refusal(PATH, **body)
        assert error["param"] == "store"
        assert error["message"].endswith("store: false without background" if "background" in body else "store: false")
    assert server.stack.worker.num_steps == num_steps
    assert (await server.post(PATH, store=False, **large)).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_large", [False, True], ids=["taken", "large"])
async def test_a_response_that_cannot_be_kept_is_not_lost(
    server: HttpServer, say: Say, monkeypatch: Any, caplog: pytest.LogCaptureFixture, is_streamed: bool, is_large: bool
) -> None:
    """A response is returned even if it cannot be stored.

    This failure is only detected after the response was computed.
    """
    say(LONG)
    kept = await create(server.openai, extra_body={"request_id": "first"})
    record = (await server.stack.stub.GetResult(pb.GetResultRequest(request_id="first"))).record
    if is_large:
        monkeypatch.setattr(stored_responses, "_RECORD_BYTES", len(record) - 1)
    server.stack.worker.step_seconds = 0.05
    creating = asyncio.create_task(
        _last_of(create(server.openai, stream=is_streamed, extra_body={"request_id": "other"}))
    )
    await server.stack.until(lambda loads: loads.num_running == 1)
    if not is_large:
        await server.stack.stub.KeepRecord(pb.KeepRecordRequest(request_id="other", record=b"{}"))
    server.stack.worker.step_seconds = 0
    response = await creating
    assert (response.store, response.status, items(response)) == (False, "completed", items(kept))
    assert await unknown(server.openai, response.id)
    [logged] = [each for each in caplog.records if each.name == stored_responses.__name__]
    assert "'other' was returned, but not stored: " in logged.getMessage()


async def _last_of(creating: Awaitable[Any]) -> Response:
    """Return the response, or the response of the stream's last event."""
    created = await creating
    return created if isinstance(created, Response) else [event async for event in created][-1].response


@pytest.mark.parametrize(
    "metadata",
    [{str(i): "" for i in range(17)}, {"x" * 65: ""}, {"a": "x" * 513}, {"a": 1}],
    ids=["17", "65", "513", "1"],
)
async def test_metadata_is_small(server: HttpServer, say: Say, metadata: dict[str, Any]) -> None:
    assert (await server.refusal(PATH, input="hi", metadata=metadata))["param"].startswith("metadata")
    say("hello")
    largest = {f"{i:064}": "ü" * 512 for i in range(16)}
    assert (await create(server.openai, metadata=largest)).metadata == largest


async def test_input_items_come_in_pages(server: HttpServer, say: Say) -> None:
    say("hello")
    given = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "id": "fc_own", "call_id": "1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
    ]
    first = await create(server.openai, input=given, extra_body={"request_id": "first"})
    second = await create(server.openai, previous_response_id=first.id, extra_body={"request_id": "second"})
    expected = ["msg_first_input_0", "msg_first_input_1", "fc_own", "fco_first_input_3", "msg_first_0"]
    expected.append("msg_second_input_0")
    listed = server.openai.responses.input_items.list
    page = await listed(second.id, order="asc")
    assert [item.id for item in page.data] == expected
    ResponseItemList.model_validate(
        {"object": "list", "first_id": "1", "last_id": "1", **page.model_dump(warnings="error")}
    )
    assert [getattr(item, "content", None) and item.content[0].text for item in page.data] == [
        *("a", "b", None, None, "hello", "hi")
    ]
    assert [item.id for item in (await listed(second.id)).data] == expected[::-1]
    assert [item.id async for item in await listed(second.id, limit=1)] == expected[::-1]
    assert [item.id for item in (await listed(second.id, after="fc_own", order="asc", limit=2)).data] == expected[3:5]
    for query, param in ({"after": "x"}, "after"), ({"limit": 0}, "limit"), ({"order": "up"}, "order"):
        response = await server.client.get(f"{PATH}/{second.id}/input_items", params=query)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# Continuing


async def test_a_conversation_goes_on(server: HttpServer, model: Path, say: Say, rendered: list[Any]) -> None:
    async with another_front_end(server, model) as other:
        say(THOUGHT)
        first = await create(server.openai, tools=TOOLS, instructions="be kind")
        call = first.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        say("hello")
        second = await create(other, input=[output], previous_response_id=first.id, tools=TOOLS)
        assert (second.previous_response_id, items(second)) == (first.id, [("message", "hello")])
        third = await create(server.openai, input="and now?", previous_response_id=second.id, store=False)
        assert third.previous_response_id == second.id
        # The same conversation, as a client would send it in full.
        spelled = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), output]
        spelled += [*(item.to_dict() for item in second.output), {"role": "user", "content": "and now?"}]
        await create(server.openai, input=spelled, store=False)
        assert rendered[2] == rendered[3]
        assert [message["role"] for message in rendered[2]] == ["user", "assistant", "tool", "assistant", "user"]
        assert rendered[2][1]["reasoning_content"] == "hm"
        # A fork of the conversation.
        again = await create(server.openai, input=[output], previous_response_id=first.id, tools=TOOLS)
        assert items(again) == items(second)


async def test_the_prefix_of_a_conversation_is_cached(server: HttpServer, say: Say) -> None:
    say("hello")
    first = await create(server.openai, input="once upon a time there was a little hello world")
    assert first.usage.input_tokens_details.cached_tokens == 0
    for _ in range(2):
        second = await create(server.openai, input="go on", previous_response_id=first.id)
        usage = second.usage
        assert usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 4 * 4  # the block size is 4
        first = second


async def test_only_what_has_ended_well_is_gone_on_with(server: HttpServer, say: Say) -> None:
    say(LONG)
    server.stack.worker.step_seconds = 0.05
    running = await create(server.openai, background=True)
    error = await server.refusal(PATH, input="x", previous_response_id=running.id)
    assert (error["param"], error["code"]) == ("previous_response_id", None)
    assert "queued" in error["message"] or "in_progress" in error["message"]
    await server.openai.responses.cancel(running.id)
    error = await server.refusal(PATH, input="x", previous_response_id=running.id)
    assert "cancelled" in error["message"]
    server.stack.worker.step_seconds = 0
    cut = await create(server.openai, background=True, max_output_tokens=3)
    assert (await ended(server.openai, cut.id)).status == "incomplete"
    await create(server.openai, previous_response_id=cut.id, max_output_tokens=3)


# In the background


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("hello", {}),
        (THOUGHT, {"tools": TOOLS}),
        (THOUGHT, {"tools": TOOLS, "max_output_tokens": 30}),
        ("", {}),
    ],
    ids=str,
)
async def test_background_and_foreground_responses_are_equal(
    server: HttpServer, model: Path, say: Say, text: str, asked: dict[str, Any]
) -> None:
    say(text)
    waited_for = await create(server.openai, **asked)
    async with another_front_end(server, model) as other:
        begun = await create(server.openai, background=True, **asked)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        response = await ended(other, begun.id)
        assert (items(response), response.status) == (items(waited_for), waited_for.status)
        assert response.usage.total_tokens == waited_for.usage.total_tokens
        assert response.incomplete_details == waited_for.incomplete_details
        assert await server.openai.responses.retrieve(begun.id) == response
        for client in (server.openai, other):
            events = [event async for event in await client.responses.retrieve(begun.id, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = ["response.created", "response.queued", "response.in_progress"]
            assert [event.type for event in events[:3]] == kinds
            assert events[-1].type == f"response.{response.status}"
            assert events[-1].response == response
            added = [event.item.id for event in events if event.type == "response.output_item.added"]
            assert added == [item.id for item in response.output]


async def test_a_response_in_background_is_streamed_and_outlives_its_reader(
    server: HttpServer, say: Say, open_attachments: list[object]
) -> None:
    say(LONG)
    server.stack.worker.step_seconds = 0.05
    async with await create(server.openai, background=True, stream=True) as stream:
        async for event in stream:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
    await until_closed(lambda: not open_attachments)
    assert (await server.openai.responses.retrieve(response_id)).status == "in_progress"
    server.stack.worker.step_seconds = 0
    events = [event async for event in await server.openai.responses.retrieve(response_id, stream=True)]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    response = await ended(server.openai, response_id)
    assert text == response.output_text == LONG


async def test_nothing_in_background_has_a_timeout(server: HttpServer) -> None:
    for path, asked in (
        (PATH, {"input": "hi", "background": True}),
        ("/v1/completions", {"prompt": "x", "detached": True}),
    ):
        error = await server.refusal(path, timeout=60, **asked)
        assert (error["param"], "timeout has no effect" in error["message"]) == ("timeout", True)


async def test_what_an_output_must_match_holds_in_background(server: HttpServer, say: Say) -> None:
    say('{"city": "Oslo"}')
    worker = server.stack.worker
    for asked in ({"text": {"format": {"type": "json_schema", "name": "x", "schema": WEATHER}}}, {"tools": TOOLS}):
        begun = await create(server.openai, background=True, **asked)
        assert (await ended(server.openai, begun.id)).output_text == '{"city": "Oslo"}'
        in_background = {grammar.text for grammar in worker.grammars}
        await create(server.openai, **asked)
        assert {grammar.text for grammar in worker.grammars} == in_background != set()
        assert 0 not in worker.opened_grammar_ids[-2:]
        worker.grammars.clear()


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_response_in_background_is_cancelled(model: Path, say: Say, is_waiting: bool) -> None:
    async with serve_http(model, max_num_seqs=1) as server, another_front_end(server, model) as other:
        say(LONG)
        server.stack.worker.step_seconds = 0.05
        begun = [await create(server.openai, background=True) for _ in range(2)][is_waiting]
        if not is_waiting:
            await until(other, begun.id, "in_progress")
        cancelled = await other.responses.cancel(begun.id)
        assert cancelled.status == "cancelled"
        Response.model_validate(cancelled.model_dump(warnings="error"))
        assert [item.status for item in cancelled.output] == ([] if is_waiting else ["incomplete"])
        for client in (server.openai, other):
            assert await client.responses.retrieve(begun.id) == cancelled
            assert await client.responses.cancel(begun.id) == cancelled
        events = [event async for event in await server.openai.responses.retrieve(begun.id, stream=True)]
        assert (events[-1].type, events[-1].response) == ("response.incomplete", cancelled)


async def test_a_response_that_is_waited_for_is_aborted(server: HttpServer, say: Say) -> None:
    say(LONG)
    server.stack.worker.step_seconds = 0.05
    creating = asyncio.create_task(create(server.openai, extra_body={"request_id": "mine"}))
    await server.stack.until(lambda loads: loads.num_running == 1)
    assert (await server.client.delete("/v1/requests/mine")).status_code == 200
    aborted = await creating
    assert (aborted.status, aborted.incomplete_details) == ("cancelled", None)
    assert await server.openai.responses.retrieve("resp_mine") == aborted


async def test_one_that_has_ended_is_not_cancelled_any_more(server: HttpServer, say: Say) -> None:
    say("hello")
    begun = await create(server.openai, background=True)
    response = await ended(server.openai, begun.id)
    assert await server.openai.responses.cancel(begun.id) == response
    with pytest.raises(openai.BadRequestError) as caught:
        await server.openai.responses.cancel((await create(server.openai)).id)
    assert (caught.value.param, "background" in caught.value.message) == ("response_id", True)


async def _all_of(client: openai.AsyncOpenAI, response_id: str) -> list[Any]:
    return [event async for event in await client.responses.retrieve(response_id, stream=True)]


async def _running(server: HttpServer, say: Say) -> tuple[Response, asyncio.Task[list[Any]]]:
    """Start a background response. Return the response and a task that reads its events."""
    say(LONG)
    server.stack.worker.step_seconds = 0.05
    begun = await create(server.openai, background=True)
    reading = asyncio.create_task(_all_of(server.openai, begun.id))
    await until(server.openai, begun.id, "in_progress")
    return begun, reading


async def test_a_response_that_is_deleted_ends(server: HttpServer, say: Say) -> None:
    begun, reading = await _running(server, say)
    response = await server.client.delete(f"{PATH}/{begun.id}")
    assert response.json() == {"id": begun.id, "object": "response", "deleted": True}
    assert await unknown(server.openai, begun.id)
    assert (await reading)[-1].response.status == "cancelled"
    await server.stack.until_idle()


async def test_a_response_in_background_that_fails_says_why(server: HttpServer, say: Say) -> None:
    begun, reading = await _running(server, say)
    server.stack.worker.bad_sequences[0] = RowStatus.NAN_LOGITS
    response = await ended(server.openai, begun.id)
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert "not numbers" in response.error.message
    for events in (await reading, await _all_of(server.openai, begun.id)):
        assert (events[-1].type, events[-1].response.error) == ("response.failed", response.error)
    assert (await server.refusal(PATH, input="x", previous_response_id=begun.id))["param"] == "previous_response_id"


async def test_a_response_in_background_outlives_a_worker(server: HttpServer, say: Say) -> None:
    begun, reading = await _running(server, say)
    await server.stack.worker.kill()
    server.stack.worker.step_seconds = 0
    await server.stack.worker.start()
    assert (await ended(server.openai, begun.id)).output_text == LONG
    assert (await reading)[-1].response.output_text == LONG


@pytest.mark.parametrize(
    ("query", "param"),
    [("stream=true", "stream"), ("stream=true&starting_after=3", "starting_after"), ("streams=true", "streams")],
)
async def test_queries_that_are_not_served(server: HttpServer, say: Say, query: str, param: str) -> None:
    say("hello")
    response = await server.client.get(f"{PATH}/{(await create(server.openai)).id}?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_each_tenant_has_its_own_responses(model: Path, tmp_path: Path, say: Say) -> None:
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants)
    front = {"tenants": str(tenants), "scheduler_api_key_file": key_file(tmp_path, "root")}
    async with serve_http(model, front=front, key=KEYS["acme"], tenants=str(tenants)) as server:
        say("hello")
        acme, globex = server.openai, server.openai.with_options(api_key=KEYS["globex"])
        kept = await create(acme)
        background = await create(acme, background=True)
        never = await unknown(globex, "resp_never")
        for response in (kept, background):
            assert await unknown(globex, response.id) == never
            for call in (globex.responses.delete, globex.responses.cancel, globex.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await call(response.id)
            with pytest.raises(openai.BadRequestError, match="no response"):
                await create(globex, previous_response_id=response.id)
            assert (await ended(acme, response.id)).status == "completed"
            root = {"authorization": f"Bearer {KEYS['root']}"}
            for query, status in (("", 404), ("?tenant=acme", 200)):
                response_of_root = await server.client.get(f"{PATH}/{response.id}{query}", headers=root)
                assert response_of_root.status_code == status
        await create(acme, previous_response_id=background.id)


async def test_a_lost_scheduler_is_unavailable(server: HttpServer, say: Say) -> None:
    say("hello")
    response = await create(server.openai)
    server.stack.stop_now.set()
    server.stack.stop.set()
    await server.front.until_ready(False)
    with pytest.raises(openai.InternalServerError) as caught:
        await server.openai.responses.retrieve(response.id)
    assert caught.value.status_code == 503
