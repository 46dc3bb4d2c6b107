"""Behavior common to all HTTP requests: authentication, errors, size limits, and client disconnects."""

import asyncio
import json
import re
import ssl
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types import Model

from pagewire.common import __version__
from pagewire.common.wire.transport.host_names import HostNames
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.http import body, routes
from scheduler_service.api.http.call_admission import Origins
from scheduler_service.api.http.transport import connection, event_stream
from scheduler_service.config import FrontEndConfig, HttpOptions
from testing.seeds import seeded
from testing.serving.certificates import Authority
from testing.serving.http_server import DONE, HttpServer, serve_http, server_of_the_module
from testing.serving.tenants import KEYS, key_file, remove_tenant, write_tenants

lasting_server = server_of_the_module("lasting_server")

PATH = "/v1/completions"
NAMES = ["first", "second", "third"]


async def test_model_list_health_and_version_endpoints(server: HttpServer) -> None:
    for path in ("/health", "/ping"):
        assert (await server.client.get(path)).status_code == 200
    assert (await server.client.get("/version")).json() == {"version": __version__}
    assert "vllm:generation_tokens_total" in (await server.client.get("/metrics")).text
    (card,) = (await server.client.get("/v1/models")).json()["data"]
    Model.model_validate(card)
    assert (card["id"], card["max_model_len"]) == ("chatty", 256)
    assert (await server.client.get("/v1/models/chatty")).json() == card
    assert (await server.openai.models.retrieve("chatty")).id == "chatty"
    async with server.openai.models.with_streaming_response.list() as response:
        assert response.status_code == 200


async def test_a_model_has_several_names(model: Path) -> None:
    """Every route accepts any of the model's names. The first name appears in responses and metrics."""
    async with serve_http(model, served_model_name="first, second,third,first") as server:
        cards = (await server.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [(name, "first") for name in NAMES]
        for name, card in zip(NAMES, cards, strict=True):
            assert (await server.client.get(f"/v1/models/{name}")).json() == card
            answer = (await server.post(PATH, model=name, prompt=[5, 6], max_tokens=2)).json()
            assert (answer["model"], answer["usage"]["completion_tokens"]) == ("first", 2)
            assert (await server.post("/tokenize", model=name, prompt="a")).status_code == 200
        refused = await server.post(PATH, model="first,second", prompt=[5, 6])
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
        assert 'model_name="first"' in (await server.client.get("/metrics")).text
        info = await server.stack.stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest())
        assert (info.served_model_name, list(info.served_model_aliases)) == ("first", NAMES[1:])


async def test_metrics_count_the_tokens_that_clients_got(model: Path) -> None:
    """Tokens after a stop text are not counted, although the worker may have computed them."""
    async with serve_http(model) as server:

        async def counted() -> float:
            found = re.search(
                r"^pagewire:frontend_generation_tokens_total(?:{.*})? (.+)$",
                (await server.client.get("/metrics")).text,
                re.MULTILINE,
            )
            assert found is not None
            return float(found[1])

        whole = (await server.post(PATH, prompt=[5, 6], max_tokens=20, ignore_eos=True)).json()
        assert await counted() == whole["usage"]["completion_tokens"] == 20
        stop = whole["choices"][0]["text"][8:10]
        cut = (await server.post(PATH, prompt=[5, 6], max_tokens=20, ignore_eos=True, stop=[stop])).json()
        assert cut["usage"]["completion_tokens"] < 20
        assert await counted() == 20 + cut["usage"]["completion_tokens"]


async def test_the_api_describes_itself(server: HttpServer) -> None:
    described = (await server.client.get("/openapi.json")).json()
    assert described["components"]["schemas"]["StreamOptions"]["additionalProperties"] is False
    for path, methods in described["paths"].items():
        for method in methods:
            response = await server.client.request(method, path, json={} if method == "post" else None)
            assert response.status_code in (200, 400) or ("{" in path and response.status_code == 404), path
    page = await server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in described["paths"]:
        assert path in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text


