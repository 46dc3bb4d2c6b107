"""The text of a prompt becomes tokens here, within bounds of time and memory whatever clients send."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.refusal import Reason, RefusedError, invalid

# Texts of more bytes take their turn: one at a time of each tenant, on a thread of their own.
LONG_TEXT_BYTES = 64 * 1024
ANY_NUMBER = 2**31  # of tokens, where a text need not fit the model


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits in bytes of UTF-8; `max_waiting` and `max_tenant_waiting` are of all texts that wait for their tokens, so
    that no tenant's keep out those of all others."""

    max_prompt: int = 1024 * 1024
    max_waiting: int = 64 * 1024 * 1024

    @property
    def max_tenant_waiting(self) -> int:
        return max(self.max_prompt, self.max_waiting // 4)


class PromptTexts:
    def __init__(self, tokenizer: Tokenizer, limits: TextLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._waiting: Counter[str] = Counter()  # bytes by tenant; none is 0
        self._long_texts: dict[str, asyncio.Lock] = {}  # of tenants that have one; waited for in order of arrival
        self.num_waiting_bytes = 0

    async def encode(
        self,
        text: str,
        tenant: str,
        max_sequence_tokens: int,
        *,
        field: str = "text",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the tokens of a prompt, which `field` of the request holds. Raises RefusedError."""
        size = len(text.encode())
        self._check_size(size, max_sequence_tokens, field)
        try:
            # A long text waits for the one before it of its tenant, so that many of one tenant hold up no other's.
            is_long = size > LONG_TEXT_BYTES
            lock = self._long_texts.setdefault(tenant, asyncio.Lock()) if is_long else nullcontext()
            async with self._counted(size, tenant), lock:
                token_ids = await self._tokenizer.encode(
                    text,
                    max_sequence_tokens - 1,
                    add_special_tokens=add_special_tokens,
                    is_long=is_long,
                )
        except ValueError as error:
            raise invalid(field, str(error)) from None
        if isinstance(token_ids, int):
            raise too_many_tokens(field, token_ids, max_sequence_tokens)
        return token_ids

    def _check_size(self, size: int, max_sequence_tokens: int, field: str) -> None:
        """Raises RefusedError for a text that is not worth tokenizing."""
        if size > self._limits.max_prompt:
            raise invalid(
                field,
                f"the prompt has {size} bytes, this server takes {self._limits.max_prompt} (--max-prompt-bytes); "
                "shorten it, or send its token_ids",
            )
        most = self._tokenizer.max_token_bytes
        if most is not None and size > most * (max_sequence_tokens - 1):
            raise invalid(
                field,
                f"the prompt has {size} bytes and so more than {max_sequence_tokens - 1} tokens, since none has more "
                f"than {most} bytes; this server allows {max_sequence_tokens} for prompt and output together; "
                "shorten it",
            )

    @asynccontextmanager
    async def _counted(self, size: int, tenant: str) -> AsyncIterator[None]:
        """Count the text inside the block, in which it waits for its tokens. Raises RefusedError."""
        for whose, waiting, limit in (
            ("this tenant", self._waiting[tenant], self._limits.max_tenant_waiting),
            ("all tenants", self.num_waiting_bytes, self._limits.max_waiting),
        ):
            if waiting and waiting + size > limit:
                self._forget_if_unused(tenant)
                raise RefusedError(
                    Reason.RESOURCE_EXHAUSTED,
                    f"texts of {whose} with {waiting} bytes wait to be tokenized, this one has {size}, and the limit "
                    f"is {limit}; try again later",
                )
        self._waiting[tenant] += size
        self.num_waiting_bytes += size
        try:
            yield
        finally:
            self._waiting[tenant] -= size
            self.num_waiting_bytes -= size
            self._forget_if_unused(tenant)

    def _forget_if_unused(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._long_texts.pop(tenant, None)


def too_many_tokens(field: str, num_tokens: int, max_sequence_tokens: int) -> RefusedError:
    return invalid(
        field,
        f"the prompt has {num_tokens} tokens, this server allows {max_sequence_tokens} for prompt and output "
        f"together; shorten the prompt to {max_sequence_tokens - 1} tokens or less",
    )
