"""What users import: the client of a Pagewire scheduler. Needs grpc and protobuf, never torch or numpy."""

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
]
