"""`pagewire chat`, a chat on the terminal, and `pagewire run`, which also serves the model."""

import argparse
import contextlib
import glob
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagewire import options
from pagewire.cli import chat_file, client_flags, connection, request
from pagewire.cli.chat_file import SavedChat
from pagewire.cli.chat_terminal import ChatTerminal, history_path, read_input
from pagewire.cli.command import tell
from pagewire.client.arguments import check_text
from pagewire.client.client import Client
from pagewire.client.completion import Completion
from pagewire.client.conversation import Session, template_of
from pagewire.client.errors import CommandError, InvalidRequest, PagewireError, Unavailable
from pagewire.client.sampling_params import SamplingParams
from pagewire.client.server_info import ServerInfo
from pagewire.common.strict_json import from_json, to_json
from pagewire.compatibility import FOREIGN_RUN_FLAGS, suggestion
from pagewire.hosting.local_server import END_TIMEOUT_S, LocalServer, serving
from pagewire.hosting.model_source import MISSING
from pagewire.hosting.printable import printable_lines
from pagewire.options import DESCRIBE, Parser

# A command that ends with a space has an argument.
COMMANDS = ("/help", "/clear", "/exit", "/load ", "/regen", "/save ", "/set ", "/show", "/system ")
HELP = """\
/set NAME VALUE  set a sampling option, or reset it
/system TEXT     set the system message, or remove it
/show            show the options and the context used
/regen           answer the last message again
/clear           forget the conversation
/save FILE       write the conversation to a JSON file
/load FILE       replace the conversation by a saved one
/exit            end the chat, as Ctrl-D does
/help            show this
//TEXT           send /TEXT to the model
\"\"\"              begin a message of several lines, up to \"\"\"
\\                continue the message on the next line
Ctrl-C           stop the answer, and keep its beginning
Tab              complete a command, an option, a file name"""
_NO_TEXTS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


