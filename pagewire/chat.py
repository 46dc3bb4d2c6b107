"""`pagewire chat`: a conversation. The model's chat template is rendered here, in a sandbox."""

import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import datetime

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewire import complete, connection, sampling_flags
from pagewire.client import Client
from pagewire.errors import CommandError, PagewireError
from pagewire.options import Parser
from pagewire.sampling import SamplingParams
from pagewire.server import ServerInfo


class Conversation:
    """What was said so far, and the prompt that continues it.

    With a chat template the prompt is the rendered messages; without one it is all the text so far, which the model
    goes on with. Special tokens that a template names by variable (`bos_token`) render as nothing: the server's
    tokenizer adds its own. CommandError for a template that fails.
    """

    def __init__(self, chat_template: str | None, system: str | None) -> None:
        self._template = None if chat_template is None else _compile(chat_template)
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> str:
        """The prompt for what the user says next."""
        return self._prompt([*self._messages, {"role": "user", "content": text}])

    def add(self, text: str, answer: str) -> None:
        """Keeps a turn."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def _prompt(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            return "".join(message["content"] for message in messages)
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except TemplateError as error:
            raise CommandError(f"the model's chat template fails: {error}") from None


def _compile(chat_template: str) -> Template:
    """A template with the names that templates of the hub rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(chat_template)
    except TemplateError as error:
        raise CommandError(f"the model's chat template fails: {error}") from None


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="pagewire chat", description="Talk with the model. Ctrl-C ends an answer, Ctrl-D the chat.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="say this, print the answer, and end")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--stats", action="store_true", help="print statistics of each answer on standard error")
    connection.add_flags(parser)
    sampling_flags.add_flags(parser)
    parsed = parser.parse_args(arguments)
    info = asyncio.run(_server_info(connection.client(parser, parsed)))
    conversation = Conversation(info.chat_template, parsed.system)
    sampling = sampling_flags.sampling(parsed)
    with connection.client(parser, parsed) as client:
        if parsed.quick is not None:
            _answer(client, conversation, parsed.quick, sampling, parsed.stats)
        else:
            _converse(client, conversation, sampling, info, parsed.stats)
    return 0


async def _server_info(client: Client) -> ServerInfo:
    async with client:
        return await client.server_info()


def _converse(
    client: Client, conversation: Conversation, sampling: SamplingParams, info: ServerInfo, stats: bool
) -> None:
    """Answers each line until the input ends. An answer that fails or is interrupted leaves the rest as it was."""
    kind = "chat" if info.chat_template is not None else "no chat template: it continues your text"
    print(f"{info.served_model_name} ({kind}). Ctrl-D ends.", file=sys.stderr)
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt)
        except EOFError:
            return
        try:
            _answer(client, conversation, text, sampling, stats)
        except PagewireError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)


def _answer(client: Client, conversation: Conversation, text: str, sampling: SamplingParams, stats: bool) -> None:
    """Streams the answer to standard output and keeps the turn."""
    completion = complete.stream(client, conversation.ask(text), sampling, sys.stdout)
    conversation.add(text, completion.outputs[0].text)
    if stats:
        print(complete.statistics(completion), file=sys.stderr)
