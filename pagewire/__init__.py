"""The client library of Pagewire: `Client`, `AsyncClient` and `LLM`.

Importing this package loads neither torch nor numpy. A client needs only grpc and protobuf.
"""

import importlib
import os

from pagewire.common import __version__

# gRPC reads this variable when it is imported. gRPC's own fork handling restarts threads in the child process. The
# child crashes if its parent had a call in progress. `pagewire.client.channels` handles forks instead.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# Type checkers treat this name as true. The module `typing` is not imported: `python -m pagewire` would import a file
# of that name from the working directory, see `pagewire/__main__.py`.
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
    from pagewire.client.server_info import BlockHolder, BlockMap, Latency, Loads, RequestReport, ServerInfo, WorkerInfo
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
    "Latency",
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

# The modules that define the exported names. Looking up a name in a module loads the module, so the lightest modules
# come first.
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
    """Import a public name, such as `Client`, when a program first reads it from the package `pagewire`.

    The import is lazy because the command sets environment variables that gRPC reads when it is imported. Raise
    AttributeError for a name that is not exported, and ImportError with an installation command if a package is
    missing.
    """
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


# Hidden from type checkers, so that they report a name that is not listed above as a mistake.
if not TYPE_CHECKING:
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
