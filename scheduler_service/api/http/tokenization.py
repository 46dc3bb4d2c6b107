"""The endpoints `/tokenize`, `/detokenize` and `/tokenizer_info`, and the endpoints that return the tokens of a
rendered prompt."""

import asyncio
from functools import partial
from typing import Any

from msgspec import Raw

from scheduler_service.api.http.answering import longest_sequence
from scheduler_service.api.http.answers import DecodedPrompt, RenderedPrompt, Tokens, encode, encode_list
from scheduler_service.api.http.prompts import render_messages
from scheduler_service.api.http.request_options import DecodedCall
from scheduler_service.api.http.requests import DetokenizeRequest, TokenizeRequest
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.parsed_request import check_token_id
from scheduler_service.serving.prompt_text import ANY_NUMBER, PromptTexts
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call


async def tokenize(request: TokenizeRequest, call: Call, intake: Intake) -> bytes:
    """Answer a call of `/tokenize`. Return the JSON with the tokens of a text or of a conversation. Raises RefusedError
    unless exactly one of `prompt`, `content` and `messages` is set, or if the checkpoint has no tokenizer."""
    given = [name for name in ("prompt", "content", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        raise invalid("prompt", f"{len(given)} of prompt, content and messages are set; set exactly one of them")
    (field,) = given
    text = await render_messages(request, call, intake) if field == "messages" else getattr(request, field)
    special = request.add_special if field == "content" else request.add_special_tokens
    tokenizer, texts = _tokenizer(intake)
    return await texts.encode_then(
        partial(_written, request, tokenizer, longest_sequence(intake)),
        text,
        call.caller.tenant(""),
        ANY_NUMBER,
        field=field,
        add_special_tokens=field == "prompt" if special is None else special,
    )


def _written(request: TokenizeRequest, tokenizer: Tokenizer, max_model_len: int, token_ids: list[int]) -> bytes:
    tokens = map(partial(_piece, tokenizer), token_ids) if request.with_pieces else token_ids
    names = encode_list(map(tokenizer.name_of, token_ids)) if request.return_token_strs else None
    return encode(Tokens(len(token_ids), max_model_len, encode_list(tokens), names))


def _piece(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """Return a token with its text, or with its bytes if they are not valid UTF-8, as llama-server does."""
    content = tokenizer.bytes_of(token_id)
    text = content.decode(errors="ignore")
    return {"id": token_id, "piece": text if text.encode() == content else [*content]}


async def detokenize(request: DetokenizeRequest, call: Call, intake: Intake) -> bytes:
    """Answer a call of `/detokenize`. Return the JSON with the text of the given tokens. Raises RefusedError if a token
    id is outside the vocabulary, or if the checkpoint has no tokenizer."""
    _, texts = _tokenizer(intake)
    if (highest := max(request.tokens, default=0)) >= intake.model.vocab_size:
        check_token_id(f"tokens[{request.tokens.index(highest)}]", highest, intake.model)
    text = await texts.decode(request.tokens, call.caller.tenant(""), skip_special_tokens=False)
    return encode(DecodedPrompt(text, text))


def described_tokenizer(intake: Intake) -> dict[str, Any]:
    """Answer a call of `/tokenizer_info`. Return the JSON value with the tokenizer's class, special tokens, vocabulary
    size, maximum sequence length and chat template. The fields have the same names as in vLLM. Raises RefusedError if
    the checkpoint has no tokenizer."""
    _tokenizer(intake)
    model = intake.model
    return {
        "tokenizer_class": model.tokenizer_class,
        **model.special_tokens,
        "bos_token_id": model.bos_token_id,
        "pad_token_id": model.pad_token_id,
        "vocab_size": model.vocab_size,
        "model_max_length": longest_sequence(intake),
        "chat_template": model.chat_template,
    }


async def render(read: DecodedCall, intake: Intake, model_name: str) -> list[Raw]:
    """Answer a call that asks for the tokens of its prompts instead of an output. Return the JSON with the token ids of
    each prompt, as the model would get them. Raises RefusedError if a prompt is invalid or too long."""
    rendered = []
    with read.names.translate_refusals():
        for each in read.requests:
            token_ids = encode_list(await intake.tokenize(each))
            rendered.append(Raw(encode(RenderedPrompt(each.request.request_id, model_name, token_ids))))
            await asyncio.sleep(0)  # let other tasks run
    return rendered


def _tokenizer(intake: Intake) -> tuple[Tokenizer, PromptTexts]:
    if intake.tokenizer is None or intake.texts is None:
        raise RefusedError(Reason.FAILED_PRECONDITION, "the served checkpoint has no tokenizer; send token ids")
    return intake.tokenizer, intake.texts