async def test_a_front_end_without_its_scheduler_says_so(server: HttpServer) -> None:
    server.stack.stop_now.set()
    server.stack.stop.set()
    await server.front.until_ready(False)
    for response in (await server.client.get("/health"), await server.post(PATH, prompt="x")):
        assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("status", "path", "content"),
    [
        (404, "/v1/nothing", "{}"),
        (404, PATH, '{"prompt": "x", "model": "gpt"}'),
        (400, PATH, ""),
        (400, PATH, "[]"),
        (400, PATH, '"text"'),
        (400, PATH, '{"prompt": "x"'),
        (400, PATH, '{"prompt": "x"} more'),
        (400, PATH, b'{"prompt": "\xff"}'),
        (400, PATH, '{"prompt": "\\ud800"}'),
        (400, PATH, '{"prompt": "x", "guided_json": ' + "[" * 5000 + "]" * 5000 + "}"),
        (400, PATH, '{"prompt": "x", "logit_bias": {"x": 1}}'),
        (400, PATH, '{"prompt": "x", "temperature": NaN}'),
        (413, PATH, b" " * (body.MAX_BODY_BYTES + 1)),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_refusals_have_the_form_of_openai(
    lasting_server: HttpServer, status: int, path: str, content: str | bytes
) -> None:
    response = await lasting_server.client.post(path, content=content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


async def test_the_wrong_method(server: HttpServer) -> None:
    for path, method in ((PATH, "GET"), ("/v1/models", "POST")):
        response = await server.client.request(method, path)
        assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_hints(server: HttpServer) -> None:
    error = await server.refusal(PATH, prompt="x", temprature=1)
    assert error["message"] == "temprature is not a field of this request; did you mean temperature?"
    error = await server.refusal(PATH, prompt="x", n=17)
    assert error["message"] == "n is 17, but must be an integer from 1 to 16 or null"
    error = await server.refusal(PATH, prompt="x", prompt_embeds="y")
    assert error["message"] == "prompt_embeds is 'y', but must be null (prompts are texts or token ids)"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await server.openai.completions.create(model="gpt", prompt="x")


async def test_a_compressed_body_is_refused(server: HttpServer) -> None:
    response = await server.client.post(PATH, content=b"{}", headers={"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["param"]) == (415, None)


async def test_another_hosts_name_is_refused(server: HttpServer) -> None:
    accepted = (
        "localhost:1",
        "127.0.0.1",
        "[::1]:80",
        "host.docker.internal:8000",
        "pagewire.LOCALHOST",
        "a.b.internal",
    )
    refused = (
        "evil.example",
        "",
        "localhost.evil.example",
        "internal.evil.example",
        "127.0.0.1.evil.example",
        "internal",
    )
    for host in (*accepted, *refused):
        response = await server.client.get("/v1/models", headers={"host": host})
        assert response.status_code == (200 if host in accepted else 403), host
    assert response.json()["error"]["message"].endswith(
        "is not this machine; use 127.0.0.1 or localhost, or add the name to --allowed-hosts"
    )


async def test_further_names_of_hosts_are_allowed(model: Path) -> None:
    async with serve_http(model, front={"allowed_hosts": "box.local, *.lan.example,[::2]"}) as server:
        for host, status in {
            "box.local:80": 200,
            "a.lan.example": 200,
            "[::2]": 200,
            "localhost": 200,
            "lan.example": 403,
            "a.box.local": 403,
            "a.lan.example.evil": 403,
        }.items():
            assert (await server.client.get("/version", headers={"host": host})).status_code == status, host


def test_a_server_on_all_addresses_may_name_its_hosts() -> None:
    assert HostNames("0.0.0.0").refusal("any.example:80") == ""
    named = HostNames("0.0.0.0", ["box.local"], "--allowed-hosts")
    assert named.refusal("box.local:80") == named.refusal("localhost") == named.refusal("0.0.0.0:80") == ""
    assert named.refusal("any.example:80").startswith("the host 'any.example' is not this machine")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("allowed_hosts", each)
        for each in ("http://a", "a b", "a/b", "", ",", "a,,b", "a;b", "box.local:8000", "[::1]:80", "*:80")
    ],
)
def test_bad_names_of_hosts_are_refused(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"^--allowed-hosts is .*, but must be a host name without port"):
        FrontEndConfig(model="m", http=HttpOptions(**{option: value})).validate()


LOCAL = (
    *("app://obsidian.md", "file://", "tauri://localhost", "vscode-webview://1kq0r", "vscode-file://vscode-app"),
    *("http://localhost", "https://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:1"),
    *("http://tauri.localhost", "https://tauri.localhost"),
)


async def test_pages_of_applications_on_this_machine_may_call(server: HttpServer) -> None:
    for origin in LOCAL:
        asks = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
            "access-control-request-private-network": "true",
        }
        asked = await server.client.options(PATH, headers=asks)
        assert asked.status_code == 200, origin
        answer = await server.post(PATH, headers={"origin": origin}, prompt="x", max_tokens=1)
        assert answer.status_code == 200, origin
        for each in (asked, answer):
            assert each.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in each.headers
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"


async def test_web_sites_may_neither_call_nor_read(server: HttpServer) -> None:
    """Invariant: a web site can neither send a request that does anything, nor read an answer."""
    names = (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:80",
        "app",
        "a.localhost",
    )
    origins = [f"{scheme}://{name}" for scheme in ("http", "https") for name in names]
    origins += ["null", "http://localhost:8000.evil.example/", "xapp://a", "web+app://a", "chrome-extension://a", "*"]
    for origin in origins:
        for response in (
            await server.post(PATH, headers={"origin": origin, "content-type": "text/plain"}, prompt="x"),
            await server.client.options(PATH, headers={"origin": origin, "access-control-request-method": "POST"}),
        ):
            assert response.status_code == 403, origin
            assert "access-control-allow-origin" not in response.headers
            assert response.json()["error"]["message"].endswith("may not call; add it to --allowed-origins")
        read = await server.client.get("/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in read.headers
        rebound = await server.client.get("/v1/models", headers={"origin": origin, "host": "evil.example"})
        assert rebound.status_code == 403


async def test_web_pages_may_call_where_that_is_asked_for(model: Path, server: HttpServer) -> None:
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert (await server.client.options(PATH, headers=asks)).status_code == 403
    own = server.url  # the server's own origin
    for origin, status in {asks["origin"]: 403, "null": 403, own: 200, own + ".example": 403}.items():
        # Browsers send such a request without a preflight request.
        headers = {"origin": origin, "content-type": "text/plain"}
        assert (await server.post(PATH, headers=headers, prompt="x")).status_code == status
        assert (await server.client.get("/version", headers=headers)).status_code == 200
    async with serve_http(model, front={"allowed_origins": "https://app.example, https://b.example"}) as opened:
        answer = await opened.client.options(PATH, headers=asks)
        assert answer.headers["access-control-allow-origin"] == asks["origin"]
        answer = await opened.post(PATH, headers={"origin": asks["origin"]}, prompt="x")
        assert answer.headers["access-control-allow-origin"] == asks["origin"]
        stranger = await opened.client.options(PATH, headers=asks | {"origin": "https://evil.example"})
        assert (stranger.status_code, "access-control-allow-origin" in stranger.headers) == (403, False)
        rebound = await opened.client.options(PATH, headers=asks | {"host": "evil.example"})
        assert (rebound.status_code, "access-control-allow-origin" in rebound.headers) == (403, False)


def test_origins_with_wildcards() -> None:
    pattern = Origins(["https://*.Example.com", "http://box:*"], "").pattern
    for origin in ("https://a.example.com", "https://a.b.example.com", "http://box:1", "http://localhost:1"):
        assert pattern.fullmatch(origin), origin
    for origin in (
        "https://example.com",
        "http://a.example.com",
        "https://a.example.com.evil",
        "https://axexample.com",
        "https://evil/.example.com",
        "http://box",
        "null",
    ):
        assert not pattern.fullmatch(origin), origin
    assert all(Origins(["*"], "").pattern.fullmatch(origin) for origin in ("null", "https://evil.example"))


async def test_the_head_has_bounds(server: HttpServer) -> None:
    for headers in (
        {f"x-{index}": "y" for index in range(connection.MAX_HEADERS + 1)},
        {"x": "y" * (connection.MAX_HEAD_BYTES + 1)},
    ):
        response = await server.client.get("/version", headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (await server.client.get("/version")).status_code == 200


async def test_a_request_head_has_a_timeout(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    async with serve_http(model) as server:
        address = server.url.removeprefix("http://").split(":")
        whole = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for begun in (b"", b"GET / HTTP/1.1\r\nhost:", whole + b"GET /"):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(begun)
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert answer.count(b"200 OK") == begun.count(whole)
            writer.close()


async def test_a_request_body_has_a_timeout(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.1)
    async with serve_http(model) as server:
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(5):
            assert b"408" in await reader.readline()
        writer.close()


async def test_documents_are_made_once(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("page", "document"):
        monkeypatch.setattr(routes, name, None)
    for path in ("/docs", "/openapi.json"):
        assert (await server.client.get(path)).status_code == 200


async def test_tenants(model: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants)
    front = {"tenants": str(tenants), "scheduler_api_key_file": key_file(tmp_path, "root")}
    async with serve_http(model, tenants=str(tenants), front=front, key=KEYS["acme"]) as server:
        assert (await server.openai.completions.create(model="chatty", prompt="x")).choices
        assert (await server.client.get("/health")).status_code == 200
        for headers in (None, {"authorization": "Bearer nonsense"}, {"authorization": KEYS["acme"]}):
            for path in ("/v1/models", PATH):
                asked = {"prompt": "x"} if path == PATH else None
                method = "POST" if asked else "GET"
                response = await server.client.request(method, path, json=asked, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        keys = {"authorization": f"Bearer {KEYS['acme']}"}
        response = await server.post(PATH, headers=keys, prompt="x", tenant="globex")
        assert (response.status_code, response.json()["error"]["param"]) == (403, "tenant")
        for tenant, status in {"root": 200, "acme": 403}.items():
            headers = {"authorization": f"Bearer {KEYS[tenant]}"}
            assert (await server.client.get("/metrics", headers=headers)).status_code == status
        server.stack.worker.step_seconds = 0.05
        asked = {"prompt": "x", "seed": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with server.client.stream("POST", PATH, json=asked, headers=keys) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            remove_tenant(tenants, "acme")
            told = [line async for line in lines if line]
        assert told[-1] == DONE
        assert json.loads(told[-2].removeprefix("data: "))["error"]["code"] == "invalid_api_key"


async def test_tls(model: Path, tmp_path: Path) -> None:
    authority = Authority("ours")
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    trusted = ssl.create_default_context(cafile=authority.write(tmp_path))
    for client_ca in (None, authority.write(tmp_path)):
        front = {"tls_cert": cert, "tls_key": key, **({} if client_ca is None else {"tls_client_ca": client_ca})}
        async with serve_http(model, front=front) as server:
            url = server.url.replace("http:", "https:")
            async with httpx.AsyncClient(base_url=url, verify=trusted) as stranger:
                if client_ca is None:
                    assert (await stranger.post(PATH, json={"prompt": "x"})).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await stranger.get("/version")
            trusted.load_cert_chain(*authority.issue("client").write(tmp_path, "client"))
            async with httpx.AsyncClient(base_url=url, verify=trusted) as known:
                assert (await known.get("/version")).status_code == 200
            with pytest.raises(httpx.TransportError):
                await server.client.get("/version")
        trusted = ssl.create_default_context(cafile=authority.write(tmp_path))


async def test_renewed_certificates_count(model: Path, tmp_path: Path) -> None:
    """Renewed certificates are loaded for the server itself and for the authority of its clients."""
    ours, others = Authority("ours"), Authority("others")
    cert, key = ours.issue("127.0.0.1").write(tmp_path, "server")
    ca = ours.write(tmp_path)
    front = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ca}

    def trusting(authority: Authority, client: Authority) -> ssl.SSLContext:
        trusted = ssl.create_default_context(cadata=authority.cert.decode())
        trusted.load_cert_chain(*client.issue("client").write(tmp_path, "client"))
        return trusted

    async with serve_http(model, front=front) as server:
        url = server.url.replace("http:", "https:")

        async def is_served(trusted: ssl.SSLContext) -> bool:
            async with httpx.AsyncClient(base_url=url, verify=trusted) as client:
                try:
                    return (await client.get("/version")).status_code == 200
                except httpx.TransportError:
                    return False

        assert await is_served(trusting(ours, ours))
        others.issue("127.0.0.1").write(tmp_path, "server")
        others.write(tmp_path)
        renewed = trusting(others, others)
        async with asyncio.timeout(20):
            while not await is_served(renewed):  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.05)
        assert not await is_served(trusting(others, ours))


async def test_certificates_tell_tenants_apart(model: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants, initech={"certificates": ["initech.example"]})
    authority = Authority("ours")
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.write(tmp_path)}
    front = {"tenants": str(tenants), "scheduler_api_key_file": key_file(tmp_path, "root"), **tls}
    async with serve_http(model, tenants=str(tenants), front=front) as server:
        url = server.url.replace("http:", "https:")
        key_of_acme = {"authorization": f"Bearer {KEYS['acme']}"}
        for name, headers, status in (
            ("initech.example", None, 200),
            ("stranger.example", None, 401),
            ("stranger.example", key_of_acme, 200),
            ("initech.example", {"authorization": "Bearer nonsense"}, 401),
        ):
            trusted = ssl.create_default_context(cafile=authority.write(tmp_path))
            trusted.load_cert_chain(*authority.issue(name).write(tmp_path, "client"))
            async with httpx.AsyncClient(base_url=url, verify=trusted) as client:
                response = await client.post(PATH, json={"prompt": "x", "max_tokens": 1}, headers=headers)
                assert response.status_code == status, response.text
                other = await client.post(PATH, json={"prompt": "x", "tenant": "globex"}, headers=headers)
                assert other.status_code == (403 if status == 200 else 401)


async def test_without_tenants_api_keys_are_ignored(server: HttpServer) -> None:
    response = await server.post(PATH, headers={"authorization": "Bearer EMPTY"}, prompt="x")
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_client_disconnect_aborts_its_requests(server: HttpServer, stream: bool) -> None:
    server.stack.worker.step_seconds = 0.02
    asked = {"prompt": ["x", "y"], "max_tokens": 200, "ignore_eos": True, "stream": stream, "n": 2}
    call = asyncio.create_task(server.post(PATH, **asked))
    await server.stack.until(lambda loads: loads.num_running == 4)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await server.stack.until_idle()


async def test_a_client_that_goes_while_it_waits(server: HttpServer) -> None:
    """The client disconnects before it has received any byte."""
    await server.stack.worker.kill()
    call = asyncio.create_task(server.post(PATH, prompt="x", stream=True))
    await server.stack.until(lambda loads: loads.num_waiting == 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await server.stack.until(lambda loads: loads.num_waiting == 0)


async def test_a_silent_wait_sends_comments(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.05)
    async with serve_http(model) as server:
        server.stack.worker.step_seconds = 0.5
        response = await server.post(PATH, prompt="x", max_tokens=3, stream=True, logprobs=0)
    lines = [line for line in response.text.split("\n") if line]
    assert lines[0] == ": waiting"
    assert lines[-1] == DONE
    assert sum(line.startswith("data: {") for line in lines) >= 2


async def test_a_failure_behind_the_first_event_is_an_event(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.02
    asked = {"prompt": "x", "seed": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with server.client.stream("POST", PATH, json=asked) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        server.stack.stop_now.set()
        server.stack.stop.set()
        told = [line async for line in lines if line]
    assert told[-1] == DONE
    error = json.loads(told[-2].removeprefix("data: "))["error"]
    assert error["type"] == "service_unavailable_error"
    with pytest.raises(openai.APIError):
        async for _ in await server.openai.completions.create(model="chatty", prompt="x", stream=True):
            pass


async def test_a_slow_reader_does_not_delay_other_requests(server: HttpServer) -> None:
    """A slow reader does not delay other requests.

    Its unread output waits in the server, limited by the output's own length.
    """
    server.stack.worker.step_seconds = 0.005
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    content = json.dumps(
        {"prompt": "x", "max_tokens": 240, "n": 4, "stream": True, "logprobs": 20, "ignore_eos": True}
    ).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await server.stack.until(lambda loads: loads.num_running == 4)
    await server.complete(prompt="y", max_tokens=200)
    await server.stack.until(lambda loads: loads.num_running == 0)
    text = b""
    while DONE.encode() not in text:
        text += await reader.read(1 << 16)
    assert text.count(b'"finish_reason":"length"') == 4
    writer.close()


async def test_requests_one_after_the_other_on_a_connection(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    content = b'{"prompt": "x", "max_tokens": 2}'
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write((head.encode() + content) * 3)
    text = b""
    async with asyncio.timeout(10):
        while text.count(b"200 OK") < 3 or not text.endswith(b"}"):
            text += await reader.read(1 << 16)
    writer.close()


async def test_drawn_requests_are_never_a_failure(server: HttpServer) -> None:
    """A request with random field values either succeeds or fails with a client error."""
    draw = seeded()
    values: list[Any] = [
        None, True, False, 0, 1, -1, 2**31, 2**64, 0.5, -0.0, 1e300, "", "x", "é🐢", "x" * 500, [], [1], ["x"], [[1]],
        [None], {}, {"a": 1}, {"type": "json_object"}, {"type": "text"}, {"include_usage": True}, [{"role": "user"}],
        {"5": 1}, {"json": {}}, {"regex": "a"}, {"choice": ["a"]}, "[a", [{"role": "user", "content": "x"}],
    ]  # fmt: skip
    for path in (PATH, "/v1/chat/completions"):
        names = await _field_names(path)
        for _ in range(150):
            asked = {name: draw.choice(values) for name in draw.sample(names, draw.randrange(4))}
            asked = {"prompt": "x", "max_tokens": 2} | asked if path == PATH else {"max_tokens": 2} | asked
            response = await server.post(path, **asked)
            assert response.status_code in (200, 400, 404), (asked, response.text)
    await server.stack.until_idle()


async def _field_names(path: str) -> list[str]:
    from scheduler_service.api.http.requests import ChatCompletionRequest, CompletionRequest

    return list((CompletionRequest if path == PATH else ChatCompletionRequest).__struct_fields__)
