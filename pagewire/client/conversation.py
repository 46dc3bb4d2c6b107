"""Sessions, and the prompts rendered from lists of chat messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.client.arguments import check_text, is_listed, require
from pagewire.client.errors import InvalidRequest
from pagewire.client.server_info import ServerInfo

# A message is a mapping with a role and a content, as the model's chat template expects it.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """The conversation that a request belongs to, such as a chat or an agent's run.

    Attributes:
        id: The name of the conversation within its tenant, at most 128 characters. If empty, the server finds the
            conversation by its prefix.
        will_return: Whether another request is expected that begins with the prompt and the output of this request.
            None means unknown.
        retention_seconds: How long the cached blocks of the request are worth keeping after it ends, at least 1.
            This is a hint, which the server limits. None leaves the decision to the server.
    """

    id: str = ""
    will_return: bool | None = None
    retention_seconds: int | None = None


def as_conversations(messages: Any) -> tuple[Sequence[Sequence[Message]], bool]:
    """Return the chat messages argument of a user as a list of conversations, and whether the argument was a single
    conversation.

    Raise TypeError for a value that is neither a list of mappings nor a list of such lists. The chat template checks
    the content of the messages.
    """
    is_one = is_listed(messages) and (not messages or isinstance(messages[0], Mapping))
    conversations = [messages] if is_one else messages
    is_legal = is_listed(conversations) and all(
        is_listed(each) and all(isinstance(message, Mapping) for message in each) for each in conversations
    )
    kind = "a list of messages such as {'role': 'user', 'content': 'Hello'}, or a list of such lists"
    require("messages", messages, is_legal, kind)
    return conversations, is_one


def check_template(template: object, add_generation_prompt: object, **variables: object) -> None:
    """Check the types of the chat template arguments of a call. Raise TypeError for a wrong type. `variables` maps the
    names of the caller's arguments to dicts of template variables."""
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
    """Render each conversation (a list of chat messages) to a prompt, including special tokens.

    `template` is the text of a chat template, the name of one of the model's templates, or None for the model's default
    template. `variables` are passed to the template. With `continue_final_message`, each prompt ends inside its last
    message. Raise InvalidRequest if there is no template, if a conversation is empty, or if rendering fails.
    """
    from pagewire.common.chat import chat_template  # lazy: loads Jinja2, which no other call needs

    if continue_final_message and add_generation_prompt:
        raise _invalid(chat_template.CONFLICTING_OPTIONS)
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
            prompts = [chat_template.without_suffix(prompt, messages[-1]) for prompt, messages in pairs]
    except chat_template.ChatTemplateError as error:
        raise _invalid(str(error)) from None
    for index, prompt in enumerate(prompts):
        check_text(f"prompt {index} of messages", prompt)
    return prompts


def template_of(info: ServerInfo, template: str | None) -> str | None:
    """Return the text of the chat template to use, or None if the model has no default template.

    `template` is the name of one of the model's templates, the text of a template, or None for the model's default.
    Raise InvalidRequest for an unknown name. Any text without "{" counts as a name, since a template without "{" would
    render every conversation to the same prompt.
    """
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
