"""Checks of the edits in a request's `context_management`. The server does not edit conversations. An edit that would
change nothing is accepted, and any other edit is refused."""

from scheduler_service.api.http.messages.requests import (
    ClearThinking,
    ClearToolUses,
    Compact,
    ContextManagement,
    CountTokensRequest,
    InputTokens,
    ThinkingBlock,
    ThinkingTurns,
    ToolUseBlock,
    ToolUses,
)
from scheduler_service.serving.refusal import invalid

# Anthropic's defaults for unset fields.
_THINKING_TURNS = ThinkingTurns(1)
_TOOL_USES = ToolUses(3)
_CLEARING, _COMPACTING = InputTokens(100_000), InputTokens(150_000)


def check_edits(request: CountTokensRequest, num_prompt_tokens: int) -> None:
    """Check that the edits in a request's field `context_management` would not change the conversation. Anthropic's
    servers apply such edits to long conversations; this server edits no conversations. Raises RefusedError if an edit
    would change the conversation. `num_prompt_tokens` is the number of tokens in the prompt."""
    management = request.context_management or ContextManagement()
    for index, edit in enumerate(management.edits or ()):
        if _changes(edit, request, num_prompt_tokens):
            place = f"context_management.edits[{index}]"
            name = str(edit.__struct_config__.tag)
            raise invalid(
                place,
                f"{place} is {name}, which would change this conversation, but this server edits no conversations; "
                "send the edited conversation without this edit, or raise the edit's keep or trigger",
            )


def _changes(edit: ClearThinking | ClearToolUses | Compact, request: CountTokensRequest, num_tokens: int) -> bool:
    """Return whether an edit would change the conversation of the request on Anthropic's servers. `num_tokens` is the
    number of tokens in the prompt."""
    match edit:
        case ClearThinking():
            keep = edit.keep or _THINKING_TURNS
            return isinstance(keep, ThinkingTurns) and _num_messages_with(ThinkingBlock, request) > keep.value
        case ClearToolUses():
            num_uses, trigger = _num_uses(request), edit.trigger or _CLEARING
            number = num_uses if isinstance(trigger, ToolUses) else num_tokens
            return number > trigger.value and num_uses > (edit.keep or _TOOL_USES).value
    return num_tokens > (edit.trigger or _COMPACTING).value


def _num_messages_with(kind: type, request: CountTokensRequest) -> int:
    return sum(any(isinstance(block, kind) for block in message.content) for message in request.messages)


def _num_uses(request: CountTokensRequest) -> int:
    return sum(isinstance(block, ToolUseBlock) for message in request.messages for block in message.content)
