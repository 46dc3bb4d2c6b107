"""The server that is measured: one that runs already, with the prompts that `pagewire bench serve` sends it, or a pair
of services that is started for it."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pagewire.bench import dataset
from pagewire.bench.dataset import TextTokenizer
from pagewire.bench.openai_server import CHAT_COMPLETIONS, COMPLETIONS, OpenAIServer
from pagewire.bench.result import Measured
from pagewire.bench.run import LoadTest, Run, put, send
from pagewire.bench.workload import PlannedRequest
from pagewire.cli import client_flags, connection
from pagewire.client import AsyncClient
from pagewire.common.option_limits import flag
from pagewire.errors import CommandError
from pagewire.hosting import local_server
from pagewire.options import Parser

# vllm is OpenAI's completions under the name that vLLM gives them.
BACKENDS = ("grpc", "openai", "openai-chat", "vllm")
DATASETS = ("random", "custom")
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
# Flags of one kind of server, that mean nothing to the other.
_OPENAI_FLAGS = ("base_url", "endpoint", "extra_body")
_GRPC_FLAGS = ("url", "tls_ca", "tls_cert", "tls_key")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="checkpoint directory, GGUF file or Hugging Face id to start `pagewire serve` for; flags for it can "
        "follow after --",
    )
    connection.add_flags(parser, without_url="a server is started for --model")


@contextmanager
def opened(
    parser: Parser, parsed: argparse.Namespace, serve_flags: Sequence[str], extra_flags: Sequence[str] = ()
) -> Iterator[AsyncClient]:
    """Gives the block a client of the server, not yet connected. `extra_flags` are for a server that is started, and
    win."""
    if (parsed.model is None) == (parsed.url is None):
        parser.error("give either --model MODEL, to start a server for it, or --url of a running server")
    if parsed.url is not None:
        if serve_flags:
            parser.error(f"{serve_flags[0]} stands after --, but no server is started with --url")
        yield connection.client(parser, parsed, AsyncClient)
        return
    with local_server.serving(parsed.model, [*serve_flags, *extra_flags]) as url:
        yield AsyncClient(url)


def add_serving_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="grpc",
        help="how to send requests: grpc to a Pagewire scheduler, or openai or openai-chat to any server "
        "(default: grpc)",
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help=f"with openai: address of the server (default: http://{DEFAULT_HOST}:{DEFAULT_PORT})",
    )
    group.add_argument("--host", metavar="HOST", help=f"in place of --base-url or --url (default: {DEFAULT_HOST})")
    group.add_argument("--port", type=client_flags.count, metavar="INT", help="in place of --base-url or --url")
    group.add_argument("--endpoint", metavar="PATH", help=f"with openai: path of the API (default: {COMPLETIONS})")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="the model: its name for requests, its tokenizer if --tokenizer is not given "
        "(default: the server's first)",
    )
    group.add_argument("--served-model-name", metavar="NAME", help="name for requests, if it differs from --model")
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="checkpoint directory, GGUF file or Hugging Face id with the model's tokenizer (default: --model)",
    )
    group.add_argument(
        "--extra-body",
        type=_json_object,
        metavar="JSON",
        help="with openai: a JSON object of further fields for every request",
    )


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default="random",
        help="where prompts come from: random tokens, or a file of your own (default: random)",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE",
        help='custom: a file with {"prompt": TEXT} on each line (.jsonl)',
    )
    group.add_argument(
        "--custom-output-len",
        type=client_flags.count,
        default=256,
        metavar="INT",
        help="custom: output tokens (default: 256)",
    )
    group.add_argument(
        "--skip-chat-template",
        action="store_true",
        help="custom: send prompts as they are, without the model's chat template",
    )
    group.add_argument("--disable-shuffle", action="store_true", help="custom: keep the order of the file")
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="custom: fail if the file has too few prompts, instead of using them again",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="custom: make outputs of the full length, as random does"
    )


def check(parser: Parser, parsed: argparse.Namespace) -> None:
    """Ends the command for flags that do not go together."""
    unfit = _OPENAI_FLAGS if parsed.backend == "grpc" else _GRPC_FLAGS
    for name in unfit:
        if getattr(parsed, name) is not None:
            hint = "--url or --host and --port" if parsed.backend == "grpc" else "--base-url"
            parser.error(f"{flag(name)} means nothing to --backend {parsed.backend}, whose server is given by {hint}")
    address = parsed.url or parsed.base_url
    if address is not None and (parsed.host is not None or parsed.port is not None):
        parser.error(f"{address} is given as well as --host or --port: give only one")
    if (parsed.dataset_name == "random") != (parsed.dataset_path is None):
        needs = "takes no" if parsed.dataset_name == "random" else "needs"
        parser.error(f"--dataset-name {parsed.dataset_name} {needs} --dataset-path")


async def measure(parser: Parser, parsed: argparse.Namespace, load: LoadTest) -> tuple[Measured, Run]:
    """Runs the load test, and returns whose figures these are and the measurements."""
    if parsed.backend != "grpc":
        return await _measure_openai(parser, parsed, load)
    if parsed.url is None:
        is_given = parsed.host is not None or parsed.port is not None
        address = f"{parsed.host or DEFAULT_HOST}:{parsed.port or connection.DEFAULT_URL.rpartition(':')[2]}"
        parsed.url = address if is_given else connection.default_url()
    client = connection.client(parser, parsed, AsyncClient)
    if parsed.dataset_name == "random":
        info, measured = await put(load, client)
        return Measured.pagewire(info), measured
    async with client:
        info = await client.info()
        requests, warm_ups = _texts(parsed, load, None, info.chat_template)
        return Measured.pagewire(info), await send(load, client, requests, warm_ups)


async def _measure_openai(parser: Parser, parsed: argparse.Namespace, load: LoadTest) -> tuple[Measured, Run]:
    is_chat = parsed.backend == "openai-chat" or (parsed.endpoint or "").rstrip("/").endswith("chat/completions")
    url = parsed.base_url or f"http://{parsed.host or DEFAULT_HOST}:{parsed.port or DEFAULT_PORT}"
    try:
        server = OpenAIServer(
            url,
            parsed.endpoint or (CHAT_COMPLETIONS if is_chat else COMPLETIONS),
            api_key=os.environ.get(OPENAI_KEY_VARIABLE) or None,
            extra_body=parsed.extra_body,
        )
    except ValueError as error:
        parser.error(f"--base-url: {error}")
    served = await server.models()  # also to see, before anything is measured, that a server answers
    server.model = parsed.served_model_name or parsed.model or next(iter(served), "")
    if not server.model:
        raise CommandError(f"{server.url} does not say which models it serves: give --model")
    tokenizer = _openai_tokenizer(parsed, server.model, is_chat=is_chat)
    # A chat's messages get their form from the server.
    template = None if is_chat or tokenizer is None else tokenizer.chat_template
    requests, warm_ups = _texts(parsed, load, tokenizer, template)
    backend = "openai-chat" if is_chat else "openai"
    return Measured(backend, server.model), await send(load, server, requests, warm_ups)


def _openai_tokenizer(parsed: argparse.Namespace, model: str, *, is_chat: bool) -> TextTokenizer | None:
    """Returns the tokenizer, or None where none is needed. Raises CommandError where one is needed and there is none.

    Prompts of a file need it for the chat template alone.
    """
    is_optional = parsed.dataset_name == "custom" and not parsed.tokenizer
    if is_optional and (is_chat or parsed.skip_chat_template):
        return None
    try:
        return TextTokenizer(parsed.tokenizer or parsed.model or model)
    except CommandError as error:
        if is_optional:
            note = "prompts are sent as they are, without the model's chat template; --tokenizer says where it is"
            print(f"{note} ({error})", file=sys.stderr)
            return None
        raise CommandError(
            f"{parsed.dataset_name} prompts need the model's tokenizer, to count tokens: give --tokenizer ({error})"
        ) from None


def _texts(
    parsed: argparse.Namespace, load: LoadTest, tokenizer: TextTokenizer | None, template: str | None
) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """Returns the requests to measure, and others to warm up with. Prompts of a file are messages, of which the chat
    template makes prompts, if there is one."""
    num_prompts = load.workload.num_prompts
    total = replace(load.workload, num_prompts=num_prompts + load.num_warmups)
    if parsed.dataset_name == "random":
        assert tokenizer is not None, "only prompts of a file do without"
        requests = dataset.random_prompts(total, tokenizer)
    else:
        requests = _file_requests(parsed, total.num_prompts, None if parsed.skip_chat_template else template)
    return dataset.timed(load.workload, requests[:num_prompts]), dataset.timed(load.warm_up, requests[num_prompts:])


def _file_requests(parsed: argparse.Namespace, num_prompts: int, template: str | None) -> list[PlannedRequest]:
    from pagewire.cli.chat import Conversation

    texts = dataset.custom_prompts(
        parsed.dataset_path,
        num_prompts,
        parsed.seed,
        shuffles=not parsed.disable_shuffle,
        repeats=not parsed.no_oversample,
    )
    conversation = Conversation(template, None)
    return [PlannedRequest((), parsed.custom_output_len, 0.0, parsed.seed, conversation.ask(text)) for text in texts]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value
