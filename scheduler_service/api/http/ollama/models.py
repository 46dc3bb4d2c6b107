"""The endpoints of Ollama's API that describe the served model, and the refusals of calls that would change models.

A property that this process does not know is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET

from pagewire.common.wire.sampling_rules import CHECKPOINTS_OPTIONS
from scheduler_service.api.http.answering import longest_sequence
from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.ollama.answers import ListedModel, LoadedModel, ModelDetails, OllamaStatus, ShownModel
from scheduler_service.api.http.ollama.requests import OllamaPullRequest
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.serving.checkpoint.sampling_defaults import API_DEFAULTS
from scheduler_service.serving.intake import Intake

_ONE_MODEL = "this server serves one model, which is chosen at its start"
# Calls that would change models: the methods of each path, and the reason why the call is refused.
REFUSED_CALLS: Mapping[str, tuple[Sequence[str], str]] = {
    "/api/create": (["POST"], f"models cannot be created: {_ONE_MODEL}; to serve another one, start another server"),
    "/api/copy": (["POST"], f"models cannot be copied: {_ONE_MODEL}; --served-model-name gives it further names"),
    "/api/delete": (["DELETE"], f"models cannot be deleted: {_ONE_MODEL}; stop the server, and delete the files"),
    "/api/push": (["POST"], f"models cannot be pushed: {_ONE_MODEL}; upload the files with the tools of the registry"),
    "/api/blobs/{digest}": (["GET", "POST"], f"files cannot be uploaded: {_ONE_MODEL}; copy them to the server's disk"),
}
_NEVER = datetime.max.replace(tzinfo=UTC)
_OLLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}
_OFF = {name: getattr(API_DEFAULTS, name) for name in CHECKPOINTS_OPTIONS}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The size in bytes of all files of the served model, and the time of their last change."""

    size: int
    modified_at: datetime

    @classmethod
    def of(cls, path: Path) -> "ModelFiles":
        """Measure the files of a checkpoint directory, or a GGUF file."""
        files = [each.stat() for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]
        changed = max((each.st_mtime for each in files), default=0.0)
        return cls(sum(each.st_size for each in files), datetime.fromtimestamp(changed, UTC))


def list_models(names: Sequence[str], intake: Intake) -> bytes:
    """Answer a call of `/api/tags`. Return the JSON with the names of the served model."""
    files, digest = ModelFiles.of(intake.model.directory), intake.model.digest.hex()
    listed = [
        ListedModel(name, name, files.modified_at, files.size, digest, _details(intake)) for name in map(tagged, names)
    ]
    return encode({"models": listed})


def list_loaded(names: Sequence[str], intake: Intake) -> bytes:
    """Answer a call of `/api/ps`. Return the JSON with the names of the served model if a worker has loaded it."""
    if not intake.engine.availability.is_serving:
        return encode({"models": []})
    size, digest, length = (
        ModelFiles.of(intake.model.directory).size,
        intake.model.digest.hex(),
        longest_sequence(intake),
    )
    loaded = [LoadedModel(name, name, size, digest, _details(intake), _NEVER, length) for name in map(tagged, names)]
    return encode({"models": loaded})


def show_model(intake: Intake) -> bytes:
    """Answer a call of `/api/show`. Return the JSON with the properties of the served model."""
    model = intake.model
    prefix = model.model_type or "general"
    sizes = {"context_length": longest_sequence(intake), "embedding_length": model.hidden_size}
    known: dict[str, Any] = {f"{prefix}.{name}": size for name, size in sizes.items() if size}
    known |= {"general.basename": model.name, f"{prefix}.vocab_size": model.vocab_size}
    if model.model_type:
        known["general.architecture"] = model.model_type
    options = {name: getattr(model.sampling_defaults, name) for name in CHECKPOINTS_OPTIONS}
    lines = [f"{_OLLAMA_NAMES.get(name, name):30} {value}" for name, value in options.items() if value != _OFF[name]]
    shown = ShownModel(
        _details(intake),
        known,
        "\n".join(lines),
        _capabilities(intake),
        ModelFiles.of(model.directory).modified_at,
        model.chat_template or UNSET,
    )
    return encode(shown)


async def pull_model(request: OllamaPullRequest, stream: EventStream) -> bytes | None:
    """Answer a call of `/api/pull` for the served model: report success, because the model is loaded. Return the JSON
    of the answer, or None if the answer was sent as a stream."""
    if request.stream is False:
        return encode(OllamaStatus())
    await stream.send_event(encode(OllamaStatus()))
    await stream.end()
    return None


def tagged(name: str) -> str:
    """Return the name of a model with its tag. A name without a tag gets the tag `latest`."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _details(intake: Intake) -> ModelDetails:
    model, worker = intake.model, intake.engine.availability.capacity
    form: Literal["gguf", "safetensors"] = "safetensors" if model.directory.is_dir() else "gguf"
    families = [model.model_type] if model.model_type else []
    return ModelDetails(form, model.model_type, families, worker.weight_format if worker else "")


def _capabilities(intake: Intake) -> list[str]:
    found, model = ["completion"], intake.model
    if model.chat_template is not None:
        output = intake.chats.format_of(model.chat_template)
        found += ["tools"] if output.calls is not None else []
        found += ["thinking"] if output.has_reasoning else []
    return [*found, "embedding"] if not model.embedding.refusal else found
