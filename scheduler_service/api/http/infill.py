"""Prompts that ask the model for the text between a prefix and a suffix ("fill in the middle")."""

from collections.abc import Sequence

from scheduler_service.api.http.answering import longest_sequence
from scheduler_service.api.http.requests import SampledRequest
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call


async def infill_prompt(
    prefix: str,
    suffix: str,
    call: Call,
    intake: Intake,
    *,
    field: str = "suffix",
    extra: Sequence[tuple[str, str]] = (),
    tenant: str = "",
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Return the token ids of a prompt that asks the model for the text between `prefix` and `suffix`. Raises
    RefusedError if the model's tokenizer has no tokens for infilling, or if the texts are too long.

    The texts never become tokens for infilling. Other special tokens in the texts have the same effect as in the prompt
    of a completion.

    Args:
        prefix: The text in front of the gap.
        suffix: The text after the gap.
        call: The HTTP call.
        intake: The intake of the served model.
        field: The path of the request field that contains the suffix, for errors.
        extra: The names and texts of other files, which come first in the prompt.
        tenant: The tenant that the request names, or an empty string.
        add_special_tokens: Whether the prompt begins with the tokenizer's special tokens, such as BOS.
    """
    tokens = None if intake.tokenizer is None else intake.tokenizer.infill
    if tokens is None or intake.texts is None:
        raise invalid(
            field,
            "the served model has no tokenizer with tokens for infilling, such as <|fim_prefix|>; leave "
            f"{field} unset, or serve another model",
        )
    return await intake.texts.encode_then(
        tuple,
        (*(tokens.starts if add_special_tokens else ()), *tokens.prompt(prefix, suffix, extra)),
        call.caller.tenant(tenant),
        longest_sequence(intake),
        field=field,
        add_special_tokens=False,
    )


def has_infill(intake: Intake) -> bool:
    """Return whether the served model can infill: whether its tokenizer has the necessary tokens."""
    return intake.tokenizer is not None and intake.tokenizer.infill is not None


def infill_stops(request: SampledRequest, intake: Intake) -> list[int]:
    """Return the `stop_token_ids` of a request that infills: the tokens in the request's own list and, unless it sets
    `ignore_eos`, the tokens that end an infilled text."""
    tokens = None if intake.tokenizer is None else intake.tokenizer.infill
    ends = () if tokens is None or request.ignore_eos else tokens.ends
    return [*(request.stop_token_ids or ()), *ends]
