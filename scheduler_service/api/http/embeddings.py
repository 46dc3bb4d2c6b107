"""The endpoint `/v1/embeddings`. Returns one vector of length 1 for each input, which is a text, a list of token ids or
a conversation."""

import asyncio
import base64
import math
import secrets
import struct
from typing import Any

from msgspec import Raw, structs

from scheduler_service.api.http.answering import begin_requests, now, request_ids
from scheduler_service.api.http.answers import EmbeddingAnswer, EmbeddingItem, UsageCounts, encode
from scheduler_service.api.http.prompts import reading_size, render_messages, separate_prompts
from scheduler_service.api.http.request_options import DecodedCall, RequestNames, request_for_prompt
from scheduler_service.api.http.requests import MAX_INPUTS, EmbeddingRequest, PromptField
from scheduler_service.core.request import SequenceEnd
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.intake import Intake, embedding_end
from scheduler_service.serving.parsed_request import ParsedRequest, prompt_to_embed
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_NUMBER_BYTES = 4
_SHOWN_BYTES = {"base64": 6, "float": 24}  # maximum size of a number in an answer


async def embed_inputs(request: EmbeddingRequest, call: Call, intake: Intake, model_name: str) -> bytes:
    """Answer a call of `/v1/embeddings`. Return the JSON with one embedding for each input. Raises RefusedError if the
    request is invalid or refused."""
    answer_id = request.request_id or f"embd-{secrets.token_hex(12)}"
    embeddings, num_tokens = await encoded_embeddings(request, answer_id, call, intake)
    data = [EmbeddingItem("embedding", index, embedding) for index, embedding in enumerate(embeddings)]
    return encode(EmbeddingAnswer(answer_id, "list", now(), model_name, data, UsageCounts(num_tokens, 0, num_tokens)))


async def encoded_embeddings(
    request: EmbeddingRequest, answer_id: str, call: Call, intake: Intake
) -> tuple[list[Any], int]:
    """Compute the embeddings of all inputs of a request. Return the JSON of each embedding, as msgspec `Raw` values,
    and the number of tokens of all inputs. Raises RefusedError if the request is invalid or refused."""
    given = await _input_of(request, call, intake)
    tenant, size = call.caller.tenant(request.tenant or ""), reading_size(given, call)
    names = RequestNames("messages" if request.input is None else "input", embed="model")
    with names.translate_refusals():
        requests = await intake.turns.run_in_turn(tenant, size, _read, request, given, answer_id, call, intake.model)
    num_numbers = min(request.dimensions or intake.model.embedding_size, intake.model.embedding_size)
    size = num_numbers * _SHOWN_BYTES[request.encoding_format or "float"]
    asked = DecodedCall(requests, answer_id, names, embedding_bytes=size)
    async with begin_requests(asked, call, intake, is_streamed=False) as begun:
        ends = [await embedding_end(progress.active) for progress in begun]
    embeddings = []
    for end in ends:
        embeddings.append(Raw(encode(_shown(request, end))))
        await asyncio.sleep(0)  # let other tasks run
    return embeddings, sum(end.num_prompt_tokens for end in ends)


async def _input_of(request: EmbeddingRequest, call: Call, intake: Intake) -> PromptField:
    """Return the texts or token ids to embed. If the request contains a conversation, render it with the chat template
    and return the text. Raises RefusedError unless the request sets exactly one of `input` and `messages`."""
    if (request.input is None) == (request.messages is None):
        raise invalid(
            "input",
            f"{'neither' if request.input is None else 'each'} of input and messages is set; set exactly one of them",
        )
    if request.input is not None:
        return request.input
    chat = structs.replace(request, add_generation_prompt=request.add_generation_prompt is True)
    return await render_messages(chat, call, intake)


def _read(
    request: EmbeddingRequest, given: PromptField, answer_id: str, call: Call, model: ModelInfo
) -> list[ParsedRequest]:
    prompts, is_text = separate_prompts(given, "input", MAX_INPUTS), request.messages is None
    if is_text:
        prompts = [prompt_to_embed(prompt, request.prompt_name, model) for prompt in prompts]
    elif request.prompt_name is not None:
        raise invalid("prompt_name", "prompt_name applies to input, and the chat template renders messages; unset it")
    return [
        request_for_prompt(request, prompt, None, call, model, request_id=name, add_special_tokens=is_text)
        for prompt, name in zip(prompts, request_ids(answer_id, len(prompts)), strict=True)
    ]


def _shown(request: EmbeddingRequest, end: SequenceEnd) -> list[float] | str:
    data = end.embedding
    if request.dimensions is not None:
        data = _shortened(data, request.dimensions)
    if request.encoding_format == "base64":
        return base64.b64encode(data).decode()
    return list(struct.unpack(f"<{len(data) // _NUMBER_BYTES}f", data))


def _shortened(data: bytes, dimensions: int) -> bytes:
    """Shorten an embedding to its first `dimensions` numbers, and scale the result to a vector of length 1. `data` and
    the result consist of little-endian 32-bit floats. Raises RefusedError if the embedding has fewer than `dimensions`
    numbers."""
    num = len(data) // _NUMBER_BYTES
    if dimensions > num:
        raise invalid(
            "dimensions", f"dimensions is {dimensions}, but the model's embeddings have {num}; lower dimensions"
        )
    numbers = struct.unpack(f"<{dimensions}f", data[: dimensions * _NUMBER_BYTES])
    length = math.hypot(*numbers) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))
