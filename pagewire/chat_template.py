"""A model's chat template: messages in, the prompt's text out.

It is code of the model's author and runs in a sandbox.
"""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A message of a conversation: its role, its content, and whatever else the template knows.
Message = Mapping[str, Any]
# Of all loops of a template together, while it renders one conversation.
MAX_ITERATIONS = 1_000_000
_ITERATIONS = "pagewire_iterations"


class ChatTemplateError(ValueError):
    """The template fails, or the messages are not what it takes."""


def render(
    template: str,
    messages: Sequence[Message],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of the prompt that continues a conversation, special tokens included. Raises ChatTemplateError.

    `variables` are more of the template's own, such as `enable_thinking`.
    """
    known: dict[str, Any] = {**special_tokens, "add_generation_prompt": add_generation_prompt, **(variables or {})}
    known[_ITERATIONS] = itertools.count(1)
    try:
        return _compile(template).render(messages=[_plain(message) for message in messages], **known)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        if isinstance(error, ChatTemplateError):
            raise
        reason = str(error) or type(error).__name__
        raise ChatTemplateError(f"the model's chat template fails: {reason}") from None


@functools.lru_cache(maxsize=8)
def _compile(chat_template: str) -> Template:
    """A template with the names that templates of the hub rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["counted"] = _counted
    parsed = environment.parse(chat_template)
    for loop in list(parsed.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
    return environment.from_string(parsed)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """What a loop of the template runs over, as long as all its loops together have not taken too many turns."""
    for item in items:
        if next(context[_ITERATIONS]) > MAX_ITERATIONS:
            raise TemplateError(f"its loops have taken more than {MAX_ITERATIONS} turns")
        yield item


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _plain(message: Message) -> dict[str, Any]:
    """A message whose content is one text, also where it came as OpenAI's list of text parts."""
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
