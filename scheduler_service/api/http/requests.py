"""The request types of the HTTP API. These types alone decide which requests are valid. The OpenAPI document, the
`/docs` page and docs/http_api.md are generated from them.

A field that is null counts as unset. An unsupported field accepts only null or a value that has no effect; its
description gives the reason.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from pagewire.common.wire.sampling_rules import LOGIT_BIAS, MAX_ENTRIES, MAX_SAMPLES, RANGES, UINT32, Range

MAX_PROMPTS = 1024  # of one request
MAX_INPUTS = 2048  # of one request for embeddings
LEAST_TOP_P = 2.0**-100  # so small that only the most likely token remains
_INT32 = Range(-(2**31), 2**31 - 1)
INT64 = Range(-(2**63), 2**63 - 1)


def within(legal: Range) -> Meta:
    """Return msgspec metadata that limits the value of a request field to the range `legal`."""
    limits: dict[str, Any] = {"gt" if legal.excludes_low else "ge": legal.low}
    if legal.high < 2**63:
        limits["le"] = legal.high
    return Meta(**limits)


def why(text: str) -> Meta:
    """Return msgspec metadata that contains the description of a request field. If the field is not supported, the
    description gives the reason.

    Error messages about the field quote the description. It must not contain the word "context": coding agents shorten
    their conversation after an error with this word.
    """
    return Meta(description=text)


INERT = "no effect"
_INERT = Meta(description=INERT)
_OR_ALL = why("-1: all tokens of the vocabulary, within the limit on the size of an answer")
TokenId = Annotated[int, Meta(ge=0, le=UINT32.high)]
TopP = Annotated[float, within(Range(0, 1)), why("0: only the most likely token")]
TopK = Annotated[int, Meta(ge=-1, le=UINT32.high), why("-1 or 0: no limit")]
Empty = Annotated[list[Any], Meta(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Meta(max_length=0)]
# One text, a list of texts, one list of token ids, or a list of lists of token ids.
PromptField = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
# One text, or a list of texts.
Texts = str | list[str]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: Annotated[bool, why("the last event reports the token usage")] | None = None
    continuous_usage_stats: (
        Annotated[bool, why("requires include_usage: each event reports the usage up to that event")] | None
    ) = None
    include_obfuscation: Annotated[bool, _INERT] | None = None


class StructuredOutputsField(Struct, forbid_unknown_fields=True, frozen=True):
    """A constraint on the text that the model generates. Set exactly one of the first six fields."""

    json: Raw | UnsetType = UNSET  # a JSON Schema, as JSON or as a string
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, why("a grammar in Lark or EBNF syntax")] | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str, why("the JSON text of a structural tag in xgrammar's format")] | None = None
    disable_any_whitespace: Annotated[Literal[False], why("specify it in the schema, with x-guidance")] | None = None
    disable_additional_properties: (
        Annotated[Literal[False], why("specify it in the schema, with additionalProperties")] | None
    ) = None
    whitespace_pattern: Annotated[None, why("specify it in the schema, with x-guidance")] = None


def _nest_fields(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Move all fields of a JSON object except `type` into a nested object called `name`, and return the new object. For
    example, `{"type": "t", "a": 1}` becomes `{"type": "t", name: {"a": 1}}`. If the object already has a field called
    `name`, return it unchanged."""
    inner = {key: value for key, value in given.items() if key != "type"}
    return given if name in given else {"type": given.get("type"), name: inner}


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True, frozen=True):
    """The output is unconstrained text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True, frozen=True):
    """The output is a JSON object. If `schema` is set, the output matches this JSON Schema instead, as in llama.cpp."""

    schema: Raw | UnsetType = UNSET


class ValueFormat(Struct, tag_field="type", tag="json", forbid_unknown_fields=True, frozen=True):
    """The output is JSON that matches the JSON Schema in `value`. TGI and Hugging Face's `InferenceClient` use this
    format."""

    value: Raw


class NamedSchema(Struct, forbid_unknown_fields=True, frozen=True):
    schema: Raw
    name: str | None = None
    description: str | None = None
    strict: Annotated[bool, why("no effect: the schema is always enforced")] | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True, frozen=True):
    """The output is JSON that matches a JSON Schema. OpenAI's chat completions use this format."""

    json_schema: NamedSchema

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert an output format of OpenAI's Responses API to the format of chat completions. The Responses API has
        the fields at the top level; chat completions have them in the nested object `json_schema`. A format of chat
        completions is returned unchanged."""
        return _nest_fields(given, "json_schema")


class StructuralTagFormat(Struct, tag_field="type", tag="structural_tag", forbid_unknown_fields=True, frozen=True):
    """The output matches a structural tag in xgrammar's format. Set either `format`, or `structures` and `triggers` as
    in older versions of xgrammar."""

    format: Raw | UnsetType = UNSET
    structures: Raw | UnsetType = UNSET
    triggers: Raw | UnsetType = UNSET


ResponseFormat = TextFormat | JsonObjectFormat | ValueFormat | JsonSchemaFormat | StructuralTagFormat


class QueuedRequest(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The fields that all requests for generated text and for embeddings share."""

    model: str | None = None
    # Names and meanings are the same as in the public proto.
    request_id: str | None = None
    rid: Annotated[str, why("alias of request_id, which takes precedence")] | None = None
    tenant: str | None = None
    priority: Annotated[int, within(_INT32)] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    will_return: bool | None = None
    retention_seconds: Annotated[int, Meta(ge=1, le=UINT32.high)] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=UINT32.high), why("-1: truncate to max_model_len - 1 tokens")] | None
    ) = None
    truncation_side: Annotated[Literal["left", "right"], why("the side to truncate; default: left")] | None = None
    add_special_tokens: bool | None = None
    timeout: Annotated[float, Meta(gt=0), why("seconds until the request ends with status 504")] | None = None
    # Fields without an effect on the output.
    user: Annotated[Any, _INERT] = None
    metadata: Annotated[dict[str, Any], _INERT] | None = None
    store: Annotated[bool, _INERT] | None = None
    service_tier: Annotated[str, _INERT] | None = None
    safety_identifier: Annotated[str, _INERT] | None = None
    prompt_cache_key: Annotated[str, _INERT] | None = None
    prompt_cache_retention: Annotated[str, _INERT] | None = None
    prompt_cache_options: (
        Annotated[dict[Literal["mode", "ttl"], str], why("no effect: prefixes are always cached")] | None
    ) = None
    spaces_between_special_tokens: Annotated[bool, _INERT] | None = None
    mm_processor_kwargs: Annotated[dict[str, Any], _INERT] | None = None  # for images, which are not supported
    media_io_kwargs: Annotated[dict[str, Any], _INERT] | None = None
    # Unsupported fields.
    kv_transfer_params: Annotated[EmptyObject, why("KV caches of other engines cannot be used")] | None = None
    vllm_xargs: Annotated[EmptyObject, why("the server has no extensions")] | None = None


