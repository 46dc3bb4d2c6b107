"""The HTTP door of a front end before the scheduler of a stack, in this process."""

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
)


def make_chat_checkpoint(path: Path, *, max_model_len: int = 256, **named: str) -> Path:
    """One with a chat template, and with others by name; its end token can be read by grammars."""
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
    """What several events hold of one list."""
    return list(itertools.chain.from_iterable(columns))


def steady(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object of an answer without what differs from call to call."""
    drawn = ("id",) if "type" in value else ()  # of an item of a response
    return {name: each for name, each in value.items() if name not in (*_CHANGING, *drawn)}


@dataclass
class HttpServer:
    stack: Stack
    front: FrontEnd
    url: str
    client: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """A completion has a seed, or its output may be at its end before the test is."""
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
        """The events of a stream, which ends as it must."""
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


# Of a request that a front end has begun: its call, as it was read, and as it was queued.
Begun = tuple[Call, ParsedRequest, Request]


@contextmanager
def noting_requests() -> Iterator[list[Begun]]:
    """Note the requests that front ends begin inside the block."""
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
    """Return the fixture of a server that tests of a module share; these tests run on the module's event loop."""

    @pytest_asyncio.fixture(loop_scope="module", scope="module", name=name)
    async def start(model: Path) -> AsyncIterator[HttpServer]:
        async with serve_http(model) as server:
            yield server

    return start
