"""A pytest plugin that replaces the modules that vLLM's parser tests import by Pagewire's parsers.

The plugin supports only the inputs that such tests give to a parser and the results that they check, not a parser's
internals.
"""

import importlib
import importlib.abc
import importlib.machinery
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import transformers

from pagewire.common.chat.chat_output import Arguments, CallStart, Content, OutputPart, Reasoning, format_of

# The names under which vLLM's servers know its parser classes.
TOOL_CLASSES = {
    "Hermes2ProToolParser": "hermes",
    "Granite4ToolParser": "granite4",
    "GraniteEngineToolParser": "granite",
    "Llama3JsonToolParser": "llama3_json",
    "Glm47MoeModelToolParser": "glm47",
    "Qwen3EngineToolParser": "qwen3_coder",
}
REASONING_CLASSES = {"DeepSeekR1ReasoningParser": "deepseek_r1"}
# The chat templates of these models begin the reasoning in the prompt; vLLM's parsers assume so.
_BEGUN = {"deepseek_r1", "glm45", "nemotron_v3", "olmo3", "qwen3", "step3", "ernie45", "granite_thinking_parser"}
_PIECE = re.compile(r"<[^<>\s]{1,30}>|\s?\w+|\s+|.", re.DOTALL)
_CALL_IDS = itertools.count()


