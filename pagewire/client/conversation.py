"""Conversations: which one a request is part of, and prompts of those that are lists of messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.client.arguments import check_text, is_listed, require
from pagewire.client.errors import InvalidRequest
from pagewire.client.server_info import ServerInfo

# A message is a mapping with a role and a content, as a model's chat template takes it.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """The conversation that a request is part of, such as a chat or an agent's run.

    `id` names it within its tenant, in at most 128 characters; empty, it is found by its prefix. `will_return` says
    whether another request is to follow that begins with this one's prompt and output, and `retention_seconds` how long
    its cached blocks are worth keeping, from 1: a hint, which the server bounds. None: not known.
    """

    id: str = ""
    will_return: bool | None = None
    retention_seconds: int | None = None


def as_conversations(messages: Any) -> tuple[Sequence[Sequence[Message]], bool]:
    """Returns conversations, and whether there was only one that was not in a list. Raises TypeError for what is no
    list of mappings; what they hold is checked for the template."""
    is_one = is_listed(messages) and (not messages or isinstance(messages[0], Mapping))
    conversations = [messages] if is_one else messages
    is_legal = is_listed(conversations) and all(
        is_listed(each) and all(isinstance(message, Mapping) for message in each) for each in conversations
    )
    kind = "a list of messages such as {'role': 'user', 'content': 'Hello'}, or a list of such lists"
    require("messages", messages, is_legal, kind)
    return conversations, is_one


def check_template(template: object, add_generation_prompt: object, **variables: object) -> None:
    """Raises TypeError for what cannot make a prompt. `variables` have the name by which the caller calls them."""
    require("chat_template", template, isinstance(template, str | None), "a text or None")
    require("add_generation_prompt", add_generation_prompt, isinstance(add_generation_prompt, bool), "a bool")
    for name, value in variables.items():
        require(name, value, isinstance(value, Mapping | None), "a mapping or None")


def prompts_of(
    info: ServerInfo,
    template: str | None,
    add_generation_prompt: bool,
    conversations: Sequence[Sequence[Message]],
    variables: Mapping[str, Any] | None,
    *,
    continue_final_message: bool = False,
) -> list[str]:
    """Returns the prompts that continue conversations, or their last messages, special tokens included.

    They are made by the served model's chat template, or the one of that name, or the given text; it gets `variables`
    too. Raises InvalidRequest.
    """
    from pagewire.common.chat import chat_template  # with Jinja2, which no other call needs

    if continue_final_message and add_generation_prompt:
        raise _invalid(chat_template.GOES_TWO_WAYS)
    template = template_of(info, template)
    if template is None:
        raise _invalid(f"{info.served_model_name} has no chat template: give chat_template, or a prompt to complete")
    if not all(conversations):
        raise _invalid("a conversation has no messages")
    try:
        prompts = [
            chat_template.render(
                template,
                messages,
                special_tokens=info.special_tokens,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
            for messages in conversations
        ]
        if continue_final_message:
            pairs = zip(prompts, conversations, strict=True)
            prompts = [chat_template.up_to_last(prompt, messages[-1]) for prompt, messages in pairs]
    except chat_template.ChatTemplateError as error:
        raise _invalid(str(error)) from None
    for index, prompt in enumerate(prompts):
        check_text(f"prompt {index} of messages", prompt)
    return prompts


def template_of(info: ServerInfo, template: str | None) -> str | None:
    """Returns the model's own template if there is one, or that of a name, or the text that is one. Raises
    InvalidRequest for what makes the same prompt of every conversation."""
    if template is None:
        return info.chat_template
    if template not in info.named_chat_templates and "{" not in template:
        names = ", ".join(sorted(info.named_chat_templates)) or "none"
        raise _invalid(
            f"chat_template is {template[:100]!r}, which is neither Jinja2 nor the name of a chat template of "
            f"{info.served_model_name} ({names})"
        )
    return info.named_chat_templates.get(template, template)


def _invalid(text: str) -> InvalidRequest:
    return InvalidRequest(text, code=grpc.StatusCode.INVALID_ARGUMENT)
