"""The HTTP server of a front end that is connected to the scheduler of a stack, all in this process."""

import itertools
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import pytest_asyncio

from pagewire.hosting.supervisor import free_port
from scheduler_service.core.request import Request
from scheduler_service.links.scheduler.scheduler_link import SchedulerLink
from scheduler_service.serving.active_request import ActiveRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.parsed_request import ParsedRequest
from scheduler_service.serving.tenants.caller import Call
from testing.scheduler_stack import Stack, make_checkpoint, serve
from testing.serving.front_end import FrontEnd, serve_front_end

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
DONE = "data: [DONE]"
_CHANGING = (
    *("created", "created_at", "completed_at", "prompt_tokens_details"),
    *("input_tokens", "input_tokens_details", "cache_read_input_tokens"),
    *("timings", "tokens_cached"),
    *("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
)


def make_chat_checkpoint(path: Path, *, max_model_len: int = 256, **named: str) -> Path:
    """Write a checkpoint with a chat template and further named templates, and return its path.

    Grammars can use its end token.
    """
    make_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"eos_token_id": 0, "max_position_embeddings": max_model_len}
    (path / "config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (path / "additional_chat_templates").mkdir(exist_ok=True)
    for name, template in named.items():
        (path / "additional_chat_templates" / f"{name}.jinja").write_text(template)
    return path


def joined(columns: Iterable[list[Any]]) -> list[Any]:
    """Return the concatenation of a list that several events contain in parts."""
    return list(itertools.chain.from_iterable(columns))


def steady(value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an object of an answer, without the fields that differ from call to call."""
    drawn = ("id",) if "type" in value else ()  # the id of an item of a response
    return {name: each for name, each in value.items() if name not in (*_CHANGING, *drawn)}


@dataclass
class HttpServer:
    """A running front end with an HTTP API, its scheduler's stack, and clients that are connected to the API."""

    stack: Stack
    front: FrontEnd
    url: str
    client: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """Send a POST request.

        A completion gets a seed, because its random output might otherwise end too early for the test.
        """
        seed = {"seed": 0} if path.endswith("/completions") else {}
        return await self.client.post(path, json=seed | body, headers=headers)

    async def complete(self, **body: Any) -> dict[str, Any]:
        return self._answer(await self.post("/v1/completions", **body))

    async def chat(self, *contents: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content} for content in contents]
        return self._answer(await self.post("/v1/chat/completions", **({"messages": messages} | body)))

    async def refusal(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed answer, and check that the stream ends correctly."""
        return self.events_of(await self.post(path, **body | {"stream": True}))

    @staticmethod
    def events_of(response: httpx.Response) -> list[dict[str, Any]]:
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, last = [part for part in response.text.split("\n\n") if part and not part.startswith(":")]
        assert last == DONE
        return [json.loads(event.removeprefix("data: ")) for event in events]

    @staticmethod
    def _answer(response: httpx.Response) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        return response.json()


@asynccontextmanager
async def serve_http(
    checkpoint: Path, *, front: dict[str, Any] | None = None, key: str = "EMPTY", **options: Any
) -> AsyncIterator[HttpServer]:
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    async with (
        serve(checkpoint, **options) as stack,
        serve_front_end(checkpoint, stack.url, http_port=port, **(front or {})) as front_end,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as openai_client,
    ):
        yield HttpServer(stack, front_end, url, client, openai_client)


# A request that a front end has started: its call, the parsed request, and the queued request.
Begun = tuple[Call, ParsedRequest, Request]


@contextmanager
def noting_requests() -> Iterator[list[Begun]]:
    """Record the requests that front ends start inside the block."""
    begun: list[Begun] = []
    start = Intake.start

    def noted(intake: Intake, parsed: ParsedRequest, request: Request, call: Call, **options: Any) -> ActiveRequest:
        active = start(intake, parsed, request, call, **options)
        if isinstance(intake.engine, SchedulerLink):
            begun.append((call, parsed, active.request))
        return active

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Intake, "start", noted)
        yield begun


def server_of_the_module(name: str = "server") -> Any:
    """Return a fixture of a server that the tests of a module share.

    These tests must run on the module's event loop.
    """

    @pytest_asyncio.fixture(loop_scope="module", scope="module", name=name)
    async def start(model: Path) -> AsyncIterator[HttpServer]:
        async with serve_http(model) as server:
            yield server

    return start
