"""A model that follows a script: it reads the conversation from its prompt and writes the script's text.

The scheduler, the HTTP API, the tokenizer, the chat template and the grammars are the real ones. Only the model's
arithmetic is replaced.
"""

import ctypes
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pagewire.common.grammars import GrammarCompiler, Matcher
from pagewire.common.wire.messages import StepPlan, StepResult
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.core.simulated_worker import Row, SimulatedWorker
from testing.core.toy_grammar import ToyMatcher
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import VOCAB_SIZE, make_tokenizer
from testing.serving.http_server import make_chat_checkpoint

MAX_MODEL_LEN = 200_000
END = 0  # the end token of make_chat_checkpoint
INFILL_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
CLOSING = '"}],1{'  # characters that end any JSON soonest; those that close most come first
# A line for the tools and a line for each message. The comment names the tags of reasoning and calls, which the server
# reads.
TEMPLATE = (
    "{{ (tools or []) | tojson }}\n{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# <think> </think> <tool_call> #}"
)


def make_scripted_checkpoint(path: Path) -> Path:
    make_chat_checkpoint(path, max_model_len=MAX_MODEL_LEN)
    make_tokenizer(path / "tokenizer.json", ["<end>", *INFILL_TOKENS])
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@dataclass(frozen=True)
class Conversation:
    """The tools and messages of a prompt; both are empty for a prompt without a chat template."""

    prompt: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, prompt: str) -> "Conversation":
        text, generation_prompt, rest = prompt.rpartition("<assistant>")
        if not generation_prompt or rest:
            return cls(prompt)
        tools, *messages = [json.loads(line) for line in text.splitlines()]
        return cls(prompt, [tool.get("function", tool) for tool in tools], messages)

    def texts_of(self, role: str) -> list[str]:
        return [text_of(message) for message in self.messages if message["role"] == role]

    @property
    def tool_names(self) -> list[str]:
        return [tool["name"] for tool in self.tools]


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


Script = Callable[[Conversation], str]


class ScriptedWorker(FakeWorker):
    """A worker whose rows write the text that `script` returns.

    It enforces grammars, as a real worker does. A row whose grammar forbids the script's first token writes the text
    that `forced` returns. If the grammar forbids a later token, the row ends its JSON soon.
    """

    def __init__(self, checkpoint: Path, script: Script, forced: Script) -> None:
        digest = read_model_info(str(checkpoint)).digest
        super().__init__(
            digest, max_model_len=MAX_MODEL_LEN, num_device_blocks=4096, block_size=64, max_num_batched_tokens=8192
        )
        tokenizer_json = (checkpoint / "tokenizer.json").read_text()
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE)
        self.closing = [END] + [self.tokenizer.token_to_id(character) for character in CLOSING]
        self.script, self.forced = script, forced
        self.conversations: list[Conversation] = []  # of the rows that were allocated

    def _simulated_worker(self) -> SimulatedWorker:
        base = super()._simulated_worker()
        rows = ScriptedRows(**{each.name: getattr(base, each.name) for each in fields(SimulatedWorker)})
        rows.poisoned = frozenset()  # a prompt may contain any text
        rows.scripted = self
        rows.outputs = {}
        return rows

    def begin(self, prompt: list[int], allowed: set[int] | None) -> list[int]:
        """Return the tokens of the script for a prompt, or of `forced` if `allowed` lacks the script's first token."""
        conversation = Conversation.read(self.tokenizer.decode(prompt, skip_special_tokens=False))
        self.conversations.append(conversation)
        text = self.script(conversation)
        tokens = self.tokenizer.encode(text).ids
        if allowed is not None and tokens[0] not in allowed:
            tokens = self.tokenizer.encode(self.forced(conversation)).ids
        return [*tokens, END]


@dataclass
class Output:
    """The rest of a script, and the state of the grammar that the output must match."""

    row: Row  # keeps the row alive; otherwise another row could get its id
    script: list[int]
    matcher: Matcher | None

    def allowed(self) -> set[int] | None:
        if self.matcher is None:
            return None
        mask = ctypes.create_string_buffer(4 * -(-VOCAB_SIZE // 32))
        self.matcher.fill_mask(ctypes.addressof(mask), len(mask))
        return {token for token in range(VOCAB_SIZE) if mask.raw[token // 8] >> token % 8 & 1}


class ScriptedRows(SimulatedWorker):
    """The rows of a scripted worker."""

    scripted: ScriptedWorker
    outputs: dict[int, Output]  # by the id of their row

    def execute(self, plan: StepPlan, apply_moves: bool = True) -> StepResult:
        result = super().execute(plan, apply_moves)
        return replace(result, embeddings=tuple(_numbers(each) for each in result.embeddings))

    def _next_token(self, row: Row, matcher: ToyMatcher | None, prefix: int) -> int:
        output = self.outputs.get(id(row)) or self._output(row)
        allowed = output.allowed()
        token = output.script.pop(0) if output.script else END
        if allowed is not None and token not in allowed:
            output.script = []
            token = next((token for token in self.scripted.closing if token in allowed), min(allowed))
        if output.matcher is not None:
            output.matcher.consume([token])
        return token

    def _output(self, row: Row) -> Output:
        num_prompt_tokens = row.opening.num_prompt_tokens
        written = row.token_ids[num_prompt_tokens:]
        grammar = self.grammars.get(row.opening.grammar_id)
        matcher = None
        if grammar is not None:
            matcher = self.scripted.compiler.compile(grammar.kind.name.lower(), grammar.text, grammar.end_token_ids)
            matcher.consume(written)
        output = self.outputs[id(row)] = Output(row, [], matcher)
        script = self.scripted.begin(list(row.token_ids[:num_prompt_tokens]), None if written else output.allowed())
        output.script = script[len(written) :]
        return output


def _numbers(embedding: bytes) -> bytes:
    """Return eight bytes that are two finite numbers."""
    return struct.pack("<2f", *(number / 2**15 for number in struct.unpack("<2h", embedding[:4])))