class Conversation:
    """The messages of a chat so far. The class renders the messages to the prompt for the next answer.

    With a chat template, the prompt is the output of the template. Without a template, the prompt is the concatenation
    of all message texts, which the model continues. `special_tokens` are variables of the template. `bos_token` renders
    as an empty text, since the server's tokenizer adds this token. Raise CommandError if the template fails.
    """

    def __init__(self, template: str | None, system: str | None, special_tokens: Mapping[str, str] = _NO_TEXTS) -> None:
        self.template = template
        self._special_tokens = {**_NO_TEXTS, **special_tokens, "bos_token": ""}
        self.system = system
        self.turns: list[tuple[str, str]] = []  # pairs of user message and model answer
        self.session_id = secrets.token_hex(8)

    def clear(self) -> None:
        """Remove all messages of the chat except the system message, and begin a new session with a new id."""
        self.turns.clear()
        self.session_id = secrets.token_hex(8)

    def ask(self, text: str) -> str:
        """Return the prompt that asks the model to answer the user's next message `text`."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, answer in self.turns:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return self._prompt([*messages, {"role": "user", "content": text}])

    def _prompt(self, messages: list[dict[str, str]]) -> str:
        if self.template is None:
            return "".join(message["content"] for message in messages)
        from pagewire.common.chat import chat_template  # lazy: loads Jinja2, which --help does not need

        try:
            return chat_template.render(self.template, messages, special_tokens=self._special_tokens)
        except chat_template.ChatTemplateError as error:
            raise CommandError(str(error)) from None


def main(arguments: Sequence[str]) -> int:
    """Run the command `pagewire chat`, which chats with the model of a running server. Return the exit code.

    If the first argument is a model, start a server for that model, as `pagewire run` does.
    """
    if arguments and not arguments[0].startswith(("-", DESCRIBE)):
        return run(arguments, "chat")
    explained = FOREIGN_RUN_FLAGS | {"--model": "`pagewire run MODEL` serves one and chats with it"}
    parser = _parser(
        "chat",
        "[flags], or pagewire chat MODEL, which is pagewire run MODEL",
        "Chat with the model that a server has. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists more "
        "commands.",
        explained,
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this message, print the answer, and end")
    connection.add_flags(parser)
    parsed = parser.parse_args(arguments)
    with connection.client(parser, parsed, Client) as client:
        _talk(client, parsed, parsed.quick)
    return 0


def run(arguments: Sequence[str], verb: str = "run") -> int:
    """Run the command `pagewire run`: start a local server for a model, chat with the model or print the answer to one
    prompt, then stop the server. Return the exit code."""
    from pagewire.cli import services  # lazy: loads the services' options, which `pagewire chat` does not need

    known, groups = services.serve_options(), services.OWN_GROUPS
    names = {name for names in groups.values() for name in names}
    elsewhere = {option.flag: "`pagewire serve` has it" for option in known.values() if option.name not in names}
    parser = _parser(
        verb,
        "MODEL [PROMPT] [flags]",
        "Serve a model on this machine and chat with it: Ctrl-C stops an answer, Ctrl-D ends the chat and the server, "
        "/help lists more commands. With a prompt, print its answer and end.",
        elsewhere | FOREIGN_RUN_FLAGS | {"--url": "`pagewire chat` talks to a server that runs already"},
    )
    own = {action.dest for action in parser._actions} | {"prompt"}
    taken = {name: option for name, option in known.items() if name in names}
    options.add_flags(parser, taken, positional="model", groups=groups)
    options.add_foreign_flags(parser, taken)
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="answer only this prompt; - or no terminal: read the prompt from standard input",
    )
    parsed = parser.parse_args(arguments)
    given = {name: value for name, value in vars(parsed).items() if name not in own}
    try:
        model = options.resolve(known, argparse.Namespace(**given), os.environ).values["model"]
    except options.OptionError as error:
        parser.error(str(error))
    if not model:
        parser.error(MISSING)
    prompt = _given_prompt(parser, parsed.prompt)
    flags = options.spelled({name: value for name, value in given.items() if name != "model" and value is not None})
    with serving(model, flags, flags_only=known.keys() - names) as (url, server), Client(url) as client:
        _talk(client, parsed, prompt, server)
    return 0


def _given_prompt(parser: Parser, text: str | None) -> str | None:
    """Return the single prompt that `pagewire run` answers, or None for an interactive chat. End the command with an
    error if the prompt is empty."""
    if text is None and sys.stdin.isatty():
        return None
    prompt = read_input(sys.stdin.read).removesuffix("\n") if text in (None, "-") else text
    if not prompt:
        parser.error("the prompt is empty; to chat, run it on a terminal")
    check_text("text", prompt)
    return prompt


def _parser(verb: str, usage: str, description: str, explained: Mapping[str, str]) -> Parser:
    """Return an argument parser with the flags that the commands `pagewire chat` and `pagewire run` share."""
    parser = Parser(
        prog=f"pagewire {verb}", usage=f"pagewire {verb} {usage}", description=description, explained=explained
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--chat-template",
        metavar="NAME",
        help="chat template to use: a name, if the model has several, or a Jinja file (default: the model's default)",
    )
    parser.add_argument("--stats", action="store_true", help="print statistics of each answer on standard error")
    parser.add_argument("--no-history", action="store_true", help="do not read or write the history of typed lines")
    client_flags.add_flags(parser)
    return parser


def _talk(client: Client, parsed: argparse.Namespace, prompt: str | None, server: LocalServer | None = None) -> None:
    """Print the model's answer to `prompt`. If `prompt` is None, start an interactive chat.

    `server` is the local server, if this process started the server.
    """
    info = client.info()
    conversation = Conversation(_template(info, parsed.chat_template), parsed.system, info.special_tokens)
    sampling = client_flags.sampling(parsed)
    if prompt is None:
        history = None if parsed.no_history else history_path(os.environ)
        with contextlib.closing(ChatTerminal(history, candidates)) as terminal:
            Chat(client, conversation, sampling, info, terminal, with_statistics=parsed.stats, server=server).run()
        return
    printer = request.SamplePrinter(1, sys.stdout)
    completion = request.stream(client, conversation.ask(prompt), sampling, printer, session=Session(will_return=False))
    if parsed.stats:
        tell(request.statistics(completion))


def _template(info: ServerInfo, chosen: str | None) -> str | None:
    """Return the text of the chat template that the flag `--chat-template` selects: the model's template of this name,
    else the content of the file. Return None if the model has no chat template."""
    if chosen is not None and chosen not in info.named_chat_templates and os.path.isfile(chosen):
        return client_flags.text_of(chosen)
    return template_of(info, chosen)


def candidates(line: str) -> list[str]:
    """Return the words that can end a line of a chat which begins with a command: commands, options or file names."""
    word, separator, argument = line.partition(" ")
    if word in ("/save", "/load"):
        return [path + "/" * os.path.isdir(path) for path in glob.iglob(f"{glob.escape(argument)}*")]
    if word == "/set" and separator:
        return [f"{name} " for name in ("system", *client_flags.OPTIONS) if " " not in argument]
    return [] if separator else [*COMMANDS]


class Chat:
    """The interactive loop of a chat on the terminal. It sends the user's messages to the model and executes commands
    such as `/clear`, until the input ends."""

    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        sampling: SamplingParams,
        info: ServerInfo,
        terminal: ChatTerminal,
        *,
        with_statistics: bool,
        server: LocalServer | None,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._sampling = sampling
        self._info = info
        self._terminal = terminal
        self._with_statistics = with_statistics
        self._server = server
        self._num_tokens: int | None = 0  # in the context after the last answer, if known

    def run(self) -> None:
        """Run the interactive loop until the user ends the chat. Raise Unavailable if the local server that this
        process started ends earlier."""
        kind = "chat" if self._conversation.template is not None else "no chat template: it continues your text"
        tell(f"{self._info.served_model_name} ({kind}). /help lists commands, Ctrl-D ends.")
        while True:
            try:
                self._process(self._terminal.read_message())
            except EOFError:
                if self._terminal.is_interactive:
                    print()
                return
            except KeyboardInterrupt:
                tell("\n(Ctrl-D or /exit ends the chat)")

    def _process(self, message: str) -> None:
        """Execute the user's input: a command, or a message to the model. Show errors. Raise EOFError if the input ends
        the chat."""
        try:
            is_text = message.strip() or self._conversation.template is None
            if is_text and not self._execute_command(message):
                self._answer(message if "\n" in message else message.removeprefix("/"))  # of //TEXT
        except (CommandError, PagewireError) as error:
            if isinstance(error, Unavailable) and self._server and self._server.ends_within(END_TIMEOUT_S):
                raise
            tell(f"error: {printable_lines(str(error))}")

    def _execute_command(self, message: str) -> bool:
        """Execute the user's input if it is a command such as `/clear`. Return True if it was a command, or False if it
        is a message to the model.

        Raise EOFError if the command ends the chat, and CommandError if it fails.
        """
        is_pasted = "\n" in message and not message.startswith(("/system ", "/set "))
        if not message.startswith("/") or message.startswith("//") or is_pasted:
            return False
        command = message.strip().replace("/set parameter", "/set", 1).replace("/set system", "/system", 1)
        word, _, argument = map(str.strip, command.partition(" "))
        match word:
            case "/exit" | "/bye" | "/quit":
                raise EOFError
            case "/help" | "/?":
                tell(HELP)
            case "/clear":
                self._conversation.clear()
                self._num_tokens = 0
                tell("forgot the conversation")
            case "/system":
                self._conversation.system = argument or None
                tell("set the system message" if argument else "removed the system message")
            case "/show":
                self._show()
            case "/regen":
                self._regenerate()
            case "/set" | "/save" | "/load" if not argument:
                raise CommandError(f"{word} needs an argument; see /help")
            case "/set":
                self._set(argument)
            case "/save":
                self._save(Path(os.path.expanduser(argument)))
            case "/load":
                self._load(Path(os.path.expanduser(argument)))
            case _:
                near = suggestion(word, map(str.strip, COMMANDS))
                tell(f"unknown command {word}{near} (/help lists them)")
        return True

    def _set(self, argument: str) -> None:
        """Set a sampling option, or reset it if there is no value. The value is JSON, or a text without quotes."""
        name, _, text = argument.partition(" ")
        name, value = name.replace("-", "_"), None
        if text:
            try:
                value = from_json(text)
            except ValueError:
                value = text.strip()
        self._sampling = client_flags.updated(self._sampling, {name: value})
        tell(f"reset {name}" if value is None else f"set {name} to {to_json(value)}")

    def _show(self) -> None:
        named = {text: name for name, text in self._info.named_chat_templates.items()}
        own = {self._info.chat_template: "the model's own"}
        templates = own | named | {None: "none: the model continues your text"}
        used = "" if self._num_tokens is None else f"{self._num_tokens} of "
        tell(
            f"model     {self._info.served_model_name}\n"
            f"template  {templates.get(self._conversation.template, 'from a file')}\n"
            f"system    {self._conversation.system or 'no system message'}\n"
            f"sampling  {to_json(chat_file.given(self._sampling))[1:-1] or 'the defaults of the model'}\n"
            f"context   {used}{self._info.max_sequence_tokens or self._info.max_model_len} tokens"
        )

    def _regenerate(self) -> None:
        """Answer the last message again. If the new answer fails, keep the old one."""
        if not self._conversation.turns:
            raise CommandError("there is no answer to replace")
        *earlier, last = self._conversation.turns
        self._conversation.turns = [*earlier]
        try:
            self._answer(last[0])
        finally:
            if self._conversation.turns == earlier:
                self._conversation.turns.append(last)

    def _save(self, path: Path) -> None:
        if not path.exists() or self._terminal.confirms(f"{path} exists. Replace it?"):
            chat_file.write(path, SavedChat(self._conversation.system, tuple(self._conversation.turns), self._sampling))
            tell(f"saved the conversation in {path}")

    def _load(self, path: Path) -> None:
        chat = chat_file.read(path)
        self._conversation.clear()
        self._conversation.system, self._conversation.turns = chat.system, [*chat.turns]
        self._sampling, self._num_tokens = chat.sampling, None
        tell(f"loaded the conversation from {path}")

    def _answer(self, message: str) -> None:
        """Print the model's answer to a message. If the conversation exceeds the model's context, offer to drop the
        oldest turns.

        If the message still cannot be answered, the conversation stays unchanged.
        """
        kept = list(self._conversation.turns)
        while True:
            try:
                self._stream(message)
                return
            except InvalidRequest as error:
                turns = self._conversation.turns
                # The prompt itself or the requested number of tokens may be too long.
                if not turns or {"text", "sampling.max_tokens"}.isdisjoint(
                    each.field for each in error.field_violations
                ):
                    self._conversation.turns = kept
                    raise
                if len(turns) == len(kept):
                    tell(f"the context is full: {error}")
                    if not self._terminal.confirms("Forget the oldest turns and go on?"):
                        tell("the message was not sent; /clear forgets the whole conversation")
                        return
                # Drop half of the turns, so that there is room for several answers.
                self._conversation.turns = turns[(len(turns) + 1) // 2 :]
                num_forgotten = len(kept) - len(self._conversation.turns)
                tell(f"forgot the {num_forgotten} oldest of {len(kept)} turns")

    def _stream(self, message: str) -> None:
        """Stream the model's answer to standard output. Add the message and the answer to the conversation.

        If the user interrupts the answer, keep the part that was received.
        """
        printer = request.SamplePrinter(1, sys.stdout)
        session = Session(self._conversation.session_id, will_return=True)
        try:
            prompt = self._conversation.ask(message)
            completion = request.stream(self._client, prompt, self._sampling, printer, session=session)
        except KeyboardInterrupt:
            if printer.text:
                self._conversation.turns.append((message, printer.text))
                self._num_tokens = None
            tell("\n(stopped)" if printer.in_line else "(stopped)")
            return
        self._conversation.turns.append((message, completion.outputs[0].text))
        if self._with_statistics:
            tell(request.statistics(completion))
        self._count_tokens(completion)

    def _count_tokens(self, completion: Completion) -> None:
        """Store the number of tokens of the context. Warn if the answer was cut off because the context is full."""
        num_tokens = self._num_tokens = completion.usage.prompt_tokens + completion.usage.completion_tokens
        if completion.outputs[0].finish_reason == "length" and num_tokens >= self._info.max_sequence_tokens > 0:
            tell(f"(the context is full, {num_tokens} tokens: the answer was cut off)")
