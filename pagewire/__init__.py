"""This package is the client of a Pagewire scheduler. It needs grpc and protobuf, never torch or numpy."""

import importlib
import os

from pagewire.common import __version__

# gRPC reads it when it is imported. Its own handling of forks restarts threads in a child whose parent had a call under
# way, and crashes there; `pagewire.client.channels` does what is needed.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# Type checkers know the name. The module of that name is not imported: `python -m pagewire` would take a file of the
# working directory for it, see `pagewire/__main__.py`.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from pagewire.client.client import AsyncClient, Client
    from pagewire.client.completion import (
        Completion,
        CompletionOutput,
        Output,
        PromptEmbedding,
        Result,
        TokenLogprobs,
        Usage,
    )
    from pagewire.client.conversation import Session
    from pagewire.client.errors import (
        AlreadyExists,
        Cancelled,
        DeadlineExceeded,
        FieldViolation,
        InternalError,
        InvalidRequest,
        InvalidText,
        NotFound,
        OutOfRange,
        PagewireError,
        ResourceExhausted,
        StartError,
        Unavailable,
    )
    from pagewire.client.sampling_params import (
        BeamSearchParams,
        SamplingParams,
        StructuredOutputs,
        StructuredOutputsParams,
    )
    from pagewire.client.server_info import BlockHolder, BlockMap, Loads, RequestReport, ServerInfo, WorkerInfo
    from pagewire.llm import (
        LLM,
        BeamSearchOutput,
        BeamSearchSequence,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        SampleOutput,
        TextPrompt,
        TokensPrompt,
    )

__all__ = [
    "LLM",
    "AlreadyExists",
    "AsyncClient",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockHolder",
    "BlockMap",
    "Cancelled",
    "Client",
    "Completion",
    "CompletionOutput",
    "DeadlineExceeded",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FieldViolation",
    "InternalError",
    "InvalidRequest",
    "InvalidText",
    "Loads",
    "Logprob",
    "NotFound",
    "OutOfRange",
    "Output",
    "PagewireError",
    "PoolingRequestOutput",
    "PromptEmbedding",
    "RequestMetrics",
    "RequestOutput",
    "RequestReport",
    "ResourceExhausted",
    "Result",
    "SampleOutput",
    "SamplingParams",
    "ServerInfo",
    "Session",
    "StartError",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenLogprobs",
    "TokensPrompt",
    "Unavailable",
    "Usage",
    "WorkerInfo",
    "__version__",
]

# Where each name is. Looking for one in a module loads it, so the lightest ones come first.
_MODULES = (
    "client.errors",
    "client.sampling_params",
    "client.server_info",
    "client.completion",
    "client.conversation",
    "client.client",
    "llm",
)


def _load(name: str) -> "Any":
    """Imports a name when it is first used, since the command makes settings that gRPC reads when it is imported."""
    for module in _MODULES if name in __all__ else ():
        try:
            found = getattr(importlib.import_module(f"pagewire.{module}"), name, None)
        except Exception as error:
            advice = importlib.import_module("pagewire.installation").advice(error)
            raise error if advice is None else ImportError(advice) from None
        if found is not None:
            globals()[name] = found
            return found
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")


# For a type checker, a name that is not listed above is a mistake.
if not TYPE_CHECKING:
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
