"""Renders a conversation by a model's chat template, which makes the text of a prompt.

The template is code of the model's author, and runs in the sandbox of `scheduler_service.serving.template_sandbox`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_service.serving.template_sandbox import Template, TemplateFailure

# A message of a conversation: its role, its content, and whatever else the template knows.
Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The template fails, or the messages are not such as it takes."""


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text of the prompt that continues a conversation, special tokens included. Raises ChatTemplateError.

    `variables` are further variables of the template, such as `enable_thinking`.
    """
    plain = [_plain(message) for message in messages]
    given = {**special_tokens, "add_generation_prompt": add_generation_prompt, **(variables or {}), "messages": plain}
    try:
        return _compile(template).render(given)
    except TemplateFailure as error:
        raise ChatTemplateError(f"the model's chat template fails: {error}") from None


@functools.lru_cache(maxsize=8)
def _compile(chat_template: str) -> Template:
    return Template(chat_template)


def _plain(message: Message) -> dict[str, Any]:
    """Returns a message with one text as its content. It also takes OpenAI's form, where the content is a list of text
    parts."""
    if not isinstance(message, Mapping) or "role" not in message:
        example = {"role": "user", "content": "Hello"}
        raise ChatTemplateError(f"{message!r} is not a message; one is a mapping such as {example}")
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return dict(message)
    texts = []
    for part in content if isinstance(content, Sequence) else [content]:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatTemplateError(f"a message's content holds {kind!r}, but only texts are supported")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
