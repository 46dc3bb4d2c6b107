"""Checks a request's parameters of beam search and makes core data of them."""

import math

from pagewire.common.transport.translation import enum_names
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import BeamParams, EarlyStopping
from scheduler_service.rpc.status import invalid
from scheduler_service.serving.sampling_defaults import FILTERS_OFF

_EARLY_STOPPING = {
    scheduler_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{number: EarlyStopping(name) for number, name in enum_names(scheduler_pb2.EarlyStopping.DESCRIPTOR).items()},
}


def check_beam_search(sampling: scheduler_pb2.SamplingParams) -> None:
    """Raises RpcError. The ranges of numbers have been checked already."""
    if not sampling.HasField("beam_width"):
        for field in ("length_penalty", "early_stopping"):
            if sampling.HasField(field):
                raise _invalid(
                    field, f"{field} is set, but without beam_width there is no beam search; set beam_width too"
                )
        return
    if sampling.n > sampling.beam_width:
        raise _invalid(
            "n",
            f"n is {sampling.n}, but {sampling.beam_width} beams find at most as many hypotheses; lower n or raise "
            "beam_width",
        )
    if not math.isfinite(sampling.length_penalty):
        raise _invalid("length_penalty", f"length_penalty is {sampling.length_penalty:g}, but must be a finite number")
    if sampling.early_stopping not in _EARLY_STOPPING:
        raise _invalid("early_stopping", f"early_stopping is {sampling.early_stopping}, which is none of its values")
    for field, off in FILTERS_OFF.items():
        value = getattr(sampling, field)
        if sampling.HasField(field) and value != off:
            raise _invalid(
                field,
                f"{field} is {value:g}, but beam search chooses nothing at random; leave {field} or beam_width unset",
            )
    for field in ("logprobs", "prompt_logprobs"):
        if sampling.HasField(field):
            raise _invalid(field, f"beam search reports no {field}; leave {field} unset, or sample without beam_width")
    if sampling.stop:
        raise _invalid(
            "stop", "beam search watches for no stop texts; use stop_token_ids, or sample without beam_width"
        )


def resolve_beam(sampling: scheduler_pb2.SamplingParams) -> BeamParams | None:
    if not sampling.HasField("beam_width"):
        return None
    return BeamParams(
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty if sampling.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING[sampling.early_stopping],
    )


def num_candidates(beam: BeamParams, num_stop_tokens: int, vocab_size: int) -> int:
    """Continuations of each beam that a step looks at: even if all stop tokens come first, enough go on (after
    transformers)."""
    return min(vocab_size, max(2, 1 + num_stop_tokens) * beam.beam_width)


def _invalid(field: str, message: str) -> Exception:
    return invalid(f"sampling.{field}", message)
