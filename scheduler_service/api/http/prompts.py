"""The prompts of a request: texts, token ids, or a conversation rendered with the chat template."""

from typing import Any, cast

from pagewire.common.chat.chat_template import CONFLICTING_OPTIONS, ChatTemplateError, render, without_suffix
from pagewire.common.grammars.json_schema import without_unset
from scheduler_service.api.http.requests import (
    MAX_INPUTS,
    MAX_PROMPTS,
    ChatCompletionRequest,
    EmbeddingRequest,
    NoMode,
    PromptField,
    TokenizeRequest,
    ToolField,
)
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

# The placeholder for an image in a tool's result, and the warning for the client.
IMAGE_LEFT_OUT = "[An image was left out here: the model reads text only.]"
IMAGES_WARNING = "images in the results of tools are left out: the model reads text only"
# The placeholder and the warning for a file that is not sent as text.
FILE_LEFT_OUT = "[A file was left out here: the model reads text only.]"
FILES_WARNING = "files in the results of tools are left out: the model reads text only"
_Conversation = ChatCompletionRequest | TokenizeRequest | EmbeddingRequest
_PROMPT_VALUES = 512  # cost of making a request from one prompt, in JSON values
# Request fields that are passed to the template as variables of the same names.
_VARIABLES = ("documents", "reasoning_effort", "verbosity")


def separate_prompts(given: PromptField, field: str, most: int = MAX_PROMPTS) -> list[str | tuple[int, ...]]:
    """Split the prompt field of a request, which may contain several prompts, into single prompts. Return each prompt
    as a text or as a tuple of token ids. `field` is the name of the request field, for errors. Raises RefusedError if
    there are more than `most` prompts, or if a list contains both token ids and other prompts."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [tuple(cast(list[int], given))]
    if len(given) > most:
        raise invalid(field, f"{field} has {len(given)} entries, at most {most} are allowed; send fewer")
    if int in kinds:
        raise invalid(field, f"{field} mixes token ids with texts or lists; send the ids in a list of their own")
    return [item if isinstance(item, str) else tuple(item) for item in cast(list[str | list[int]], given)]


def reading_size(given: PromptField, call: Call) -> int:
    """Estimate the cost of converting the prompts of an HTTP call into generation requests. The unit is the cost of one
    JSON value. The caller runs the conversion on a thread if the cost is high."""
    num_prompts = 1 if isinstance(given, str) or isinstance(given[0], int) else min(len(given), MAX_INPUTS)
    return max(call.size, _PROMPT_VALUES * num_prompts)


async def render_messages(request: _Conversation, call: Call, intake: Intake) -> str:
    """Render a conversation with the model's chat template, and return the text of the prompt. The template runs on a
    thread, which the tenants use in turn. Raises RefusedError if the model has no chat template or the template
    fails."""
    template = chosen_template(intake.model, request.chat_template)
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid("continue_final_message", CONFLICTING_OPTIONS)
    tenant = call.caller.tenant(getattr(request, "tenant", None) or "")
    return await intake.turns.run(tenant, call.size, _rendered, template, request, intake.model)


def _rendered(template: str, request: _Conversation, model: ModelInfo) -> str:
    messages = request.messages or []
    adds_prompt = not request.continue_final_message and request.add_generation_prompt is not False
    try:
        text = render(
            template,
            messages,
            special_tokens=model.special_tokens,
            add_generation_prompt=adds_prompt,
            variables=_variables_of(request),
        )
    except ChatTemplateError as error:
        raise invalid(f"messages{error.place}", str(error)) from None
    try:
        return without_suffix(text, messages[-1]) if request.continue_final_message else text
    except ChatTemplateError as error:
        raise invalid("continue_final_message", str(error)) from None


def _variables_of(request: _Conversation) -> dict[str, Any]:
    """Return the variables that a request passes to the chat template, keyed by name. They are request fields such as
    `tools` and `reasoning_effort`, and the entries of `chat_template_kwargs`. If both define a variable, the entry in
    `chat_template_kwargs` takes precedence."""
    named = {name: value for name in _VARIABLES if (value := getattr(request, name, None)) is not None}
    thinks = getattr(request, "enable_thinking", None)
    if thinks is None and (thinking := getattr(request, "thinking", None)) is not None:
        thinks = getattr(thinking, "type", thinking) not in (False, "disabled")
    if thinks is not None:
        named |= {"enable_thinking": thinks, "thinking": thinks}  # templates read one of the two names
    tools = getattr(request, "tools", None)
    if tools and getattr(request, "tool_choice", None) not in ("none", NoMode()):  # else the prompt has no tools
        named["tools"] = [tool if isinstance(tool, dict) else _plain(tool) for tool in tools]
    return named | (request.chat_template_kwargs or {})


def _plain(tool: ToolField) -> dict[str, Any]:
    # The template does not get `strict`, which only the server uses.
    function = {name: getattr(tool.function, name) for name in ("name", "description", "parameters")}
    function = {name: without_unset(value) for name, value in function.items() if value is not None}
    return {"type": "function", "function": function}


def chosen_template(model: ModelInfo, name: str | None) -> str:
    """Return the text of the model's chat template called `name`, or of the default chat template if `name` is None.
    Raises RefusedError if the model has no such template."""
    if model.template_file is None:
        raise invalid(
            "messages",
            "the served model has no chat template; send a prompt to /v1/completions, or serve another model",
        )
    if name is None:
        return model.template_file.text
    named = model.template_file.named
    if name not in named:
        known = ", ".join(sorted(named)) or "none"
        raise invalid(
            "chat_template", f"chat_template is {name[:40]!r}, which is not a template of the model; known: {known}"
        )
    return named[name]
