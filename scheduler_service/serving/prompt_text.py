"""Tokenization and detokenization of prompts, within limits on time and memory for any input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from scheduler_service.serving.checkpoint.infill_tokens import PromptParts
from scheduler_service.serving.checkpoint.tokenizer import IncrementalDecoder, Tokenizer
from scheduler_service.serving.refusal import ContextOverflow, RefusedError, invalid
from scheduler_service.serving.turns import PIECE_SIZE, TenantBytes, Turns

_Result = TypeVar("_Result")
ANY_NUMBER = 2**31  # no limit on tokens, for texts that need not fit the model
_TOKEN_BYTES = 8  # memory of a token id in a list
_PIECE_TOKENS = PIECE_SIZE // _TOKEN_BYTES  # per turn: a decoder holds the interpreter's lock


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits on the sizes of texts in requests, in bytes of UTF-8.

    `max_prompt` limits one prompt. `max_waiting` limits the total size of all texts, conversations and token lists that
    wait to be processed. `max_tenant_waiting` limits this size for one tenant, so that other tenants always have room.
    """

    max_prompt: int = 1024 * 1024
    max_waiting: int = 64 * 1024 * 1024

    @property
    def max_tenant_waiting(self) -> int:
        return max(self.max_prompt, self.max_waiting // 4)

    def turns(self) -> Turns:
        return Turns(TenantBytes("texts", self.max_waiting, self.max_tenant_waiting))


class PromptTexts:
    def __init__(self, tokenizer: Tokenizer, limits: TextLimits, turns: Turns) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._turns = turns

    async def encode(
        self,
        text: str,
        tenant: str,
        max_sequence_tokens: int,
        *,
        field: str = "text",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Tokenize a prompt's text and return its token ids. `max_sequence_tokens` is the maximum number of tokens of
        the sequence, including at least one output token. `field` is the path of the request field that contains the
        text, for error messages. Raise RefusedError if the text is too long or cannot be tokenized."""
        return await self.encode_then(
            _unchanged, text, tenant, max_sequence_tokens, field=field, add_special_tokens=add_special_tokens
        )

    async def encode_then(
        self,
        then: Callable[[list[int]], _Result],
        prompt: str | PromptParts,
        tenant: str,
        max_sequence_tokens: int,
        *,
        field: str,
        add_special_tokens: bool,
    ) -> _Result:
        """Tokenize a prompt on a thread and call `then` with the token ids on the same thread. Return the result
        of `then`. A list of token ids takes 36 bytes for each token; with this method no list has to wait for another
        turn of a thread. Raise RefusedError if the text is too long or cannot be tokenized."""
        parts = (prompt,) if isinstance(prompt, str) else prompt
        size = sum(len(part.encode()) for part in parts if isinstance(part, str))
        self._check_size(size, max_sequence_tokens, field)
        is_long = size > PIECE_SIZE
        try:
            with self._turns.waiting.held(tenant, size):
                async with self._turns.turn(tenant, is_long=is_long):
                    made = await self._tokenizer.encode(
                        prompt,
                        max_sequence_tokens - 1,
                        then,
                        add_special_tokens=add_special_tokens,
                        is_long=is_long,
                    )
        except ValueError as error:
            raise invalid(field, str(error)) from None
        if isinstance(made, int):
            raise too_many_tokens(field, made, max_sequence_tokens)
        return made

    async def decode(self, token_ids: Sequence[int], tenant: str, *, skip_special_tokens: bool) -> str:
        """Decode token ids to text and return it. The ids must be in the vocabulary. A long list is decoded in pieces,
        so that other tenants can use the thread between two pieces. Raise RefusedError if too many bytes of texts wait
        to be processed."""
        size, texts = len(token_ids) * _TOKEN_BYTES, []
        if size <= PIECE_SIZE:
            whole = partial(self._tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
            return await self._turns.run(tenant, size, whole)
        decoder = IncrementalDecoder(self._tokenizer, (), skip_special_tokens=skip_special_tokens)
        with self._turns.waiting.held(tenant, size):
            for start in range(0, len(token_ids), _PIECE_TOKENS):
                piece = token_ids[start : start + _PIECE_TOKENS]
                texts.append(await self._turns.call(tenant, decoder.push, piece))
        return "".join(texts) + decoder.flush()

    def _check_size(self, size: int, max_sequence_tokens: int, field: str) -> None:
        """Check the size of a prompt's text, in bytes, before it is tokenized. Raise RefusedError if `size` exceeds the
        limit for a prompt, or if a text of this size always has `max_sequence_tokens` tokens or more."""
        overflow = None if max_sequence_tokens == ANY_NUMBER else ContextOverflow(max_sequence_tokens)
        if size > self._limits.max_prompt:
            raise invalid(
                field,
                f"the prompt has {size} bytes, this server accepts {self._limits.max_prompt} (--max-prompt-bytes); "
                "shorten it, or send its token_ids",
                overflow,
            )
        most = self._tokenizer.max_token_bytes
        if most is not None and size > most * (max_sequence_tokens - 1):
            raise invalid(
                field,
                f"the prompt has {size} bytes and so more than {max_sequence_tokens - 1} tokens, since a token has at "
                f"most {most} bytes; this server allows {max_sequence_tokens} for prompt and output together; "
                "shorten it",
                overflow,
            )


def _unchanged(token_ids: list[int]) -> list[int]:
    return token_ids


def too_many_tokens(field: str, num_tokens: int, max_sequence_tokens: int) -> RefusedError:
    return invalid(
        field,
        f"the prompt has {num_tokens} tokens, this server allows {max_sequence_tokens} for prompt and output "
        f"together; shorten the prompt to {max_sequence_tokens - 1} tokens or less",
        ContextOverflow(max_sequence_tokens, num_tokens),
    )
