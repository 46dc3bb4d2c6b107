"""What users import: the client of a Pagewire scheduler. Needs grpc and protobuf, never torch or numpy."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pagewire.client import Client
    from pagewire.completion import Completion, CompletionOutput, Output, Result, TokenLogprobs, Usage
    from pagewire.errors import (
        AlreadyExists,
        Cancelled,
        DeadlineExceeded,
        FieldViolation,
        InternalError,
        InvalidRequest,
        NotFound,
        OutOfRange,
        PagewireError,
        ResourceExhausted,
        Unavailable,
    )
    from pagewire.sampling import SamplingParams
    from pagewire.server import BlockHolder, BlockMap, Loads, RequestReport, ServerInfo, WorkerInfo

__all__ = [
    "AlreadyExists",
    "BlockHolder",
    "BlockMap",
    "Cancelled",
    "Client",
    "Completion",
    "CompletionOutput",
    "DeadlineExceeded",
    "FieldViolation",
    "InternalError",
    "InvalidRequest",
    "Loads",
    "NotFound",
    "OutOfRange",
    "Output",
    "PagewireError",
    "RequestReport",
    "ResourceExhausted",
    "Result",
    "SamplingParams",
    "ServerInfo",
    "TokenLogprobs",
    "Unavailable",
    "Usage",
    "WorkerInfo",
    "__version__",
]

_MODULES = ("client", "completion", "errors", "sampling", "server")


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is: the command has settings of gRPC to make before that is imported."""
    if name in __all__:
        for module in _MODULES:
            found = getattr(importlib.import_module(f"pagewire.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
