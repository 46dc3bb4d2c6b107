"""What users import: the client of a Pagewire scheduler. Needs grpc and protobuf, never torch or numpy."""

from pagewire.client import Client
from pagewire.completion import Completion, CompletionOutput, Output, TokenLogprobs, Usage
from pagewire.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotFound,
    PagewireError,
    ResourceExhausted,
    Unavailable,
)
from pagewire.sampling import SamplingParams
from pagewire.server import Loads, ServerInfo, WorkerInfo

__all__ = [
    "AlreadyExists",
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
    "Output",
    "PagewireError",
    "ResourceExhausted",
    "SamplingParams",
    "ServerInfo",
    "TokenLogprobs",
    "Unavailable",
    "Usage",
    "WorkerInfo",
]
