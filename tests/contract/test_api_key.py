"""The option `--api-key` of a scheduler and its front ends: all calls must present one of the keys."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire import options
from pagewire.cli import command, services
from pagewire.llm.llm import serve_flags
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.http.routes import TYPED
from scheduler_service.config import FrontEndConfig, SchedulerConfig
from testing.scheduler_stack import request, serve
from testing.serving.failures import failure_of
from testing.serving.front_end import serve_front_end
from testing.serving.http_server import HttpServer, make_chat_checkpoint, serve_http
from testing.serving.tenants import KEYS, PROMPT, code_of, credentials, generate, key_file

ACCEPTED = f"{KEYS['acme']},{KEYS['globex']}"
CONFIGS = [SchedulerConfig(model="m", api_key=ACCEPTED), FrontEndConfig(model="m", api_key=ACCEPTED)]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Yield a scheduler and a front end that accept the keys of acme and globex."""
    model = make_chat_checkpoint(tmp_path / "model")
    async with serve_http(model, api_key=ACCEPTED, front={"api_key": ACCEPTED}, key=KEYS["acme"]) as opened:
        yield opened


async def test_every_call_needs_a_key(server: HttpServer) -> None:
    bad = [{}, {"authorization": "Bearer key-of-root"}, {"authorization": f"Bearer {ACCEPTED}"}, {"x-api-key": "no"}]
    asked = {"prompt": PROMPT, "max_tokens": 2}
    for headers in bad:
        for path in (
            "/v1/models",
            "/v1/models/x",
            "/metrics",
            "/tokenizer_info",
            "/props",
            "/slots",
            "/api/tags",
            "/api/ps",
        ):
            assert (await server.client.get(path, headers=headers)).status_code == 401, path
        for route in TYPED:
            path = re.sub(r"\{.*?\}", "x", route.path)
            assert (await server.client.request(route.method, path, headers=headers)).status_code == 401, path
    for path in ("/health", "/ping", "/version", "/docs"):
        assert (await server.client.get(path)).status_code == 200
    for headers in ({"authorization": f"Bearer {KEYS['globex']}"}, {"x-api-key": KEYS["acme"]}):
        for tenant in ("", "any"):
            answer = await server.post("/v1/completions", headers, **asked, tenant=tenant)
            assert answer.json()["usage"]["completion_tokens"] == 2, answer.text
        assert (await server.client.get("/metrics", headers=headers)).status_code == 200
    for stub, channel in ((server.stack.stub, server.stack.channel), (server.front.stub, server.front.channel)):
        for metadata in (None, credentials("root")):
            for call in (
                stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata),
                stub.Submit(pb.SubmitRequest(request=request(PROMPT, max_tokens=2)), metadata=metadata),
                stub.Generate(request(PROMPT, max_tokens=2), metadata=metadata).read(),
            ):
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    loads = server.stack.stub.GetLoads(pb.GetLoadsRequest(), metadata=credentials("globex"))
    assert await code_of(loads) is None, "a caller with a key is an operator"


async def test_a_detached_request_of_any_tenant_passes_a_front_end(server: HttpServer) -> None:
    message = request(PROMPT, max_tokens=2)
    message.tenant = "any"
    submitted = await server.front.stub.Submit(pb.SubmitRequest(request=message), metadata=credentials("acme"))
    asked = pb.AttachRequest(request_id=submitted.request_id, tenant="any")
    tokens = [
        token
        async for response in server.front.stub.Attach(asked, metadata=credentials("acme"))
        for token in response.token_ids
    ]
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("scheduler", "front", "reason"),
    [
        (ACCEPTED, {}, "it has API keys; start this front end with the same --tenants or --api-key"),
        (ACCEPTED, {"api_key": KEYS["root"]}, "UNAUTHENTICATED: the caller is unknown"),
        (None, {"api_key": ACCEPTED}, "UNAUTHENTICATED: this server has no API keys"),
    ],
)
async def test_a_front_end_with_other_keys_serves_nothing(
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    scheduler: str | None,
    front: dict[str, str],
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    if not front:
        front = {"scheduler_api_key_file": key_file(tmp_path, "acme")}
    async with (
        serve(checkpoint, api_key=scheduler) as stack,
        serve_front_end(checkpoint, stack.url, waits=False, **front) as opened,
    ):
        metadata = None if "api_key" not in front else (("authorization", f"Bearer {front['api_key'].split(',')[0]}"),)
        async with asyncio.timeout(20):
            details = ""
            while reason not in details:
                call = opened.stub.Generate(request(PROMPT, max_tokens=2), metadata=metadata, wait_for_ready=True)
                details = (await failure_of(call.read(), grpc.StatusCode.UNAVAILABLE)).details() or ""
    assert not any(key in caplog.text for key in KEYS.values())


async def test_a_front_end_whose_keys_differ_in_part_is_told(checkpoint: Path) -> None:
    """The first key of the front end is its own key at the scheduler."""
    async with (
        serve(checkpoint, api_key=KEYS["acme"]) as stack,
        serve_front_end(checkpoint, stack.url, api_key=ACCEPTED) as front,
    ):
        assert len((await generate(front, request(PROMPT, max_tokens=2), "globex")).token_ids[0]) == 2


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_key_is_shown_nowhere(config: SchedulerConfig | FrontEndConfig) -> None:
    assert ACCEPTED not in repr(config)
    assert not any(KEYS["acme"] in flag for flag in options.to_flags(config))
    assert options.to_secret_variables(config) == {"PAGEWIRE_API_KEY": ACCEPTED}
    known = options.options_of(type(config))
    parser = options.Parser(prog="pagewire serve")
    options.add_flags(parser, known)
    options.add_foreign_flags(parser, known)
    for given in (["--api-key", KEYS["acme"], KEYS["globex"]], [f"--api-key={ACCEPTED}"]):
        resolved = options.resolve(known, parser.parse_args(["--model", "m", *given]), {})
        assert resolved.build(type(config)).api_key == ACCEPTED
        (line,) = resolved.describe()
        assert set(line.removeprefix("options from flags: ").split(", ")) == {"model=m", "api_key=(hidden)"}
    resolved = options.resolve(known, parser.parse_args(["--model", "m"]), {"PAGEWIRE_API_KEY": ACCEPTED})
    assert resolved.build(type(config)).api_key == ACCEPTED
    assert "options from environment: api_key=(hidden)" in resolved.describe()
    assert "api_key=None" in options.resolve(known, parser.parse_args(["--model", "m"]), {}).describe_defaults()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_bad_keys_are_refused_unseen(config: SchedulerConfig | FrontEndConfig) -> None:
    for key in ("with space", "kéy", "a,,b", ",", "a\n"):
        with pytest.raises(ValueError, match=r"^--api-key is \(hidden\), but must be printable ASCII without spaces"):
            replace(config, api_key=key).validate()
    with pytest.raises(ValueError, match=r"^--tenants and --api-key \(or PAGEWIRE_API_KEY\) are both given; "):
        replace(config, tenants="tenants.yaml").validate()


def test_clients_name_their_variable(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("status", "chat", "complete", "submit", "attach"):
        assert command.main([verb, "--api-key", "sesame"]) == 2
        told = capsys.readouterr().err
        assert "unknown flag --api-key: set it in the environment variable PAGEWIRE_API_KEY" in told
        assert "sesame" not in told


def test_llm_needs_no_key() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'api_key'"):
        serve_flags("m", {"api_key": "sesame"})
    assert "api_key" in services.API_OPTIONS
