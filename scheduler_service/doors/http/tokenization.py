"""`/tokenize` and `/detokenize`, and the prompts of completions and conversations as the tokens that they become."""

import asyncio

from scheduler_service.doors.http.answering import longest_sequence
from scheduler_service.doors.http.answers import DecodedPrompt, RenderedPrompt, Tokens
from scheduler_service.doors.http.options import ReadCall
from scheduler_service.doors.http.prompts import render_messages
from scheduler_service.doors.http.requests import DetokenizeRequest, TokenizeRequest
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.prompt_text import ANY_NUMBER
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call


async def tokenize(request: TokenizeRequest, call: Call, intake: Intake) -> Tokens:
    """Make tokens of a text, or of a conversation. Raises RefusedError."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "send either a prompt or messages")
    if request.prompt is not None:
        text, special, field = request.prompt, request.add_special_tokens is not False, "prompt"
    else:
        text, special, field = (
            await render_messages(intake.model, request),
            request.add_special_tokens is True,
            "messages",
        )
    token_ids = await _encode(text, special, field, call, intake)
    names = list(map(_tokenizer(intake).name_of, token_ids)) if request.return_token_strs else None
    return Tokens(len(token_ids), longest_sequence(intake), token_ids, names)


async def detokenize(request: DetokenizeRequest, call: Call, intake: Intake) -> DecodedPrompt:
    """Make a text of tokens. Raises RefusedError."""
    vocab_size = intake.model.vocab_size
    for position, token_id in enumerate(request.tokens):
        if token_id >= vocab_size:
            raise invalid(
                f"tokens[{position}]", f"token id {token_id} is not below the vocabulary's size, {vocab_size}"
            )
    return DecodedPrompt(await _tokenizer(intake).text_of(request.tokens, skip_special_tokens=False))


async def render(read: ReadCall, intake: Intake, model_name: str) -> list[RenderedPrompt]:
    """Return the tokens of each prompt as they would be queued. Raises RefusedError."""
    with read.names.in_refusals():
        return [
            RenderedPrompt(each.request.request_id, model_name, list(await intake.tokenize(each)))
            for each in read.requests
        ]


async def _encode(text: str, special: bool, field: str, call: Call, intake: Intake) -> list[int]:
    _tokenizer(intake)
    assert intake.texts is not None, "there is a tokenizer"
    tenant = call.caller.tenant("")
    token_ids = await intake.texts.encode(text, tenant, ANY_NUMBER, field=field, add_special_tokens=special)
    await asyncio.sleep(0)  # others have their turn before many numbers are written
    return token_ids


def _tokenizer(intake: Intake) -> Tokenizer:
    if intake.tokenizer is None:
        raise RefusedError(Reason.FAILED_PRECONDITION, "the served checkpoint has no tokenizer; send token ids")
    return intake.tokenizer
