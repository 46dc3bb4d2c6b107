"""In which format a model writes reasoning and calls of tools, by its chat template."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from pagewire.common.chat_output import hermes
from pagewire.common.chat_output.output_parser import OutputParser
from pagewire.common.chat_output.parts import Content, Reasoning
from pagewire.common.chat_output.unread import Reading, Unread

_THINK, _END_OF_THINKING = "<think>", "</think>"
_NEWLINES = "\n"
# The JSON Schemas of the parameters of functions, by name.
Functions = Mapping[str, Any]


class CallFormat(NamedTuple):
    read: Callable[[Functions, Unread], Reading[None]]
    tag: Callable[[str, Any], dict[str, Any]]  # of a structural tag: a call of a function, by its parameters' schema
    trigger: str  # what no text but a call has
    separator: str  # between calls


_HERMES = CallFormat(hermes.read_calls, hermes.call_tag, hermes.BEGIN, "\n")


class ChatFormat(NamedTuple):
    has_reasoning: bool
    calls: CallFormat | None

    def parser(self, prompt: str, functions: Functions) -> OutputParser | None:
        """Return what reads an output that goes on with a prompt, and may call functions, if there are any. None: all
        of it is content."""
        if not self.has_reasoning and not functions:
            return None
        read = partial(self.calls.read, functions) if functions and self.calls is not None else _read_content
        return OutputParser(partial(self._read, is_reasoning=self._is_reasoning(prompt), read=read))

    def _is_reasoning(self, prompt: str) -> bool:
        """Tell whether an output begins within its reasoning, as where the template has begun that."""
        return self.has_reasoning and prompt.rstrip().endswith(_THINK)

    def _read(self, unread: Unread, *, is_reasoning: bool, read: Callable[[Unread], Reading[None]]) -> Reading[None]:
        if self.has_reasoning and ((yield from unread.begins_with(_THINK)) or is_reasoning):
            yield from unread.skip(_NEWLINES)
            yield from unread.until((_END_OF_THINKING,), Reasoning)
            yield from unread.skip(_NEWLINES)
        yield from read(unread)

    def structural_tag(
        self,
        functions: Functions,
        prompt: str,
        *,
        is_required: bool,
        is_parallel: bool,
    ) -> dict[str, Any]:
        """Return what outputs match that go on with a prompt, and call functions: one or several, or else any
        number of them within text. Raises ValueError where the model calls none."""
        if self.calls is None:
            raise ValueError("there are no calls in this format")
        tags = [self.calls.tag(name, parameters) for name, parameters in functions.items()]
        ends = {"tags": tags, "stop_after_first": not is_parallel}
        form: dict[str, Any] = {"type": "triggered_tags", "triggers": [self.calls.trigger], **ends}
        if is_required:
            form = {"type": "tags_with_separator", "separator": self.calls.separator, "at_least_one": True, **ends}
        if self.has_reasoning:
            is_within = self._is_reasoning(prompt)
            thought = {"type": "tag", "begin": "" if is_within else _THINK, "content": {"type": "any_text"}}
            space = {"type": "regex", "pattern": r"\s*"}
            behind = {"type": "sequence", "elements": [{**thought, "end": _END_OF_THINKING}, space, form]}
            form = behind if is_within else {"type": "or", "elements": [form, behind]}
        return {"type": "structural_tag", "format": form}


@lru_cache(maxsize=16)
def format_of(template: str) -> ChatFormat:
    """Return the format of what a chat template's model writes."""
    has_reasoning = _THINK in template and _END_OF_THINKING in template
    # Others write something else between these tags.
    is_json = hermes.BEGIN in template and not any(word in template for word in ("<function=", "<arg_key>"))
    return ChatFormat(has_reasoning, _HERMES if is_json else None)


def _read_content(unread: Unread) -> Reading[None]:
    yield from unread.until((), Content)
