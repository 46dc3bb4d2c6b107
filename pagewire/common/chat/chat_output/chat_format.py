"""Selection of the format in which a model writes reasoning and tool calls, based on its chat template."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from pagewire.common.chat.chat_output import glm, harmony, json_calls, llama, mistral, pythonic, xml_calls
from pagewire.common.chat.chat_output.call_forms import (
    ANY_TEXT,
    FREE_TEXTS,
    CallTag,
    Form,
    LeadingCalls,
    OutputConstraints,
    TaggedCalls,
)
from pagewire.common.chat.chat_output.output_parser import OutputParser
from pagewire.common.chat.chat_output.parameters import Parameters, read_functions
from pagewire.common.chat.chat_output.parts import Reasoning
from pagewire.common.chat.chat_output.unread import Reading, Unread, read_content

_NEWLINES = "\n"
_OPENAI, _GPT_OSS, _NONE = "openai", "openai_gptoss", "none"
# Whitespace after reasoning. Without the limit a model might produce spaces forever.
_SPACE: Form = {"type": "regex", "pattern": r"[ \n]{0,2}"}
# Functions by name: their `Parameters`, or JSON Schemas of their parameters.
Functions = Mapping[str, Any]
_Format = TypeVar("_Format")


class CallFormat(NamedTuple):
    read: Callable[[Mapping[str, Parameters], Unread], Reading[None]]
    form: Callable[[OutputConstraints], Form]  # the format of outputs, for structural tags
    tags: tuple[str, ...]  # the tags that the reader recognizes


class ThinkingTags(NamedTuple):
    begin: str
    end: str


class ChatFormat(NamedTuple):
    thinking: ThinkingTags | None
    calls: CallFormat | None
    is_in_channels: bool = False  # the format of the calls covers the whole output

    @property
    def has_reasoning(self) -> bool:
        return self.thinking is not None or self.is_in_channels

    def tags(self, functions: Functions) -> tuple[str, ...]:
        """Return the tags, such as "<think>", that the parser must find in an output that may call `functions`. If some
        tags are special tokens of the tokenizer, decoding must keep these tokens in the text.
        """
        calls = self._read_in(functions)
        return (*(self.thinking or ()), *(calls.tags if calls else ()))

    def parser(self, prompt: str, functions: Functions) -> OutputParser:
        """Return a parser for the model's output that follows `prompt` and may call `functions`. Raises
        SchemaBudgetError if the JSON Schemas of the functions are too large.
        """
        calls = self._read_in(functions)
        read = partial(calls.read, read_functions(functions)) if calls else read_content
        read_all = partial(self._read, is_reasoning=self.is_reasoning(prompt), read=read)
        return OutputParser(read_all, has_reasoning=self.has_reasoning)

    def _read_in(self, functions: Functions) -> CallFormat | None:
        return self.calls if functions or self.is_in_channels else None

    def is_reasoning(self, prompt: str) -> bool:
        """Return whether the model's output begins inside reasoning. This is the case if the prompt ends with the begin
        tag of reasoning.
        """
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.begin)

    def _read(self, unread: Unread, *, is_reasoning: bool, read: Callable[[Unread], Reading[None]]) -> Reading[None]:
        if self.thinking and ((yield from unread.begins_with(self.thinking.begin)) or is_reasoning):
            yield from unread.skip(_NEWLINES)
            yield from unread.thoughts(unread.until((self.thinking.end,), Reasoning))
            yield from unread.skip(_NEWLINES)
        yield from read(unread)

    def structural_tag(
        self,
        functions: Functions,
        prompt: str,
        *,
        is_required: bool = False,
        is_parallel: bool = True,
        text: Form | None = None,
        max_reasoning_tokens: int | None = None,
    ) -> Form:
        """Return the structural tag (a grammar in JSON) that constrains the model's output after `prompt`.

        With `functions`, the output has any number of calls (at most one unless `is_parallel`) within free text. If
        `text` is another format than free text, the output has either calls or this text. With `is_required` the output
        has calls and no text. The constraints apply after the reasoning, if the prompt or the output begins reasoning.
        `max_reasoning_tokens` limits the reasoning; free text can then not begin any further reasoning. Raises
        ValueError if there are functions but the format has no calls, and SchemaBudgetError if the functions' JSON
        Schemas are too large.
        """
        if functions and self.calls is None:
            raise ValueError("this chat format has no tool calls")
        thought: Form = {"type": ANY_TEXT}
        text = {"type": ANY_TEXT} if text is None else text
        if max_reasoning_tokens is not None:
            thought["max_tokens"] = max_reasoning_tokens
            text = _without(text, [self.thinking.begin] if self.thinking else [])
        constraints = OutputConstraints(read_functions(functions), text, thought, is_required, is_parallel)
        form = self.calls.form(constraints) if self.calls and (functions or self.is_in_channels) else constraints.text
        return {
            "type": "structural_tag",
            "format": self._behind_reasoning(form, thought, prompt),
            "special_tokens": list(self.tags(functions)),
        }

    def _behind_reasoning(self, form: Form, thought: Form, prompt: str) -> Form:
        if self.thinking is None:
            return form
        is_within = self.is_reasoning(prompt)
        begin, end = "" if is_within else self.thinking.begin, self.thinking.end
        reasoning = {"type": "tag", "begin": begin, "content": thought, "end": end}
        behind = {"type": "sequence", "elements": [reasoning, _SPACE, form]}
        return behind if is_within else {"type": "or", "elements": [form, behind]}


def _without(form: Any, texts: list[str]) -> Any:
    """Forbid `texts` in all free text of a structural tag format (a grammar in JSON), and return the changed copy. Free
    text in nested formats is covered too. Constant texts of the format may still contain `texts`.
    """
    if isinstance(form, list):
        return [_without(each, texts) for each in form]
    if not isinstance(form, dict):
        return form
    inner = {name: _without(form[name], texts) for name in ("content", "elements", "tags") if name in form}
    if form.get("type") in FREE_TEXTS:
        given = [] if form.get("excludes") is None else form["excludes"]
        inner["excludes"] = given + texts if isinstance(given, list) else given
    return {**form, **inner}


_THINKING = ThinkingTags("<think>", "</think>")
_SEED_THINKING = ThinkingTags("<seed:think>", "</seed:think>")
_MISTRAL_THINKING = ThinkingTags("[THINK]", "[/THINK]")
# vLLM's names of the parsers, the texts of which a template must contain at least one, and the tags. OLMo's template
# only begins the reasoning. LFM's template drops the reasoning of earlier answers.
_REASONING: tuple[tuple[tuple[str, ...], tuple[str, ...], ThinkingTags], ...] = (
    (
        (
            "deepseek_r1",
            "deepseek_v3",
            "ernie45",
            "glm45",
            "glm47",
            "granite_thinking_parser",
            "mimo",
            "nemotron_v3",
            "olmo3",
            "qwen3",
            "step3",
        ),
        _THINKING,
        _THINKING,
    ),
    (("seed_oss",), _SEED_THINKING, _SEED_THINKING),
    (("mistral",), _MISTRAL_THINKING, _MISTRAL_THINKING),
)


def _between_tags(calls: json_calls.JsonCalls | xml_calls.XmlCalls | pythonic.PythonicCalls) -> CallFormat:
    return CallFormat(calls.read_calls, TaggedCalls(calls.call_tag, calls.tags[0], "\n").form, calls.tags)


def _mistral(call_tag: CallTag) -> CallFormat:
    return CallFormat(mistral.read_calls, TaggedCalls(call_tag, mistral.BEGIN, "").form, mistral.TAGS)


_HARMONY = CallFormat(harmony.read_messages, harmony.form, harmony.TAGS)
_GLM = CallFormat(glm.read_calls, TaggedCalls(glm.call_tag, glm.BEGIN, "\n").form, (glm.BEGIN, glm.END))
_LLAMA = CallFormat(llama.read_calls, LeadingCalls(llama.call_tag, "", "; ", "", "{").form, (llama.TAG,))
_LLAMA_PYTHONIC = CallFormat(
    pythonic.LLAMA.read_calls, LeadingCalls(pythonic.bare_call_tag, "[", ", ", "]", "[").form, pythonic.LLAMA.tags
)
# Names of the parsers (vLLM's where it has one), the texts that a template must contain, and the format. The first
# entry whose texts are all in the template applies.
_CALLS: tuple[tuple[tuple[str, ...], tuple[str, ...], CallFormat], ...] = (
    ((_OPENAI,), ("<|channel|>", "<|message|>"), _HARMONY),
    (("mistral",), ("[TOOL_CALLS]", "[ARGS]"), _mistral(mistral.named_call_tag)),
    (("mistral",), ("[TOOL_CALLS]",), _mistral(mistral.listed_call_tag)),
    (("seed_oss",), ("<seed:tool_call>",), _between_tags(xml_calls.SEED)),
    (("lfm2",), ("<|tool_call_start|>",), _between_tags(pythonic.LFM)),
    (("olmo3",), ("<function_calls>",), _between_tags(pythonic.OLMO)),
    (("granite", "phi4_mini_json"), ("<|tool_call|>",), _between_tags(json_calls.GRANITE)),
    (("nemotron",), ("<TOOLCALL>",), _between_tags(json_calls.NEMOTRON)),
    (("glm45", "glm47"), ("<tool_call>", "<arg_key>"), _GLM),
    (("qwen3_coder", "qwen3_xml", "mimo"), ("<tool_call>", "<function="), _between_tags(xml_calls.QWEN)),
    (("hermes", "granite4", "qwen3_json"), ("<tool_call>",), _between_tags(json_calls.HERMES)),
    (("llama3_json", "llama4_json"), ('"parameters": dictionary of argument name',), _LLAMA),
    (("llama4_pythonic", "pythonic"), ("[func_name",), _LLAMA_PYTHONIC),
)
TOOL_CALL_PARSERS = (*dict.fromkeys(name for names, *_ in _CALLS for name in names), _NONE)
REASONING_PARSERS = (*(name for names, *_ in _REASONING for name in names), _GPT_OSS, _NONE)


class ChatRules(NamedTuple):
    """The server's settings for the parsing of model output and for tool calls. The settings apply to all chat
    requests.
    """

    strict_tools: bool = True  # schemas also constrain the calls that the model makes by choice (tool_choice "auto")
    tool_call_parser: str | None = None  # None: select by the chat template
    reasoning_parser: str | None = None

    def check(self) -> None:
        """Raise ValueError if only one of the two parsers is set to the gpt-oss format. The channels of gpt-oss contain
        both calls and reasoning, so this format cannot be combined with another.
        """
        calls, reasoning = self.tool_call_parser, self.reasoning_parser
        if None not in (calls, reasoning) and (calls == _OPENAI) != (reasoning == _GPT_OSS):
            raise ValueError(
                f"--tool-call-parser {calls} and --reasoning-parser {reasoning} cannot go together: gpt-oss writes "
                f"both in one format, so {_OPENAI} requires {_GPT_OSS}; leave one of the two options out"
            )

    def format_of(self, template: str) -> ChatFormat:
        return format_of(template, self.tool_call_parser, self.reasoning_parser)


@lru_cache(maxsize=16)
def format_of(template: str, tool_call_parser: str | None = None, reasoning_parser: str | None = None) -> ChatFormat:
    """Return the format in which a model writes reasoning and tool calls. The names of the parsers select the format.
    Where a name is None, the tags that appear in the text of the chat template select the format.
    """
    if reasoning_parser == _GPT_OSS:
        tool_call_parser, reasoning_parser = _OPENAI, _NONE
    thinking = _chosen(_REASONING, reasoning_parser, lambda texts: any(text in template for text in texts))
    calls = _chosen(_CALLS, tool_call_parser, lambda texts: all(text in template for text in texts))
    return ChatFormat(thinking, calls, is_in_channels=calls is _HARMONY)


def _chosen(
    table: Sequence[tuple[tuple[str, ...], tuple[str, ...], _Format]],
    name: str | None,
    fits_template: Callable[[tuple[str, ...]], bool],
) -> _Format | None:
    """Choose an output format from `table`, by the parser's name or by the chat template.

    Without a name, return the first format that fits the template, or None. With a name, consider only the formats of
    that name: return the first one that fits the template, else the first one, or None if no format has the name.
    """
    found = [(texts, each) for names, texts, each in table if name is None or name in names]
    first = found[0][1] if found and name is not None else None
    return next((each for texts, each in found if fits_template(texts)), first)