class AnyFunctions(dict[str, Any]):
    """The functions of a request that names no function: any name is accepted."""

    def __contains__(self, name: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True

    def __missing__(self, name: str) -> dict[str, Any]:
        return {}

    def get(self, name: str, default: Any = None) -> Any:
        return {}


class Tokenizer:
    """A tokenizer that splits text into words and tags, and numbers each new piece."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def tokenize(self, text: str, **_: Any) -> list[str]:
        return _PIECE.findall(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._ids.setdefault(piece, len(self._ids)) for piece in self.tokenize(text)]

    def decode(self, ids: Sequence[int] | int, **_: Any) -> str:
        texts = list(self._ids)
        given = [ids] if isinstance(ids, int) else ids
        return "".join(each if isinstance(each, str) else texts[each] for each in given)

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        return [self._ids.setdefault(token, len(self._ids)) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int], **_: Any) -> list[str]:
        return [self.decode(each) for each in ids]

    def get_vocab(self) -> dict[str, int]:
        return self._ids


@dataclass
class FunctionCall:
    name: str | None = None
    arguments: str | None = None


@dataclass
class ToolCall:
    function: FunctionCall
    id: str | None = None
    type: str | None = "function"


@dataclass
class DeltaToolCall(ToolCall):
    index: int = 0


@dataclass
class DeltaMessage:
    content: str | None = None
    reasoning: str | None = None
    role: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list)


@dataclass
class ExtractedToolCallInformation:
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None


class Request(SimpleNamespace):
    """Any request or part of a request, with the fields that a test gives."""

    tools: Any = None
    tool_choice: Any = None

    def __init__(self, *_: Any, **given: Any) -> None:
        super().__init__(
            **{
                name: Request(**value) if name == "function" and isinstance(value, dict) else value
                for name, value in given.items()
            }
        )

    @classmethod
    def model_validate(cls, given: dict[str, Any]) -> "Request":
        return cls(**given)


def functions_in(tools: Any) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    for tool in tools or ():
        function = _get(tool, "function") or tool
        functions[_get(function, "name")] = _get(function, "parameters") or {}
    return functions or AnyFunctions()


def _get(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, dict) else getattr(given, name, None)


class Parser:
    """A vLLM-style parser that reads tool calls, reasoning, or both from outputs."""

    calls: str = "none"
    reasoning: str = "none"

    def __init__(self, tokenizer: Any, tools: Any = None, **options: Any) -> None:
        self.model_tokenizer = tokenizer
        self.tools = tools
        self.vocab = tokenizer.get_vocab()
        thinks = (options.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        self._format = format_of("", self.calls, self.reasoning if thinks else "none")
        begins = self.reasoning in _BEGUN and self._format.thinking is not None
        self._prompt = self._format.thinking.begin if begins and self._format.thinking else ""
        self._reader: Any = None
        self._num_calls = 0

    def parts(self, text: str, *, is_first: bool, is_last: bool, request: Any = None) -> Iterator[DeltaMessage]:
        """Yield a message for each part parsed from a piece of an output."""
        if is_first or self._reader is None:
            tools = self.tools or _get(request, "tools")
            self._reader = self._format.parser(self._prompt, functions_in(tools))
            self._num_calls = 0
        for part in self._reader.feed(text, is_last=is_last):
            yield self._delta(part)

    def _delta(self, part: OutputPart) -> DeltaMessage:
        match part:
            case Content(text):
                return DeltaMessage(content=text)
            case Reasoning(text):
                return DeltaMessage(reasoning=text)
            case CallStart(name):
                self._num_calls += 1
                call = DeltaToolCall(FunctionCall(name, ""), f"call_{next(_CALL_IDS)}", index=self._num_calls - 1)
            case Arguments(text):
                call = DeltaToolCall(FunctionCall(None, text), type=None, index=self._num_calls - 1)
        return DeltaMessage(tool_calls=[call])

    def _merged(self, deltas: Iterator[DeltaMessage]) -> DeltaMessage:
        merged = DeltaMessage()
        for delta in deltas:
            merged.content = _joined(merged.content, delta.content)
            merged.reasoning = _joined(merged.reasoning, delta.reasoning)
            for call in delta.tool_calls:
                same = [known for known in merged.tool_calls if known.index == call.index]
                if same:
                    same[0].function.arguments = f"{same[0].function.arguments}{call.function.arguments}"
                else:
                    merged.tool_calls.append(call)
        return merged

    def whole(self, text: str, request: Any) -> DeltaMessage:
        return self._merged(self.parts(text, is_first=True, is_last=True, request=request))

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        message = self.whole(model_output, request)
        return message.reasoning, message.content

    def extract_tool_calls(self, model_output: str, request: Any = None) -> ExtractedToolCallInformation:
        message = self.whole(model_output, request)
        calls = [ToolCall(call.function, call.id) for call in message.tool_calls]
        return ExtractedToolCallInformation(bool(calls), calls, message.content)

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: Any, **__: Any
    ) -> DeltaMessage | None:
        return self._piece(current_text == delta_text, delta_text, None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Any = None,
        current_token_ids: Any = None,
        delta_token_ids: Any = None,
        request: Any = None,
    ) -> DeltaMessage | None:
        return self._piece(current_text == delta_text, delta_text, request)

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        """Return whether the next text would be content."""
        *_, last = self._format.parser(self._prompt, {}).feed(f"{self.model_tokenizer.decode(ids)}x")
        return isinstance(last, Content)

    def extract_content_ids(self, ids: Sequence[int]) -> list[int]:
        content = self.whole(self.model_tokenizer.decode(ids), None).content
        return list(self.model_tokenizer.encode(content or ""))

    def _piece(self, is_first: bool, text: str, request: Any) -> DeltaMessage | None:
        deltas = self.parts(text, is_first=is_first, is_last=False, request=request)
        merged = self._merged(deltas)
        return merged if merged != DeltaMessage() else None


def _joined(first: str | None, second: str | None) -> str | None:
    return second if first is None else f"{first}{second or ''}"


def _class(**names: str) -> type[Parser]:
    return type("NamedParser", (Parser,), names)


class ToolParserManager:
    @staticmethod
    def get_tool_parser(name: str) -> type[Parser]:
        return _class(calls=name)


class ReasoningParserManager:
    @staticmethod
    def get_reasoning_parser(name: str) -> type[Parser]:
        return _class(calls="openai") if name == "openai_gptoss" else _class(reasoning=name)


def detokenize_incrementally(tokenizer: Any, all_input_ids: Any, *_: Any, **__: Any) -> tuple[Any, str, int, int]:
    text = tokenizer.decode(all_input_ids[-1:])
    return [text], text, 0, 0


_ONE_TOKENIZER = Tokenizer()
NAMES: dict[str, Any] = {
    "DeltaFunctionCall": FunctionCall,
    "DeltaMessage": DeltaMessage,
    "DeltaToolCall": DeltaToolCall,
    "ExtractedToolCallInformation": ExtractedToolCallInformation,
    "FunctionCall": FunctionCall,
    "ToolCall": ToolCall,
    "TokenizerLike": Tokenizer,
    "ToolParser": Parser,
    "ReasoningParser": Parser,
    "ToolParserManager": ToolParserManager,
    "ReasoningParserManager": ReasoningParserManager,
    "get_tokenizer": lambda *_, **__: _ONE_TOKENIZER,
    "is_mistral_tokenizer": lambda _: False,
    "detokenize_incrementally": detokenize_incrementally,
    **{each: _class(calls=name) for each, name in TOOL_CLASSES.items()},
    **{each: _class(reasoning=name) for each, name in REASONING_CLASSES.items()},
}


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NAMES.get(name, Request)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that provides a module for each module name of vLLM."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("vllm", "xgrammar"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def _told_pieces(reconstructor: Any, parser: Parser, deltas: Sequence[str], request: Any) -> Any:
    """Feed the deltas to a parser as the server does: the last call reports that the output has ended."""
    for index, delta in enumerate(deltas):
        for message in parser.parts(delta, is_first=index == 0, is_last=index == len(deltas) - 1, request=request):
            reconstructor.append_delta(message)
    return reconstructor


def _stand_in() -> None:
    sys.meta_path.insert(0, _Finder())
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: _ONE_TOKENIZER
    reasoning, tools = (importlib.import_module(f"tests.{name}.utils") for name in ("reasoning", "tool_parsers"))

    def stream_reasoning(parser: Parser, deltas: Any, request: Any = None) -> Any:
        return _told_pieces(reasoning.StreamingReasoningReconstructor(), parser, list(deltas), request)

    def stream_calls(parser: Parser, deltas: Any, request: Any = None, assert_one_tool_per_delta: bool = True) -> Any:
        pieces = _ONE_TOKENIZER.tokenize(deltas) if isinstance(deltas, str) else list(deltas)
        return _told_pieces(tools.StreamingToolReconstructor(assert_one_tool_per_delta), parser, pieces, request)

    reasoning.run_reasoning_extraction_streaming = stream_reasoning
    tools.run_tool_extraction_streaming = stream_calls


_stand_in()
