"""Rendering of a conversation by a model's chat template into the text of a prompt.

The template is code by the model's author. It runs in the sandbox of `pagewire.common.chat.template_sandbox`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.common.chat.template_forms import (
    QUESTION,
    TOOLS,
    UNSET,
    Message,
    compiled,
    conversation_with_call,
    to_template_form,
    tools_in_template_form,
)
from pagewire.common.chat.template_forms import ChatTemplateError as ChatTemplateError
from pagewire.common.chat.template_sandbox import BudgetExceeded, TemplateFailure

# The error message for a request that sets both options.
CONFLICTING_OPTIONS = (
    "continue_final_message continues the last message, but add_generation_prompt begins a new one; set only one"
)

# The checks of a template at startup: the name of a kind of conversation, alternative conversations of which the
# template must accept one, and the tools.
_KINDS: tuple[tuple[str, list[list[dict[str, Any]]], list[Any] | None], ...] = (
    ("a plain question", [[QUESTION]], None),
    ("a system message", [[{"role": "system", "content": "Be kind."}, QUESTION]], None),
    ("an earlier answer", [[QUESTION, {"role": "assistant", "content": "Hi"}, QUESTION]], None),
    ("tools", [[QUESTION]], TOOLS),
    (
        "the result of a tool",
        [conversation_with_call("call00000", in_json=in_json) for in_json in (False, True)],
        TOOLS,
    ),
)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with a chat template. Return the text of the prompt, including special tokens.

    `variables` are additional variables for the template, such as `enable_thinking` or `tools`. The content of a
    message is a text, or a list of parts as in OpenAI's API. The template receives the content in the form that it
    supports. Raises ChatTemplateError if a message is invalid or the template fails.
    """
    given = {"add_generation_prompt": add_generation_prompt, **(variables or {})}
    try:
        return _rendered(template, messages, special_tokens, given)
    except TemplateFailure as error:
        raise ChatTemplateError(f"the model's chat template fails: {error}") from None


def text_of(message: Message) -> str:
    """Return the text of a chat message's content. If the content has several parts, return the text of
    the last part.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts[-1] if texts else ""


def without_suffix(prompt: str, message: Message) -> str:
    """Cut a rendered prompt after the content of the last message, so that the model continues this message instead of
    starting a new one. transformers does the same for `continue_final_message`. Raises ChatTemplateError if the last
    message is empty or the prompt does not contain its content.
    """
    content = text_of(message)
    stripped = content.strip()
    found = prompt[::-1].find(stripped[::-1])  # rfind needs time in proportion to the product of both lengths
    place = len(prompt) - found - len(stripped)
    if found < 0 or not stripped:
        raise ChatTemplateError(
            "the prompt does not contain the last message as it was sent, or the message is empty; leave "
            "continue_final_message unset"
        )
    kept = content.lstrip()
    return prompt[: place + len(kept)] if prompt.startswith(kept, place) else prompt[: place + len(stripped)]


def refusals(template: str, special_tokens: Mapping[str, str]) -> dict[str, str]:
    """Render test conversations to find the kinds of conversation that a chat template cannot render. Return a mapping
    from the names of these kinds to the reason. Kinds that fail for the same reason share one key.

    Raises BudgetExceeded for a template that needs too many steps, because such a template would keep any process that
    renders it (such as a router) busy forever.
    """
    kinds: dict[str, list[str]] = {}
    for kind, conversations, tools in _KINDS:
        reasons = [_failure(template, messages, special_tokens, tools) for messages in conversations]
        if all(reasons):
            kinds.setdefault(reasons[0], []).append(kind)
    return {
        "any conversation" if len(names) == len(_KINDS) else ", ".join(names): reason for reason, names in kinds.items()
    }


def _failure(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], tools: Sequence[Any] | None
) -> str:
    """Return the reason why a chat template cannot render a conversation, or an empty text if it can. Raises
    BudgetExceeded if the rendering needs too many steps.
    """
    try:
        _rendered(template, messages, special_tokens, {"add_generation_prompt": True, "tools": tools})
    except BudgetExceeded:
        raise
    except TemplateFailure as error:
        return str(error)
    return ""


def _rendered(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], variables: Mapping[str, Any]
) -> str:
    """Render a conversation with a chat template and return the prompt. Raises ChatTemplateError for invalid messages,
    and TemplateFailure if the template fails.
    """
    asked = template, tuple(sorted(special_tokens.items()))
    taken = to_template_form(messages, asked)
    given = {**special_tokens, **UNSET, **variables}
    given["tools"] = tools_in_template_form(given["tools"], asked)
    return compiled(template).render({**given, "messages": taken})
