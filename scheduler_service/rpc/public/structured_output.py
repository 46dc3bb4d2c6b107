"""What a request's outputs must match: taken from its sampling parameters, and held against what is served."""

import json

import grpc

from pagewire.common.messages import GrammarKind
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import Grammar
from scheduler_service.rpc.status import RpcError, invalid
from scheduler_service.serving.grammars import (
    GrammarChecks,
    GrammarRefusedError,
    GrammarsNotServedError,
    TooManyGrammarsError,
)
from scheduler_service.serving.model_info import ModelInfo

MAX_GRAMMAR_BYTES = 512 * 1024  # of UTF-8


def check_structured_output(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> None:
    """Check everything but whether the grammar can be read. Raises RpcError."""
    kind = sampling.WhichOneof("structured_output")
    if kind is None:
        return
    field = f"sampling.{kind}"
    if model.grammar_refusal:
        raise invalid(field, model.grammar_refusal)
    if kind == "json_object":
        if not sampling.json_object:
            raise invalid(field, "json_object is false, but only true says something; leave it unset")
        return
    text = _text(sampling, kind)
    if not text or (kind == "choice" and not sampling.choice.texts):
        raise invalid(field, f"{kind} is empty; say what the output must match, or leave it unset")
    size = len(text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"{kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; shorten it")


def resolve_grammar(sampling: scheduler_pb2.SamplingParams, model: ModelInfo) -> Grammar | None:
    """Return what the output must match. Call `check_structured_output` first."""
    kind = sampling.WhichOneof("structured_output")
    if kind is None:
        return None
    return Grammar(GrammarKind[kind.upper()], _text(sampling, kind), model.grammar_end_token_ids)


async def check_grammar(grammars: GrammarChecks, grammar: Grammar, tenant: str) -> None:
    """Return if the grammar can be read and is served. Raises RpcError."""
    try:
        await grammars.check(grammar, tenant)
    except GrammarRefusedError as error:
        raise invalid(field_of(grammar), f"{grammar.kind.name.lower()} cannot be used: {error}") from None
    except GrammarsNotServedError as error:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, str(error), field_of(grammar)) from None
    except TooManyGrammarsError as error:
        raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None


def check_grammars_served(grammars: GrammarChecks, grammar: Grammar) -> None:
    """Return if grammars are served still: another worker may have come since this one was checked. Raises RpcError."""
    if grammars.refusal:
        raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, grammars.refusal, field_of(grammar))


def field_of(grammar: Grammar) -> str:
    """Return the path of the field that a request's grammar stood in."""
    return f"sampling.{grammar.kind.name.lower()}"


def _text(sampling: scheduler_pb2.SamplingParams, kind: str) -> str:
    if kind == "json_object":
        return ""
    if kind == "choice":
        return json.dumps(list(sampling.choice.texts), ensure_ascii=False)
    return getattr(sampling, kind)