class SampledRequest(QueuedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The sampling options of one generated output. The options have the same names in the public gRPC API."""

    temperature: Annotated[float, within(RANGES["temperature"])] | None = None
    top_p: TopP | None = None
    min_p: Annotated[float, within(RANGES["min_p"])] | None = None
    presence_penalty: Annotated[float, within(RANGES["presence_penalty"])] | None = None
    frequency_penalty: Annotated[float, within(RANGES["frequency_penalty"])] | None = None
    repetition_penalty: Annotated[float, within(RANGES["repetition_penalty"])] | None = None
    min_tokens: Annotated[int, within(RANGES["min_tokens"])] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[TokenId, Annotated[float, within(LOGIT_BIAS)]] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    top_k: TopK | None = None
    seed: Annotated[int, within(INT64)] | None = None
    stop: Annotated[Texts, why("the empty string: no effect")] | None = None


# Convert the values of request fields to the values of sampling options. Other fields need no conversion.
READINGS: Mapping[str, Callable[[Any], Any]] = {
    "top_p": lambda top_p: top_p or LEAST_TOP_P,
    "top_k": lambda top_k: max(top_k, 0),
    "seed": lambda seed: seed % 2**64,
    "stop": lambda stop: [stop] if isinstance(stop, str) and stop else stop or [],
}


class GenerationRequest(SampledRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The additional fields that requests for completions and for chat completions share. They have the same names as
    in vLLM."""

    n: Annotated[int, within(RANGES["n"])] | None = None
    prompt_logprobs: Annotated[int, within(RANGES["prompt_logprobs"]), _OR_ALL] | None = None
    beam_width: Annotated[int, within(RANGES["beam_width"])] | None = None
    length_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    detached: Annotated[bool, why("run without the client; the answer has the id for /v1/requests")] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: Raw | UnsetType = UNSET  # as structured_outputs.json
    guided_regex: Annotated[str, why("alias of structured_outputs.regex")] | None = None
    guided_choice: Annotated[list[str], why("alias of structured_outputs.choice")] | None = None
    guided_grammar: Annotated[str, why("alias of structured_outputs.grammar")] | None = None
    regex: Annotated[str, why("alias of structured_outputs.regex")] | None = None
    ebnf: Annotated[str, why("alias of structured_outputs.grammar")] | None = None
    grammar: Annotated[str, why("alias of structured_outputs.grammar, as in llama-server")] | None = None
    json_schema: Raw | UnsetType = UNSET  # as structured_outputs.json
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[str], why("texts that the output must not contain, not even inside words")] | None = None
    use_beam_search: Annotated[bool, why("use n beams, unless beam_width is set")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: Annotated[bool, why("write tokens in logprobs as token_id:N")] | None = None
    logprob_token_ids: (
        Annotated[
            list[TokenId],
            Meta(max_length=MAX_ENTRIES["logprob_token_ids"]),
            why("requires logprobs: report these tokens instead of the most likely; at most 128"),
        ]
        | None
    ) = None
    # Unsupported fields.
    logits_processors: Annotated[Empty, why("the server runs no code of clients")] | None = None
    ec_transfer_params: Annotated[EmptyObject, why("caches of other engines cannot be used")] | None = None
    repetition_detection: Annotated[None, why("outputs end only at stop texts, stop tokens and length limits")] = None
    watermarking: Annotated[Literal[False], why("outputs have no watermarks")] | None = None
    stream_interval: Annotated[Literal[1], why("tokens are sent as soon as they are computed")] | None = None
    return_token_offsets: Annotated[Literal[False], why("token offsets are not available")] | None = None
    return_mm_kwargs: Annotated[bool, _INERT] | None = None
    routed_experts_prompt_start: Annotated[int, _INERT] | None = None


_LOADED = why("no effect: the prompt describes every tool from the start")
STRICT = why("true: if calls are required, refuse a schema that cannot be enforced completely")


class NamedTool(Struct, forbid_unknown_fields=True, frozen=True):
    """The fields that descriptions of single tools share."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    defer_loading: Annotated[bool, _LOADED] | None = None


class FunctionField(NamedTool, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call, with a JSON Schema of its parameters."""

    parameters: Annotated[dict[str, Any], why("a JSON Schema; default: no parameters")] | None = None
    strict: Annotated[bool, STRICT] | None = None


class ToolField(Struct, tag_field="type", tag="function", forbid_unknown_fields=True, frozen=True):
    function: FunctionField
    defer_loading: Annotated[bool, _LOADED] | None = None
    cache_control: Annotated[dict[str, Any], _INERT] | None = None

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert a tool of OpenAI's Responses API to a tool of chat completions. The fields of the function, such as
        `name`, move into a nested object `function`. A tool of chat completions is returned unchanged."""
        if "function" in given or "name" not in given:
            return given
        names = FunctionField.__struct_fields__
        others = {name: value for name, value in given.items() if name not in names}
        return {**others, "function": {name: given[name] for name in names if name in given}}


class AllowedTools(Struct, forbid_unknown_fields=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolField], Meta(min_length=1)]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True, frozen=True):
    """Restricts the model's calls to some of the request's tools. The prompt still describes all tools."""

    allowed_tools: AllowedTools

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert a tool choice of OpenAI's Responses API to a tool choice of chat completions. The Responses API has
        the fields at the top level; chat completions have them in the nested object `allowed_tools`. A tool choice of
        chat completions is returned unchanged."""
        return _nest_fields(given, "allowed_tools")


class ThinkingField(Struct, forbid_unknown_fields=True, frozen=True):
    """Turns the model's reasoning on or off. The APIs of DeepSeek, GLM and Kimi use this format."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[None, why("use thinking_token_budget")] = None


class AutoMode(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True, frozen=True):
    """A tool choice that is equivalent to the string `auto`."""


class NoMode(Struct, tag_field="type", tag="none", forbid_unknown_fields=True, frozen=True):
    """A tool choice that is equivalent to the string `none`."""


class RequiredMode(Struct, tag_field="type", tag="required", forbid_unknown_fields=True, frozen=True):
    """A tool choice that is equivalent to the string `required`."""


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    prompt: PromptField
    max_tokens: (
        Annotated[
            int, Meta(ge=-1, le=UINT32.high), why("default: 16; 0 requires echo; -1: up to the maximum sequence length")
        ]
        | None
    ) = None
    logprobs: Annotated[int, within(RANGES["logprobs"]), _OR_ALL] | None = None
    echo: bool | None = None
    best_of: Annotated[int, within(Range(1, MAX_SAMPLES))] | None = None
    suffix: Annotated[str, why("generate the text between prompt and suffix; the model must support this")] | None = (
        None
    )
    prompt_embeds: Annotated[None, why("prompts are texts or token ids")] = None
    thinking_token_budget: Annotated[Literal[-1], why("reasoning is recognized only in chat completions")] | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    messages: Messages
    max_tokens: (
        Annotated[int, Meta(ge=-1, le=UINT32.high), why("default and -1: up to the maximum sequence length")] | None
    ) = None
    max_completion_tokens: (
        Annotated[
            int,
            Meta(ge=-1, le=UINT32.high),
            why("takes precedence over max_tokens; -1 or too large: up to the maximum sequence length"),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: (
        Annotated[
            int,
            within(RANGES["logprobs"]),
            why("requires logprobs; -1: all tokens of the vocabulary, within the limit on the size of an answer"),
        ]
        | None
    ) = None
    chat_template: Annotated[str, why("the name of one of the model's chat templates")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], why("variables for the chat template")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: (
        Annotated[bool, why("begin the answer with the text of the last message, if that has the answer's role")] | None
    ) = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Annotated[str, why("a variable for the chat template")] | None = None
    tools: list[ToolField] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | ToolField | AllowedToolsChoice | AutoMode | NoMode | RequiredMode | None
    ) = None
    parallel_tool_calls: Annotated[bool, why("false: at most one call")] | None = None
    functions: Annotated[Empty, why("deprecated; use tools")] | None = None
    function_call: Annotated[Literal["none", "auto"], why("deprecated; use tool_choice")] | None = None
    thinking_token_budget: (
        Annotated[int, Meta(ge=-1, le=UINT32.high), why("reasoning ends after that many tokens; -1: no limit")] | None
    ) = None
    include_reasoning: Annotated[bool, why("false: omit the reasoning from the answer")] | None = None
    separate_reasoning: (
        Annotated[bool, why("false: include the reasoning in content, with its tags if there are any")] | None
    ) = None
    enable_thinking: Annotated[bool, why("sets the chat template's variables enable_thinking and thinking")] | None = (
        None
    )
    thinking: Annotated[bool | ThinkingField, why("alias of enable_thinking, which takes precedence")] | None = None
    modalities: Annotated[list[Literal["text"]], why("outputs are text only")] | None = None
    audio: Annotated[None, why("outputs are text only")] = None
    prediction: Annotated[dict[str, Any], _INERT] | None = None  # at OpenAI, it only speeds up the answer
    verbosity: (
        Annotated[
            Literal["low", "medium", "high"],
            why("a variable for the chat template; ignored with a warning if the template does not read it"),
        ]
        | None
    ) = None
    web_search_options: Annotated[None, why("the server does not search the web")] = None
    moderation: Annotated[None, why("the server does not moderate texts")] = None
    return_prompt_text: Annotated[Literal[False], why("use return_token_ids")] | None = None

    @staticmethod
    def normalize_json(given: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields of other APIs in a request to the equivalent fields of chat completions, and return the
        request. These fields are a tool choice of Mistral or Anthropic, and the object `reasoning` of OpenRouter."""
        meant = dict(given)
        match given.get("tool_choice"):
            case "any" | {"type": "any"}:
                meant["tool_choice"] = "required"
            case {"type": "tool", "name": str(name), **others} if not others:
                meant["tool_choice"] = {"type": "function", "function": {"name": name}}
        match given.get("reasoning"):
            case {"effort": effort, **others} if not others and "reasoning_effort" not in given:
                meant["reasoning_effort"] = effort
                del meant["reasoning"]
            case {"enabled": enabled, **others} if not others and "enable_thinking" not in given:
                meant["enable_thinking"] = enabled
                del meant["reasoning"]
        return meant


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A request to convert a text or a conversation to token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    content: Annotated[str, why("a text, as in llama-server")] | None = None
    add_special: Annotated[bool, why("of content; default: false")] | None = None
    with_pieces: Annotated[bool, why("return the text of each token")] | None = None
    parse_special: Annotated[Literal[True], why("special tokens in a text are always recognized")] | None = None
    add_special_tokens: Annotated[bool, why("default: true for a text, false for a conversation")] | None = None
    return_token_strs: bool | None = None
    chat_template: Annotated[str, why("the name of one of the model's chat templates")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], why("variables for the chat template")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[dict[str, Any]], why("a variable for the chat template")] | None = None
    mm_processor_kwargs: Annotated[dict[str, Any], _INERT] | None = None
    media_io_kwargs: Annotated[dict[str, Any], _INERT] | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


