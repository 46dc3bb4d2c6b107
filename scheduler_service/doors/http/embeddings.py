"""`/v1/embeddings`: one or several texts, or their token ids, each as numbers of length 1."""

import base64
import math
import secrets
import struct

from scheduler_service.core.request import SequenceEnd
from scheduler_service.doors.http.answering import all_of, now, numbered
from scheduler_service.doors.http.answers import EmbeddingAnswer, EmbeddingItem, UsageCounts
from scheduler_service.doors.http.options import RequestNames, parsed
from scheduler_service.doors.http.prompts import separate_prompts
from scheduler_service.doors.http.requests import EmbeddingRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

_NUMBER_BYTES = 4


async def embed_inputs(request: EmbeddingRequest, call: Call, intake: Intake, model_name: str) -> EmbeddingAnswer:
    """Return an embedding of each input. Raises RefusedError."""
    drawn = f"embd-{secrets.token_hex(12)}"
    prompts = separate_prompts(request.input, "input")
    with RequestNames("input", embed="model").in_refusals():
        requests = [
            parsed(request, prompt, None, call, intake.model, request_id=name)
            for prompt, name in zip(prompts, numbered(request.request_id or drawn, len(prompts)), strict=True)
        ]
        ends = [end for _, end in await all_of(intake.embed(each, call) for each in requests)]
    num_tokens = sum(end.num_prompt_tokens for end in ends)
    return EmbeddingAnswer(
        request.request_id or drawn,
        "list",
        now(),
        model_name,
        [EmbeddingItem("embedding", index, _shown(request, end)) for index, end in enumerate(ends)],
        UsageCounts(num_tokens, 0, num_tokens),
    )


def _shown(request: EmbeddingRequest, end: SequenceEnd) -> list[float] | str:
    data = end.embedding
    if request.dimensions is not None:
        data = _shortened(data, request.dimensions)
    if request.encoding_format == "base64":
        return base64.b64encode(data).decode()
    return list(struct.unpack(f"<{len(data) // _NUMBER_BYTES}f", data))


def _shortened(data: bytes, dimensions: int) -> bytes:
    """Return the first numbers, scaled to length 1 again. Raises RefusedError."""
    num = len(data) // _NUMBER_BYTES
    if dimensions > num:
        raise invalid("dimensions", f"dimensions is {dimensions}, but the model's embeddings have {num}; lower it")
    numbers = struct.unpack(f"<{dimensions}f", data[: dimensions * _NUMBER_BYTES])
    length = math.hypot(*numbers) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))
