"""The endpoints of Ollama's API that describe the served model, and the reasons why calls that change models are
refused. A property that this process does not know is left out."""

import functools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pagewire.common.wire.sampling_rules import CHECKPOINTS_OPTIONS
from scheduler_service.api.http.answering import longest_sequence
from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.call_admission import CallAdmission
from scheduler_service.api.http.infill import has_infill
from scheduler_service.api.http.ollama.requests import OllamaPullRequest, OllamaShowRequest
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.serving.checkpoint.sampling_defaults import API_DEFAULTS
from scheduler_service.serving.intake import Intake

_ONE_MODEL = "this server serves one model, which is chosen at its start"
# Calls that would change models: the methods of each path, and the reason why the call is refused.
REFUSED_CALLS: Mapping[str, tuple[Sequence[str], str]] = {
    "/api/create": (["POST"], f"models cannot be created: {_ONE_MODEL}; to serve another one, start another server"),
    "/api/copy": (["POST"], f"models cannot be copied: {_ONE_MODEL}; --served-model-name gives it further names"),
    "/api/delete": (["DELETE"], f"models cannot be deleted: {_ONE_MODEL}; stop the server, and delete the files"),
    "/api/push": (["POST"], f"models cannot be pushed: {_ONE_MODEL}; upload its files by other means"),
    "/api/blobs/{digest}": (["GET", "POST"], f"files cannot be uploaded: {_ONE_MODEL}; copy them to the server's disk"),
}
_NEVER = datetime.max.replace(tzinfo=UTC)


def list_models(names: Sequence[str], intake: Intake) -> dict[str, Any]:
    """Answer a call of `/api/tags` or `/api/ps`. Return the JSON value with an entry for each name in `names`. Names
    without a tag get the tag `latest`."""
    tagged = [name if ":" in name else f"{name}:latest" for name in names]
    same = {
        "size": _size_of(intake.model.directory),
        "digest": intake.model.digest.hex(),
        "details": _details(intake),
        "modified_at": _modified_at(intake.model.directory),
        "expires_at": _NEVER,
        "context_length": longest_sequence(intake),
    }
    return {"models": [{"name": name, "model": name, **same} for name in tagged]}


async def show_model(request: OllamaShowRequest, admission: CallAdmission, intake: Intake) -> bytes:
    """Answer a call of `/api/show`. Return the JSON with the properties of the served model. Raises RefusedError if the
    request names another model."""
    admission.check_model(request.name or None)
    model, family = intake.model, intake.model.model_type or "general"
    capabilities = [] if model.only_embeds else ["completion"]
    info = {
        "general.architecture": model.model_type,
        "general.basename": model.name,
        f"{family}.context_length": longest_sequence(intake),
        f"{family}.embedding_length": model.embedding_size,
        f"{family}.vocab_size": model.vocab_size,
    }
    if model.chat_template is not None:
        output = intake.chats.format_of(model.chat_template)
        capabilities += ["tools"] if output.calls is not None else []
        capabilities += ["thinking"] if output.has_reasoning else []
    capabilities += ["insert"] if has_infill(intake) else []
    capabilities += [] if model.embedding.refusal else ["embedding"]
    options = {name: getattr(model.sampling_defaults, name) for name in CHECKPOINTS_OPTIONS}
    lines = [
        f"{name.replace('repetition', 'repeat'):30} {value}"
        for name, value in options.items()
        if value != getattr(API_DEFAULTS, name)
    ]
    shown: dict[str, Any] = {"details": _details(intake), "capabilities": capabilities, "parameters": "\n".join(lines)}
    shown |= {"template": model.chat_template or "", "modified_at": _modified_at(intake.model.directory)}
    return encode(shown | {"model_info": {name: value for name, value in info.items() if value}})


async def pull_model(request: OllamaPullRequest, admission: CallAdmission, stream: EventStream) -> bytes | None:
    """Answer a call of `/api/pull` for the served model: report success, because the model is loaded. Return the JSON
    of the answer, or None if the answer was sent as a stream. Raises RefusedError if the request names another
    model."""
    admission.check_model(request.name or None)
    answer = encode({"status": "success"})
    if request.stream is False:
        return answer
    await stream.send_event(answer)
    await stream.end()
    return None


# A served model does not change, and its disk can be slow, so each of these reads it once.
@functools.cache
def _size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *path.glob("*")) if each.is_file())


@functools.cache
def _modified_at(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _details(intake: Intake) -> dict[str, Any]:
    model, worker = intake.model, intake.engine.availability.capacity
    details: dict[str, Any] = {"format": "safetensors" if model.directory.is_dir() else "gguf"}
    details |= {"family": model.model_type, "families": [model.model_type]} if model.model_type else {}
    return details | ({"quantization_level": worker.weight_format} if worker and worker.weight_format else {})
