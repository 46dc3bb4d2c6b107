"""Detached requests over HTTP. Their ids are valid in every API of the server."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.scheduler_stack import VOCAB_SIZE, expected_tokens
from testing.serving.front_end import DEADLINE, serve_front_end
from testing.serving.http_server import DONE, HttpServer, serve_http
from testing.serving.tenants import KEYS, credentials, key_file, write_tenants
from tests.contract.detached import attach, submit, until, until_ended

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = [5, 6, 7, 8, 9, 10, 11]
LONG = {"max_tokens": 200, "ignore_eos": True}


async def submitted(server: HttpServer, path: str = COMPLETIONS, **body: Any) -> str:
    response = await server.post(
        path, **({"prompt": PROMPT} if path == COMPLETIONS else {}) | body | {"detached": True}
    )
    answer = response.json()
    assert (response.status_code, answer) == (200, {"request_id": answer["request_id"], "state": "running"})
    return answer["request_id"]


async def result(server: HttpServer, name: str, **query: Any) -> dict[str, Any]:
    """Poll a detached request until it has ended. Return its final state."""
    async with asyncio.timeout(DEADLINE):
        while True:
            response = await server.client.get(f"/v1/requests/{name}", params=query)
            assert response.status_code == 200, response.text
            if (answer := response.json())["state"] != "running":
                return answer
            await asyncio.sleep(0.01)


async def events(server: HttpServer, name: str, **query: Any) -> list[dict[str, Any]]:
    response = await server.client.get(f"/v1/requests/{name}", params=query | {"stream": "true"})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *found, last = [part for part in response.text.split("\n\n") if part and not part.startswith(":")]
    assert last == DONE
    return [json.loads(event.removeprefix("data: ")) for event in found]


async def test_every_api_serves_every_request_id(server: HttpServer, model: Path) -> None:
    stack = server.stack
    stack.worker.step_seconds = 0.005
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    async with serve_front_end(model, stack.url) as other:
        by_http = await submitted(server, max_tokens=40, seed=3, n=2)
        by_grpc = await submit(other, PROMPT, max_tokens=40, seed=3, n=2, name="a/b c")
        for name in (by_http, by_grpc):
            expected = [expected_tokens(PROMPT, 40, seed=3, sample_index=index) for index in range(2)]
            texts = list(map(tokenizer.decode, expected))
            told = await events(server, name)
            for index in range(2):
                own = [event for event in told if event["index"] == index]
                assert [token_id for event in own for token_id in event["token_ids"]] == expected[index]
                assert "".join(event["text"] for event in own) == texts[index]
                assert own[-1]["finish_reason"] == "length"
            rest = await events(server, name, from_token=25)
            assert [token_id for event in rest if not event["index"] for token_id in event["token_ids"]] == (
                expected[0][25:]
            )
            assert rest[0]["first_token"] == 25
            answer = await result(server, name)
            assert answer["request_id"] == name
            assert [output["token_ids"] for output in answer["outputs"]] == expected
            assert [output["text"] for output in answer["outputs"]] == texts
            usage = answer["outputs"][0]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 40, 47)
            for door in (stack, other):
                assert (await attach(door, name, n=2)).token_ids == expected


async def test_detached_requests_are_parsed_like_other_requests(server: HttpServer, model: Path) -> None:
    sampling = {"max_tokens": 60, "seed": 5, "stop": ["q", " "], "include_stop_str_in_output": True}
    conversation = {"messages": [{"role": "user", "content": "once upon"}], "logprobs": True, "top_logprobs": 2}
    text = {"prompt": "once upon", "truncate_prompt_tokens": 3, "prompt_logprobs": 1, "add_special_tokens": False}
    for path, asked in ((CHAT, conversation), (COMPLETIONS, text)):
        (choice,) = (await server.post(path, **asked | sampling)).json()["choices"]
        (output,) = (await result(server, await submitted(server, path, **asked | sampling)))["outputs"]
        assert output["text"] == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert (output["finish_reason"], output["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
        assert output.get("logprobs") == choice["logprobs"]
        assert output.get("prompt_logprobs") == choice.get("prompt_logprobs")
    await submitted(server, request_id="mine", ignore_eos=True)
    assert (await result(server, "mine"))["outputs"][0]["usage"]["completion_tokens"] == 16  # as in OpenAI's API


async def test_options_of_whole_responses_are_refused(server: HttpServer) -> None:
    for path, field, body in (
        (COMPLETIONS, "stream", {"stream": True}),
        (COMPLETIONS, "echo", {"echo": True}),
        (COMPLETIONS, "best_of", {"best_of": 2}),
        (COMPLETIONS, "prompt", {"prompt": ["a", "b"]}),
        (COMPLETIONS, "max_tokens", {"max_tokens": 5000}),
        (COMPLETIONS, "prompt", {"prompt": [VOCAB_SIZE]}),
        (CHAT, "stream_options", {"messages": [{"role": "user", "content": "x"}], "stream_options": {}}),
        (CHAT, "include_reasoning", {"messages": [{"role": "user", "content": "x"}], "include_reasoning": False}),
    ):
        error = await server.refusal(
            path, **({"prompt": "x"} if path == COMPLETIONS else {}) | body | {"detached": True}
        )
        assert error["param"].partition("[")[0] == field, error
    await submitted(server, request_id="mine", max_tokens=3)
    assert (await server.refusal(COMPLETIONS, 409, prompt="x", request_id="mine", detached=True))[
        "param"
    ] == "request_id"


async def test_queries_that_make_no_sense(server: HttpServer) -> None:
    name = await submitted(server, max_tokens=3)
    for query, field in (
        ({"streams": "true"}, "streams"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "from_token": "-1"}, "from_token"),
        ({"stream": "true", "from_token": "200"}, "from_token"),
        ({"from_token": "1"}, "from_token"),
    ):
        response = await server.client.get(f"/v1/requests/{name}", params=query)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text
    response = await server.client.post(f"/v1/requests/{name}")
    assert response.status_code == 405


async def test_ids_that_are_not_there(server: HttpServer) -> None:
    for method, query in (("GET", ""), ("GET", "?stream=true"), ("DELETE", "")):
        response = await server.client.request(method, f"/v1/requests/unknown{query}")
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (404, "not_found_error", "request_id")


async def test_the_end_of_what_came_by_any_door(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.01
    direct = await submit(server.stack, PROMPT, **LONG)
    for name in (direct, await submitted(server, **LONG)):
        response = await server.client.delete(f"/v1/requests/{name}")
        assert (response.status_code, response.json()) == (200, {"request_id": name})
        assert (await result(server, name))["outputs"][0]["finish_reason"] == "abort"
    waited_for = asyncio.create_task(server.post(COMPLETIONS, prompt=PROMPT, request_id="waited", **LONG))
    await server.stack.until(lambda loads: loads.num_running == 1)
    assert (await server.client.delete("/v1/requests/waited")).status_code == 200
    assert (await waited_for).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_reader_that_leaves_leaves_the_request_alone(
    server: HttpServer, open_attachments: list[object]
) -> None:
    server.stack.worker.step_seconds = 0.01
    name = await submitted(server, max_tokens=100, ignore_eos=True)
    async with server.client.stream("GET", f"/v1/requests/{name}?stream=true") as response:
        assert response.status_code == 200
        assert len(open_attachments) == 1
    await until(lambda: not open_attachments)
    assert (await until_ended(server.stack, name)).outputs[0].usage.completion_tokens == 100


async def test_a_request_that_fails_says_why(server: HttpServer) -> None:
    name = await submitted(server, prompt=[1, 2, VOCAB_SIZE - 1, 4])
    answer = await result(server, name)
    assert (answer["state"], "not numbers" in answer["failure"]) == ("failed", True)
    response = await server.client.get(f"/v1/requests/{name}?stream=true")
    assert "not numbers" in response.text


async def test_a_full_queue_says_when_to_come_back(model: Path) -> None:
    async with serve_http(model, max_num_seqs=1, max_waiting_requests=1) as server:
        server.stack.worker.step_seconds = 0.02
        answers = await asyncio.gather(*(server.post(COMPLETIONS, prompt=PROMPT, detached=True) for _ in range(9)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 0 < len(refused) < 9
        assert {(answer.status_code, answer.headers["retry-after"]) for answer in refused} == {(429, "1")}


async def test_a_lost_scheduler_is_unavailable(server: HttpServer) -> None:
    name = await submitted(server)
    server.stack.stop_now.set()
    server.stack.stop.set()
    await server.front.until_ready(False)
    for method, path, body in (
        ("POST", COMPLETIONS, {"prompt": PROMPT, "detached": True}),
        ("GET", f"/v1/requests/{name}", None),
        ("DELETE", f"/v1/requests/{name}", None),
    ):
        response = await server.client.request(method, path, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")


async def test_each_tenant_has_its_own_ids(model: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants)
    front = {"tenants": str(tenants), "scheduler_api_key_file": key_file(tmp_path, "root")}
    async with serve_http(model, front=front, tenants=str(tenants)) as server:
        server.stack.worker.step_seconds = 0.01
        keys = {name: {"authorization": f"Bearer {key}"} for name, key in KEYS.items()}
        response = await server.post(COMPLETIONS, keys["acme"], prompt=PROMPT, detached=True, **LONG)
        path = f"/v1/requests/{response.json()['request_id']}"
        for method, query, tenant, status in (
            ("GET", "", "globex", 404),
            ("GET", "?stream=true", "globex", 404),
            ("DELETE", "", "globex", 404),
            ("GET", "?tenant=acme", "globex", 403),
            ("DELETE", "?tenant=acme", "globex", 403),
            ("GET", "", None, 401),
            ("DELETE", "", None, 401),
            ("GET", "", "root", 404),
            ("GET", "?tenant=acme", "root", 200),
            ("GET", "", "acme", 200),
            ("DELETE", "", "acme", 200),
        ):
            headers = keys[tenant] if tenant is not None else None
            response = await server.client.request(method, path + query, headers=headers)
            assert response.status_code == status, (method, query, tenant)
        name = path.rpartition("/")[2]
        found = await server.stack.stub.GetResult(pb.GetResultRequest(request_id=name), metadata=credentials("acme"))
        assert found.request_id == name


async def test_headers_that_grpc_does_not_take_are_left_out(server: HttpServer) -> None:
    headers = {"x-session-id": "ü", "traceparent": "ü", "tracestate": "a=" + 20_000 * "b"}
    encoded = [(name, value.encode()) for name, value in headers.items()]
    body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, "detached": True}
    response = await server.client.post(COMPLETIONS, json=body, headers=encoded)
    assert response.status_code == 200, response.text
    assert len((await result(server, response.json()["request_id"]))["outputs"][0]["token_ids"]) == 2
    response = await server.client.post(COMPLETIONS, json=body, headers={"x-session-id": 20_000 * "s"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")
