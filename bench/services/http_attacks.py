"""The requests of a hostile HTTP client, repeated until its time is over."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from bench.services.hostile import KEYS, PAUSE_S
from testing.services import HOST

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
KEY = f"authorization: Bearer {KEYS['hostile']}"
MAX_BODY_BYTES = 4 << 20
SHOWN_BYTES = 1 << 14  # number of bytes of a response that are kept
ANSWER_S = 30.0  # timeout of a response
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SMUGGLED = "body served as a request"
NEWLINE = 199  # a token of bench.services.hostile's tokenizer
VALUES: list[Any] = [
    None, True, 0, 1, -1, 2**31, 2**64, 1e308, "", "x", "\ud800", "é🐢\x00", "x" * 3000, [], [[]], [None], {},
    {"a": {"b": [1]}}, {"role": "user"}, "{{ 1/0 }}", "[a", {"type": "text"}, {"5": 1}, {"regex": "(a|b)*"},
]  # fmt: skip
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "once", "max_tokens": 3, "n": 2, "logprobs": 1, "stop": ["a"], "seed": 1}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True, "logit_bias": {"5": 1.0}}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 2, "store": False}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
# The templates of the served model: the tool call formats that are most expensive to parse, each selected by a marker
# text.
TEMPLATES = {
    "qwen-coder": "<tool_call> <function=",
    "glm": "<think> </think> <tool_call> <arg_key>",
    "pythonic": "[func_name1(params_name1=params_value1)]",
}
USER = {"role": "user", "content": "hi"}
# Messages with values of a wrong type or invalid text.
MESSAGES: list[Any] = [
    {"role": None, "content": "hi"},
    {"role": 123, "content": "hi"},
    {"role": ["user"], "content": "hi"},
    {"role": "user"},
    {"role": "user", "content": "\ud800"},
    {"role": "tool", "content": "hi", "tool_call_id": 1, "name": 2},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
    },
]


def posted(path: str, content: bytes, *headers: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}", *headers)
    return "\r\n".join((*lines, "", "")).encode() + content


def got(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{KEY}\r\n\r\n".encode()


def asked(path: str, body: Mapping[str, Any] | str) -> bytes:
    """Return a request with the attacker's key. `body` may already be JSON text."""
    content = body if isinstance(body, str) else json.dumps(body)
    return posted(path, content.encode(), KEY, "connection: close")


def changed(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value in which one part is replaced by another value."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        return value | {name + "x" * (rng.random() < 0.1): changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.6:
        return [*value, changed(rng, rng.choice(value))]
    return rng.choice(VALUES)


def mutated(rng: random.Random) -> bytes:
    path, body = rng.choice(REQUESTS)
    for _ in range(rng.randint(1, 3)):
        body = changed(rng, body)
    sent = bytearray(asked(path, json.dumps(body)))  # the body may no longer be a JSON object
    for _ in range(rng.choice((0, 0, 1, 3))):
        place = rng.randrange(len(sent))
        sent[place : place + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 3))
    return bytes(sent)


