"""Prompt texts: early refusal before tokenization, the queue of waiting texts, and its effect on other requests."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from scheduler_service.serving.prompt_text import PromptTexts, TextLimits
from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.turns import PIECE_SIZE, Turns
from testing.scheduler_stack import details, request, serve
from testing.serving.failures import failure_of

LONG = "x" * (PIECE_SIZE + 1)
_Result = TypeVar("_Result")


class HeldTokenizer:
    """A tokenizer whose calls wait until they are released, in the order of arrival."""

    def __init__(self, max_token_bytes: int | None = None) -> None:
        self.max_token_bytes = max_token_bytes
        self.waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._has_more = asyncio.Event()

    async def encode(
        self,
        text: str,
        max_tokens: int,
        then: Callable[[list[int]], _Result],
        *,
        add_special_tokens: bool,
        is_long: bool,
    ) -> _Result | int:
        assert is_long == (len(text.encode()) > PIECE_SIZE)
        release: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((text, release))
        self._has_more.set()
        await release
        return then([1] * len(text)) if len(text) <= max_tokens else len(text)

    async def until_waiting(self, count: int) -> list[str]:
        async with asyncio.timeout(5):
            while len(self.waiting) < count:
                self._has_more.clear()
                await self._has_more.wait()
        return [text for text, _ in self.waiting]

    def release(self, index: int) -> None:
        self.waiting.pop(index)[1].set_result(None)


def limited(tokenizer: HeldTokenizer, limits: TextLimits) -> tuple[PromptTexts, Turns]:
    turns = limits.turns()
    return PromptTexts(tokenizer, limits, turns), turns


async def refusal(texts: PromptTexts, text: str, tenant: str = "", limit: int = 10**6) -> RefusedError:
    with pytest.raises(RefusedError) as error:
        await texts.encode(text, tenant, limit)
    return error.value


async def test_what_cannot_fit_is_not_tokenized() -> None:
    tokenizer = HeldTokenizer(max_token_bytes=8)
    texts, _ = limited(tokenizer, TextLimits(max_prompt=1000))
    too_long = await refusal(texts, "\u65e5" * 334)
    assert (too_long.reason, too_long.field) == (Reason.INVALID_ARGUMENT, "text")
    assert "has 1002 bytes, this server accepts 1000 (--max-prompt-bytes)" in str(too_long)
    too_many = await refusal(texts, "x" * 73, limit=10)
    assert "so more than 9 tokens, since a token has at most 8 bytes" in str(too_many)
    assert not tokenizer.waiting
    task = asyncio.create_task(texts.encode("x" * 9, "", 10))
    assert await tokenizer.until_waiting(1) == ["x" * 9]
    tokenizer.release(0)
    assert await task == [1] * 9


async def test_too_many_tokens_name_their_number() -> None:
    tokenizer = HeldTokenizer()
    texts, _ = limited(tokenizer, TextLimits())
    task = asyncio.create_task(texts.encode("x" * 20, "", 20))
    await tokenizer.until_waiting(1)
    tokenizer.release(0)
    with pytest.raises(RefusedError, match="the prompt has 20 tokens, this server allows 20"):
        await task


async def test_what_waits_is_bounded_for_a_tenant_and_for_all() -> None:
    tokenizer = HeldTokenizer()
    texts, turns = limited(tokenizer, TextLimits(max_prompt=60, max_waiting=100))
    tasks = [asyncio.create_task(texts.encode("x" * 50, tenant, 1000)) for tenant in ("a", "b")]
    await tokenizer.until_waiting(2)
    assert turns.waiting.num_bytes == 100
    for tenant, whose in (("a", "this tenant hold 50 bytes"), ("c", "all tenants hold 100 bytes")):
        error = await refusal(texts, "x" * 20, tenant)
        assert error.reason is Reason.RESOURCE_EXHAUSTED
        assert whose in str(error)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert turns.waiting.num_bytes == 50
    tokenizer.release(1)
    await tasks[1]
    assert turns.waiting.num_bytes == 0
    assert not turns.waiting._held
    assert not turns._queues


def test_a_tenant_has_a_quarter_and_at_least_one_prompt() -> None:
    assert TextLimits().max_tenant_waiting == 16 << 20
    assert TextLimits(max_prompt=1000, max_waiting=8000).max_tenant_waiting == 2000
    assert TextLimits(max_prompt=3000, max_waiting=8000).max_tenant_waiting == 3000


async def test_one_long_text_of_a_tenant_at_a_time() -> None:
    tokenizer = HeldTokenizer()
    texts, turns = limited(tokenizer, TextLimits())
    sent = [("a", LONG + "1"), ("a", LONG + "2"), ("b", LONG + "3"), ("a", "short")]
    tasks = [asyncio.create_task(texts.encode(text, tenant, 10**6)) for tenant, text in sent]
    assert await tokenizer.until_waiting(3) == [LONG + "1", LONG + "3", "short"]
    tokenizer.release(0)
    await tasks[0]
    assert await tokenizer.until_waiting(3) == [LONG + "3", "short", LONG + "2"]
    for _ in range(3):
        tokenizer.release(0)
    await asyncio.gather(*tasks)
    assert not turns._queues


async def test_a_server_refuses_long_texts_at_once(checkpoint: Path) -> None:
    async with serve(checkpoint, max_prompt_bytes=2000) as stack:
        for text, reason in (("once " * 401, "--max-prompt-bytes"), ("a" * 1999, "more than 255 tokens")):
            error = await failure_of(stack.generate(request(text, max_tokens=2)), grpc.StatusCode.INVALID_ARGUMENT)
            assert reason in (error.details() or "") or "the prompt has" in (error.details() or "")
            assert details(error)[0].field_violations[0].field == "text"
