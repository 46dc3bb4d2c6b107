"""The tokens whose logprobs are reported: the tokens that a request lists, or the whole vocabulary."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai.types.chat import ChatCompletion

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.grpc import generate_response
from scheduler_service.api.http import answers, detached_requests
from scheduler_service.serving import parsed_request
from scheduler_service.serving.output import MAX_DELTA_TOKENS, Delta
from testing import scheduler_stack
from testing.scheduler_stack import make_checkpoint
from testing.serving.http_server import HttpServer, joined
from tests.contract.http.shared import CHAT, COMPLETION, MIB, chat, of, shared_server

VOCAB_SIZE = 300
LISTED = [7, 250, 7, 0]
IDS = {"return_tokens_as_token_ids": True, "max_tokens": 6, "seed": 0}


def ids_in(tops: list[dict[str, Any]]) -> list[int]:
    return [int(top["token"].removeprefix("token_id:")) for top in tops]


async def whole_and_streamed(server: HttpServer, path: str, **asked: Any) -> list[Any]:
    """Return the logprobs of a choice twice: of the whole response, and joined from the events of a stream."""
    columns = (await server.post(path, **asked)).json()["choices"][0]["logprobs"]
    whole = {name: column for name, column in columns.items() if column is not None}
    events = await server.events(path, **asked)
    parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    return [whole, {name: joined(part[name] for part in parts) for name in whole}]


async def test_listed_tokens_replace_the_most_likely(server: HttpServer) -> None:
    """As in vLLM, the output token comes first, then the listed tokens, each once."""
    asked = chat("hello") | IDS | {"logprobs": True, "top_logprobs": 5, "logprob_token_ids": LISTED}
    ChatCompletion.model_validate((await server.post(CHAT, **asked)).json())
    for found in await whole_and_streamed(server, CHAT, **asked):
        for entry in found["content"]:
            (own,) = ids_in([entry])
            assert ids_in(entry["top_logprobs"]) == list(dict.fromkeys([own, *LISTED]))
            values = dict(zip(ids_in(entry["top_logprobs"]), entry["top_logprobs"], strict=True))
            assert {token_id: values[token_id]["logprob"] for token_id in LISTED} == {
                token_id: -1.0 - token_id for token_id in LISTED
            }
        assert len(found["content"]) == 6
    asked = {"prompt": "hello", "logprobs": 5, "logprob_token_ids": LISTED} | IDS
    for found in await whole_and_streamed(server, COMPLETION, **asked):
        for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
            assert list(top) == list(dict.fromkeys([token, *(f"token_id:{each}" for each in LISTED)]))
        assert len(found["tokens"]) == 6


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {}),
        (CHAT, {"logprobs": False}),
        (CHAT, {"logprobs": True, "use_beam_search": True, "n": 2}),
        (CHAT, {"logprobs": True, "logprob_token_ids": [VOCAB_SIZE]}),
        (CHAT, {"logprobs": True, "logprob_token_ids": [5] * 129}),
        (COMPLETION, {}),
        (COMPLETION, {"logprobs": 0, "beam_width": 2}),
        (COMPLETION, {"logprobs": 0, "echo": True, "max_tokens": 0}),
    ],
)
async def test_what_has_no_such_tokens_refuses_them(server: HttpServer, path: str, asked: dict[str, Any]) -> None:
    given = chat("hello") if path == CHAT else {"prompt": "hello"}
    field = (await server.refusal(path, **(given | {"logprob_token_ids": [5]} | asked)))["param"]
    assert field in ("logprob_token_ids", "logprob_token_ids[0]", "logprobs" if "beam" in str(asked) else "")


async def test_an_empty_list_asks_for_nothing(server: HttpServer) -> None:
    for given in (chat("hello"), chat("hello") | {"logprobs": True, "top_logprobs": 2}):
        plain = (await server.chat(**given, seed=0))["choices"]
        assert (await server.chat(**given, seed=0, logprob_token_ids=[]))["choices"] == plain


async def test_all_tokens_of_the_vocabulary(server: HttpServer) -> None:
    asked = chat("hello") | IDS | {"logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1}
    whole, streamed = await whole_and_streamed(server, CHAT, **asked)
    assert whole == streamed
    assert [ids_in(entry["top_logprobs"]) for entry in whole["content"]] == [[*range(VOCAB_SIZE)]] * 6
    answer = await server.chat(**asked)
    first, *others = answer["prompt_logprobs"]
    assert (first, {len(entry) for entry in others}) == (None, {VOCAB_SIZE})
    asked = {"prompt": [5, 6, 7], "logprobs": -1} | IDS
    whole, streamed = await whole_and_streamed(server, COMPLETION, **asked)
    assert whole == streamed
    assert {len(top) for top in whole["top_logprobs"]} == {VOCAB_SIZE}
    assert (await server.refusal(COMPLETION, prompt="x", logprobs=-2))["param"] == "logprobs"


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"detached": True}], ids=["whole", "streamed", "detached"])
@pytest.mark.parametrize(
    ("path", "field", "asked"),
    [
        (CHAT, "top_logprobs", chat("x") | {"logprobs": True, "top_logprobs": -1, "max_tokens": 44}),
        (CHAT, "top_logprobs", chat("x") | {"logprobs": True, "top_logprobs": -1, "n": 11, "max_tokens": 4}),
        (COMPLETION, "logprobs", {"prompt": [5], "logprobs": -1, "max_tokens": 44}),
        (COMPLETION, "prompt_logprobs", {"prompt": [5] * 44, "prompt_logprobs": -1, "max_tokens": 1}),
    ],
)
async def test_all_tokens_are_bounded_before_they_are_computed(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str, asked: dict[str, Any], more: Any
) -> None:
    """The response size limit also applies to streams, because each event contains the logprobs of the whole
    vocabulary.
    """
    monkeypatch.setattr(parsed_request, "MAX_ANSWER_BYTES", MIB)
    error = await server.refusal(path, **asked, **more)
    assert error["param"] == field
    for told in (VOCAB_SIZE, 44 * (1 + VOCAB_SIZE) * 80, MIB, "logprob_token_ids"):
        assert str(told) in error["message"]
    assert (await server.stack.loads()).num_prompt_tokens == 0
    fits = {name: 43 if value == 44 else value[:43] if name == "prompt" else value for name, value in asked.items()}
    if "n" not in asked:
        assert (await server.post(path, **fits, **more)).status_code == 200


async def test_large_events_of_detached_requests_are_written_on_a_thread(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[threading.Thread] = []

    def encode(answer: Any) -> bytes:
        writers.append(threading.current_thread())
        return answers.encode(answer)

    body = {"prompt": [5], "logprobs": -1, "max_tokens": 40, "ignore_eos": True, "detached": True}
    name = (await server.post(COMPLETION, **body)).json()["request_id"]
    monkeypatch.setattr(detached_requests, "encode", encode)
    monkeypatch.setattr(detached_requests, "PIECE_SIZE", 0)
    events = server.events_of(await server.client.get(f"/v1/requests/{name}?stream=true"))
    tops = [
        entry["top_logprobs"] for event in events for entry in (event.get("logprobs") or {"content": []})["content"]
    ]
    assert [len(top) for top in tops] == [VOCAB_SIZE] * 40
    assert threading.current_thread() not in writers


async def test_the_result_of_a_detached_request_is_put_together_in_small_pieces(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_entries: list[int] = []

    def encode_delta(request_id: str, delta: Delta) -> pb.GenerateResponse:
        num_entries.append(sum(1 + len(entry.top) for entry in (*delta.logprobs, *delta.prompt_logprobs)))
        return original(request_id, delta)

    original = generate_response.encode_delta
    monkeypatch.setattr(generate_response, "encode_delta", encode_delta)
    body = {"prompt": [5] * 9, "logprobs": -1, "prompt_logprobs": -1, "max_tokens": 40, "ignore_eos": True}
    name = (await server.post(COMPLETION, **body, detached=True)).json()["request_id"]
    while (answer := (await server.client.get(f"/v1/requests/{name}")).json())["state"] == "running":
        num_entries.clear()
    assert len(answer["outputs"][0]["logprobs"]["content"]) == 40
    assert 0 < max(num_entries) <= MAX_DELTA_TOKENS


async def test_requests_for_all_tokens_share_their_tenants_bound(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests for the logprobs of all tokens count toward their tenant's memory limit while they exist, and not
    longer.
    """
    monkeypatch.setattr("scheduler_service.serving.intake.MAX_TENANT_ANSWER_BYTES", MIB)
    asked = {"prompt": [5], "max_tokens": 40, "logprobs": -1, "ignore_eos": True, "stream": True}
    async with shared_server(model, tmp_path) as server:
        server.stack.worker.step_seconds = 0.01
        tenants = ("acme", "acme", "globex")
        answers = await asyncio.gather(*(server.post(COMPLETION, of(tenant), **asked) for tenant in tenants))
        assert sorted(answer.status_code for answer in answers[:2]) == [200, 429]
        assert answers[2].status_code == 200
        assert (await server.post(COMPLETION, of("acme"), **asked)).status_code == 200


async def test_calls_of_grpc_have_the_same_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.serving.intake.MAX_TENANT_ANSWER_BYTES", MIB)
    asked = scheduler_stack.request([5, 6], max_tokens=40, logprobs=2**32 - 1, ignore_eos=True)
    async with scheduler_stack.serve(make_checkpoint(tmp_path / "model")) as stack:
        result = await stack.generate(asked)
        entries = [entry for response in result.responses for entry in response.logprobs]
        assert [list(entry.top_token_ids) for entry in entries] == [[*range(VOCAB_SIZE)]] * 40
        assert not any(entry.top for entry in entries)
        call = stack.stub.Generate(asked)
        await stack.until(lambda loads: loads.num_running == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="answers of this tenant") as refused:
            await stack.generate(asked)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await stack.until_idle()
        await stack.generate(asked)
        monkeypatch.setattr(parsed_request, "MAX_ANSWER_BYTES", MIB // 2)
        with pytest.raises(grpc.aio.AioRpcError, match="all 300 tokens of the vocabulary") as refused:
            await stack.generate(asked)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