def repeated(part: str, num_bytes: int) -> str:
    """Return JSON list elements of about `num_bytes` bytes in total."""
    return ",".join([part] * (num_bytes // (len(part) + 1)))


def with_tool(parameters: Any, template: str, **fields: Any) -> dict[str, Any]:
    """Return a chat request with a tool of these parameters, using a template of the served model."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": [USER], "tools": [tool], "chat_template": template, "max_tokens": 1} | fields


def cyclic_schema() -> dict[str, Any]:
    return {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 40}}}


def defined_schema(num: int) -> dict[str, Any]:
    """Return a schema with `num` properties and `num` definitions."""
    properties = {f"a{number}": {"type": "integer"} for number in range(num)}
    return {"properties": properties, "$defs": {f"d{number}": {"const": number} for number in range(num)}}


class Attacker:
    """A client that sends hostile requests and counts the responses.

    Attributes:
        answers: the number of responses by status. "none" means no response. "429 at once" and "503 at once" mean that
            no retry time was given. SMUGGLED counts bodies that the server treated as requests.
    """

    def __init__(self, port: int, until: float) -> None:
        """Create an attacker. `until` is a time of the monotonic clock."""
        self._port = port
        self._until = until
        self._rng = random.Random(0)
        self._large: dict[str, bytes] = {}
        self._response_id = ""  # of a background response
        self.answers: Counter[str] = Counter()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._until

    async def run(self, name: str) -> None:
        attack = ATTACKS[name]

        async def again_and_again() -> None:
            for number in itertools.count():
                if self._is_over:
                    return
                await attack.act(self, number)

        await asyncio.gather(*(again_and_again() for _ in range(attack.num_at_once)))

    def _once(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return a large request, which is created on the first call."""
        if name not in self._large:
            self._large[name] = make()
        return self._large[name]

    # Attacks on the protocol

    async def mutate(self, _: int) -> None:
        await self.send(mutated(self._rng))

    async def send_slow_body(self, number: int) -> None:
        content = json.dumps({"prompt": "x" * 200_000, "max_tokens": 1}).encode()
        if number % 2:
            await self.send(posted(COMPLETIONS, content, KEY)[:200], answer_s=5.0)
        else:
            await self.send(posted(COMPLETIONS, content, KEY, "connection: close"), pause=0.05)

    async def send_headers(self, number: int) -> None:
        num_headers = 100_000 if number % 50 == 0 else 90
        headers = (f"x-{index}: y" for index in range(num_headers))
        await self.send(posted("/tokenize", b"{}", KEY, *headers, "connection: close"))

    async def upgrade(self, _: int) -> None:
        """Offer HTTP/2 on a POST, like Java's client, with a body that is itself a request."""
        headers = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAAB", KEY)
        inner = f"DELETE /v1/requests/other HTTP/1.1\r\nhost: localhost\r\n{KEY}\r\nconnection: close\r\n\r\n"
        head = posted("/tokenize", b"", *headers).replace(b"length: 0", b"length: %d" % len(inner))
        answer = await self.send(head, inner.encode(), answer_s=2.0, pause=0.05)
        self.answers[SMUGGLED] += answer.count(b"HTTP/1.1 ") > 1

    async def send_ahead(self, _: int) -> None:
        """Send 40 pipelined requests before the first is answered, or close the sending side."""
        one = posted("/tokenize", b'{"prompt": "x"}', KEY)
        await self.send(one * 40, answer_s=2.0)
        await self.send(one, half_closes=True)
        await self.send(one.replace(b"HTTP/1.1", b"HTTP/1.0", 1))

    async def open_connections(self, _: int) -> None:
        """Hold all connections that the server accepts, and keep opening more."""
        held: list[Connection] = []
        for number in itertools.count():
            if self._is_over:
                break
            source = (f"127.0.0.{2 + number % 8}", 0)  # a single address has too few ports
            try:
                held.append(await asyncio.open_connection(HOST, self._port, local_addr=source))
            except OSError:  # refused, or this process has too many open files
                await asyncio.sleep(PAUSE_S)
            if number % 1000 == 0:
                for reader, writer in held:
                    if reader.at_eof():
                        writer.close()
                self.answers["connections closed"] += sum(reader.at_eof() for reader, _ in held)
                held = [(reader, writer) for reader, writer in held if not reader.at_eof()]
        self.answers["connections held"] += len(held)
        for _, writer in held:
            writer.close()

    # Requests that cost more than their size

    async def name_places(self, number: int) -> None:
        """Send an unknown field whose name looks like a location in the decoder's error messages, by POST and by
        GET."""
        if number % 2:
            await self.send(got("/v1/requests/x?" + "%20-%20at%20%60%24" * 3000 + "%0A=1"))
        else:
            await self.send(asked(COMPLETIONS, '{"' + " - at `$" * 13_000 + '\\n": 1}'))

    async def send_cyclic_schema(self, number: int) -> None:
        await self.send(asked(CHAT, with_tool(cyclic_schema(), tuple(TEMPLATES)[number % len(TEMPLATES)])))

    async def send_wide_schema(self, number: int) -> None:
        template = tuple(TEMPLATES)[number % len(TEMPLATES)]
        num = 120 if template == "pythonic" else 2500
        await self.send(self._once(template, lambda: asked(CHAT, with_tool(defined_schema(num), template))))

    async def write_newlines(self, _: int) -> None:
        """Make the model write only newlines, in a chat with tools."""
        body = with_tool({}, "qwen-coder", max_tokens=2000, logit_bias={NEWLINE: 100}, temperature=0, ignore_eos=True)
        await self.send(asked(CHAT, body | {"tool_choice": "none" if self._rng.random() < 0.2 else "auto"}))

    async def write_zeros(self, _: int) -> None:
        """Make the model call a tool with an invalid number."""
        pattern = "<tool_call>\\n<function=f>\\n<parameter=a>\\n0{1500}x\\n</parameter>\\n</function>\\n</tool_call>"
        parameters = {"properties": {"a": {"type": "integer"}}}
        body = with_tool(parameters, "qwen-coder", max_tokens=2000, structured_outputs={"regex": pattern})
        await self.send(asked(CHAT, body))

    async def send_wide_body(self, number: int) -> None:
        """Send millions of values in a field that accepts few."""
        field = ("metadata", "allowed_token_ids", "bad_words", "logit_bias", "stop")[number % 5]
        await self.send(self._once(field, lambda: _wide_body(field)))

    async def send_large_body(self, number: int) -> None:
        """Send a body larger than the limit."""
        piece = ('"x",', "[", "1,", '{"a":', '"\\u00e9",')[number % 5]
        content = b'{"prompt": [' + (piece * ((15 << 20) // len(piece))).encode()
        await self.send(posted(COMPLETIONS, content, KEY, "connection: close"))

    async def read_pages(self, number: int) -> None:
        await self.send(got("/docs" if number % 2 else "/openapi.json"))

    # Requests that must not delay other clients' requests

    async def render_chats(self, _: int) -> None:
        messages = [{"role": "user", "content": "x" * 200}] * 1300
        await self.send(self._once("chat", lambda: asked(CHAT, {"messages": messages, "max_tokens": 1})))

    async def send_roles(self, _: int) -> None:
        """Send a role of millions of characters, different each time."""
        role = f"{self._rng.random()}" + "x" * (MAX_BODY_BYTES - 1000)
        await self.send(asked(CHAT, {"messages": [{"role": role, "content": "hi"}], "max_tokens": 1}))

    async def send_no_texts(self, _: int) -> None:
        path = self._rng.choice((CHAT, "/tokenize", f"{CHAT}/render"))
        await self.send(asked(path, {"messages": [USER, self._rng.choice(MESSAGES)]}))

    async def detokenize(self, _: int) -> None:
        await self.send(self._once("ids", lambda: asked("/detokenize", f'{{"tokens": [{_ids()}]}}')))

    async def echo(self, _: int) -> None:
        make = lambda: asked(COMPLETIONS, f'{{"prompt": [{_ids()}], "echo": true, "max_tokens": 0}}')  # noqa: E731
        await self.send(self._once("echo", make))

    async def report_prompts(self, _: int) -> None:
        """Request all log-probabilities of as many long prompts as the quota allows."""
        prompts = [[self._rng.randrange(300, 1000) for _ in range(1900)] for _ in range(3)]
        await self.send(asked(COMPLETIONS, {"prompt": prompts, "prompt_logprobs": 20, "max_tokens": 1}))

    async def leave_unread(self, _: int) -> None:
        """Request large responses, and read none of them."""
        text = "x y " * 60_000
        await self.send(self._once("text", lambda: asked("/tokenize", {"prompt": text})), answer_s=5.0, reads=False)

    async def read_background(self, number: int) -> None:
        """Create a background response to a long conversation, and read it repeatedly."""
        if number % 50 == 0:
            items = [{"role": "user", "content": "x" * 50}] * 20
            body = {"input": items, "background": True, "store": True, "max_output_tokens": 8}
            answer = await self.send(asked("/v1/responses", body))
            if answer.startswith(b"HTTP/1.1 200 "):
                self._response_id = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
        await self.send(got(f"/v1/responses/{self._response_id}"))

    async def send(
        self,
        sent: bytes,
        later: bytes = b"",
        *,
        pause: float = 0.0,
        answer_s: float = ANSWER_S,
        half_closes: bool = False,
        reads: bool = True,
    ) -> bytes:
        """Send a request, count the response, and return its beginning.

        With `pause`, the request is sent in pieces with pauses between them.
        """
        answer = b""
        try:
            reader, writer = await asyncio.open_connection(HOST, self._port, limit=1 << 16)
            try:
                size = 4096 if pause else len(sent)
                for piece in (*(sent[start : start + size] for start in range(0, len(sent), size)), later):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause)
                if half_closes:
                    writer.write_eof()
                async with asyncio.timeout(answer_s):
                    if not reads:
                        await asyncio.sleep(answer_s)
                    while piece := await reader.read(1 << 16):
                        answer += piece[: SHOWN_BYTES - len(answer)]
            finally:
                writer.close()
        except (OSError, TimeoutError):
            pass
        self._count(answer)
        return answer

    def _count(self, answer: bytes) -> None:
        status = answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.1 ") else "none"
        if status in ("429", "503") and b"\r\nretry-after: " not in answer.partition(b"\r\n\r\n")[0].lower() + b"\r\n":
            status += " at once"
        self.answers[status] += 1


def _ids() -> str:
    return repeated("300", MAX_BODY_BYTES - 1000)


def _wide_body(field: str) -> bytes:
    wide = {
        "metadata": f'{{"a": [{repeated("[]", MAX_BODY_BYTES - 1000)}]}}',
        "allowed_token_ids": f"[{repeated('5', MAX_BODY_BYTES - 1000)}]",
        "bad_words": f"[{repeated(chr(34) + 'a' + chr(34), MAX_BODY_BYTES - 1000)}]",
        "logit_bias": f"{{{','.join(f'{chr(34)}{number}{chr(34)}:1' for number in range(300_000))}}}",
        "stop": f"[{repeated(chr(34) + 'a' + chr(34), MAX_BODY_BYTES - 1000)}]",
    }
    return asked(COMPLETIONS, f'{{"prompt": "x", "max_tokens": 1, "{field}": {wide[field]}}}')


class Attack(NamedTuple):
    """An act of an attacker, and the number of parallel loops that repeat it."""

    act: Callable[[Attacker, int], Awaitable[None]]
    num_at_once: int


ATTACKS = {
    "mutated requests": Attack(Attacker.mutate, 16),
    "slow bodies": Attack(Attacker.send_slow_body, 400),
    "headers": Attack(Attacker.send_headers, 16),
    "upgrades": Attack(Attacker.upgrade, 8),
    "requests ahead": Attack(Attacker.send_ahead, 8),
    "connections": Attack(Attacker.open_connections, 1),
    "places": Attack(Attacker.name_places, 2),
    "cyclic schemas": Attack(Attacker.send_cyclic_schema, 2),
    "wide schemas": Attack(Attacker.send_wide_schema, 2),
    "newlines": Attack(Attacker.write_newlines, 2),
    "zeros": Attack(Attacker.write_zeros, 2),
    "wide bodies": Attack(Attacker.send_wide_body, 4),
    "large bodies": Attack(Attacker.send_large_body, 4),
    "pages": Attack(Attacker.read_pages, 4),
    "chats": Attack(Attacker.render_chats, 40),
    "roles": Attack(Attacker.send_roles, 2),
    "no texts": Attack(Attacker.send_no_texts, 4),
    "detokenized ids": Attack(Attacker.detokenize, 2),
    "echoes": Attack(Attacker.echo, 2),
    "log-probabilities": Attack(Attacker.report_prompts, 1),
    "unread answers": Attack(Attacker.leave_unread, 40),
    "background responses": Attack(Attacker.read_background, 4),
}
