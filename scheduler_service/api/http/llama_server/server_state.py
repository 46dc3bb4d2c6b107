"""Descriptions of the server in llama-server's format, and the paths of llama-server that have no handler of their
own."""

from collections.abc import Mapping
from typing import Any

from pagewire.common import __version__
from scheduler_service.api.http.answering import longest_sequence
from scheduler_service.api.http.llama_server.completions import settings_of
from scheduler_service.serving.intake import Intake

# Other paths of llama-server, and the paths that they are aliases of.
ALIASES: Mapping[str, str] = {
    "/v1/health": "/health",
    "/models": "/v1/models",
    "/completions": "/completion",
    "/chat/completions": "/v1/chat/completions",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
}
# The paths of llama-server's calls that are not supported, with their methods and the reason.
LLAMA_REFUSALS: Mapping[str, tuple[list[str], str]] = {
    **dict.fromkeys(
        ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
        (["POST"], "reranking is not supported; embed the texts with /v1/embeddings, and compare the vectors"),
    ),
    **dict.fromkeys(
        ("/audio/transcriptions", "/v1/audio/transcriptions"),
        (["POST"], "audio is not supported: the model reads text only"),
    ),
    **dict.fromkeys(
        ("/embedding", "/embeddings"),
        (["POST"], "llama-server's own embeddings are not supported; use /v1/embeddings"),
    ),
    "/lora-adapters": (
        ["GET", "POST"],
        "LoRA adapters are not supported; serve a checkpoint into which the adapter is merged",
    ),
    "/props": (["POST"], "the server's properties cannot be changed; set options in each request"),
    "/slots/{id_slot}": (["POST"], "slots cannot be saved, restored or erased; all requests share one prefix cache"),
}


def properties(intake: Intake, num_slots: int) -> dict[str, Any]:
    """Return the answer of `/props`: the properties of the model and the settings of requests that set no options. The
    path of the model is only its last part."""
    model = intake.model
    defaults = settings_of(model.sampling_defaults, seed=-1, n_predict=-1, stop=[], ignore_eos=False, stream=False)
    return {
        "default_generation_settings": {"params": defaults, "n_ctx": longest_sequence(intake)},
        "total_slots": num_slots,
        "model_alias": model.name,
        "model_path": model.directory.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": model.chat_template or "",
        "bos_token": model.special_tokens.get("bos_token", ""),
        "eos_token": model.special_tokens.get("eos_token", ""),
        "build_info": f"pagewire-{__version__}",
        "is_sleeping": False,
    }


def slots(intake: Intake, num_slots: int) -> list[dict[str, Any]]:
    """Return the answer of `/slots`: one slot for each sequence that can run at the same time. A slot is busy for each
    unfinished output of this front end's requests, whether the output is running or waiting. Requests of other front
    ends are not known here."""
    outputs = [
        (output.sequence_id, output.num_tokens, active.request.max_tokens)
        for active in intake.unfinished()
        for output in active.outputs
        if output.end is None
    ]
    found: list[dict[str, Any]] = [
        {
            "id_task": task,
            "is_processing": True,
            "next_token": {"has_next_token": True, "n_remain": most - num_tokens, "n_decoded": num_tokens},
        }
        for task, num_tokens, most in outputs[:num_slots]
    ]
    found += [{"id_task": -1, "is_processing": False}] * (num_slots - len(found))
    common = {"n_ctx": longest_sequence(intake), "speculative": False}
    return [{"id": index, **common, **slot} for index, slot in enumerate(found)]