class EmbeddingRequest(QueuedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A request for embeddings of texts, of lists of token ids, or of a conversation."""

    input: PromptField | None = None
    messages: Annotated[Messages, why("a conversation to embed instead of input")] | None = None
    chat_template: Annotated[str, why("the name of one of the model's chat templates")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], why("variables for the chat template")] | None = None
    add_generation_prompt: Annotated[bool, why("default: false")] | None = None
    continue_final_message: bool | None = None
    encoding_format: Annotated[Literal["float", "base64"], why("base64 needs a quarter of the bytes")] | None = None
    dimensions: (
        Annotated[int, Meta(ge=1), why("return this many leading numbers of each embedding, scaled to unit length")]
        | None
    ) = None
    prompt_name: (
        Annotated[str, why("the prompt of config_sentence_transformers.json that precedes each text")] | None
    ) = None
    padding: Annotated[Literal["do_not_pad"], why("inputs are not padded")] | None = None
    embed_dtype: Annotated[Literal["float32"], why("embeddings consist of 32-bit floats")] | None = None
    endianness: Annotated[Literal["native", "little"], why("embeddings are little-endian")] | None = None
    use_activation: Annotated[Literal[True], why("embeddings always have unit length")] | None = None
    normalize: Annotated[Literal[True], why("embeddings always have unit length")] | None = None


class NamedRequest(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Names a generation request by its id and tenant."""

    request_id: str
    tenant: str | None = None


class DetachedQuery(NamedRequest, kw_only=True, forbid_unknown_fields=True, frozen=True):
    stream: Annotated[bool, why("send the existing and all further output as events")] | None = None
    from_token: (
        Annotated[int, Meta(ge=0, le=UINT32.high), why("requires stream: the first token to send of each output")]
        | None
    ) = None
