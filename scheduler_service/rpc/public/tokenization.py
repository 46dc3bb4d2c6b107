"""Tokenize and Detokenize: the served checkpoint's tokenizer for clients that have none."""

import asyncio
from typing import TypeVar

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.public.prompt_text import PromptTexts
from scheduler_service.rpc.status import invalid
from scheduler_service.rpc.tenants.authentication import tenant_of_call
from scheduler_service.serving.tokenizer import Tokenizer

Needed = TypeVar("Needed")

_PIECE_TOKENS = 16_384  # that are put into a message before others have their turn
_ANY_NUMBER = 2**31  # of tokens: a text need not fit the model to be counted


async def tokenize(request: scheduler_pb2.TokenizeRequest, texts: PromptTexts | None) -> scheduler_pb2.TokenizeResponse:
    """Make tokens of texts. Raises RpcError."""
    texts = _required(texts, "texts")
    tenant = tenant_of_call("")
    add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
    response = scheduler_pb2.TokenizeResponse()
    for index, text in enumerate(request.texts):
        token_ids = await texts.encode(
            text, tenant, _ANY_NUMBER, field=f"texts[{index}]", add_special_tokens=add_special_tokens
        )
        ids = response.prompts.add().ids
        for start in range(0, len(token_ids), _PIECE_TOKENS):
            ids.extend(token_ids[start : start + _PIECE_TOKENS])
            await asyncio.sleep(0)
    return response


async def detokenize(
    request: scheduler_pb2.DetokenizeRequest, tokenizer: Tokenizer | None, vocab_size: int
) -> scheduler_pb2.DetokenizeResponse:
    """Make texts of tokens. Raises RpcError."""
    tokenizer = _required(tokenizer, "prompts")
    skip_special_tokens = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    response = scheduler_pb2.DetokenizeResponse()
    for index, prompt in enumerate(request.prompts):
        highest = max(prompt.ids, default=0)
        if highest >= vocab_size:
            raise invalid(
                f"prompts[{index}].ids", f"token id {highest} is not below the vocabulary's size, {vocab_size}"
            )
        response.texts.append(await tokenizer.text_of(prompt.ids, skip_special_tokens=skip_special_tokens))
    return response


def _required(needed: Needed | None, field: str) -> Needed:
    """Raises RpcError if the checkpoint has no tokenizer, and so none of this."""
    if needed is None:
        raise invalid(field, "the served checkpoint has no tokenizer; send prompts as token ids")
    return needed
