"""The clients of a scheduler: `AsyncClient` for asyncio, and `Client`, whose calls block."""

import asyncio
import contextlib
import functools
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypedDict, TypeVar, Unpack, overload

import grpc

from pagewire.client import background_loop, conversation, wire
from pagewire.client.arguments import (
    as_list,
    as_prompts,
    as_seconds,
    is_integer,
    is_listed,
    refuse_unknown,
    require,
    split_prompt,
)
from pagewire.client.batch import RequestBatch
from pagewire.client.channels import MAX_SHARED_BYTES, Channels, ConnectionOptions, NotShared
from pagewire.client.completion import Attachment, Completion, CompletionBuilder, Output, PromptEmbedding, Result
from pagewire.client.conversation import Message, Session
from pagewire.client.errors import AlreadyExists, NotFound, PagewireError, Unavailable
from pagewire.client.retry import DELAYS_S, Attempts
from pagewire.client.sampling_params import UNSET, SamplingFields, SamplingParams
from pagewire.client.server_info import BlockMap, Loads, RequestReport, ServerInfo
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb

# Of each attempt of a call that answers at once, where the caller sets no other time.
UNARY_TIMEOUT_S = 10.0
# Requests in flight, the new one included, from which on new ones share a call: fewer messages, for the server and for
# this process. A message that a request has to itself costs as much as a message for all.
MIN_SHARED = 2
# Of one message of Tokenize and of Detokenize, far below what a server accepts.
MAX_TOKENIZED_CHARS = 500_000
MAX_DETOKENIZED_TOKENS = 200_000
# Calls of earlier versions, and what to use instead.
_FORMER_NAMES = {
    "generate": "stream of AsyncClient",
    "acomplete": "complete of AsyncClient",
    "achat": "chat of AsyncClient",
    "aembed": "embed of AsyncClient",
    "atokenize": "tokenize of AsyncClient",
    "adetokenize": "detokenize of AsyncClient",
    "server_info": "info, which AsyncClient has too",
    "close": "aclose of AsyncClient",
    "aclose": "close, or aclose of AsyncClient",
}
_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


class QueueOptions(TypedDict, total=False):
    """What any request can say besides its prompt.

    A lower `priority` runs first. `timeout` in seconds covers the whole call, time in the queue and attempts to make it
    again included. Cached prefixes are shared only among requests of the same `cache_salt`.
    """

    request_id: str | None
    priority: int
    timeout: float | None
    cache_salt: str
    tenant: str


class RequestOptions(QueueOptions, SamplingFields, total=False):
    """What a request for tokens can say: also fields of `SamplingParams`, which win over those of `sampling`, and the
    conversation that it is part of."""

    session: Session | None


class ChatOptions(RequestOptions, total=False):
    """What a chat can say: also a template in the place of the model's own, a text or a name if the model has several,
    and the variables that are passed to it."""

    chat_template: str | None
    add_generation_prompt: bool
    template_variables: Mapping[str, Any] | None


def _say_new_name(self: object, name: str) -> NoReturn:
    kind = type(self).__name__
    hint = f": use {_FORMER_NAMES[name]}" if name in _FORMER_NAMES else ""
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=self)


class AsyncClient:
    """A connection to a scheduler, for asyncio. `Client` has the same calls for programs that block.

    `url` is "host:port", "grpc://host:port", "grpcs://host:port" (TLS) or a gRPC target such as "dns:///name:port".
    TLS is used with "grpcs://" or any of the PEM files `tls_ca` (who signs the server; default: the system's),
    `tls_cert` and `tls_key` (this client, for mutual TLS). `api_key` says whose requests these are, where the server
    has tenants; without TLS others can read it. ValueError for a url, a key or a set of files that cannot be.

    `retry` is for how many seconds after its begin a call is made again that the server could not take: nothing answers
    at the url yet, it restarts, has no worker, or its queue is full. Output that has begun is never begun again. Every
    call takes a `timeout` in seconds, which wins over `retry`.

    The connection is opened at its first use and closed by `aclose`, at the end of `async with`, or with the process;
    used again, it is opened again. Any number of tasks may use the client, those of other event loops too. Requests
    that begin while others are in flight share a call: same results, same errors. Calls fail with a `PagewireError`. A
    lost worker is no error: the stream goes on where it was.
    """

    def __init__(self, url: str, *, retry: float = 0.0, **connection: Unpack[ConnectionOptions]) -> None:
        self.url = url
        self._retry_s = as_seconds("retry", retry)
        self._channels = Channels(url, **connection)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection of this event loop. Calls that run end with Cancelled."""
        await self._channels.aclose()

    def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Output, None]:
        """Yields the deltas of 1 to n samples of a prompt as they come.

        Give either `prompt` or `prompt_token_ids`. `sampling`, and fields of `SamplingParams` as keyword arguments, say
        how tokens are chosen; what neither names is left to the server. The other options are those of
        `RequestOptions`. Closing the generator or cancelling its task aborts the request; leave the loop early inside
        `contextlib.aclosing` (`closing` with `Client`), so that this happens at once.
        """
        request = _request(prompt, sampling, prompt_token_ids, options)
        return self._stream(request, self._attempts(options), _builder(request))

    @overload
    async def complete(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    async def complete(
        self,
        prompt: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    async def complete(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Returns the whole output of a request, with the same arguments as `stream`.

        A list of prompts, each a text or token ids, gives a list of results in the same order; `sampling` may then be a
        list of the same length. The requests run at the same time, as many as the server takes; one that fails ends
        all.
        """
        requests = _requests(prompt, sampling, prompt_token_ids, options)
        return await self._complete(requests, self._attempts(options))

    @overload
    async def embed(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[QueueOptions],
    ) -> PromptEmbedding: ...

    @overload
    async def embed(
        self, prompt: Sequence[str | Sequence[int]], **options: Unpack[QueueOptions]
    ) -> list[PromptEmbedding]: ...

    async def embed(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[QueueOptions],
    ) -> PromptEmbedding | list[PromptEmbedding]:
        """Returns the embedding of a prompt, or of each prompt of a list, with the arguments of `complete`.

        It is made of the hidden states of the prompt's tokens, pooled as the checkpoint says, and has the length 1.
        """
        refuse_unknown("embed", options, QueueOptions)
        requests = _requests(prompt, None, prompt_token_ids, options)
        several = requests if isinstance(requests, list) else [requests]
        for request in several:
            request.embed = True
        completions = await RequestBatch(several, self._channels, self._attempts(options)).run()
        embeddings = [PromptEmbedding.of(completion) for completion in completions]
        return embeddings if isinstance(requests, list) else embeddings[0]

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion | list[Completion]:
        """Returns the model's answer to a conversation, or a list of answers to a list of conversations.

        A conversation is a list of messages such as {"role": "user", "content": "Hello"}. The model's chat template, or
        `chat_template` in its place, makes the prompt of it: a text, or a name if the model has several;
        `template_variables` are passed to the template. Everything else is as in `complete`. Raises InvalidRequest for
        a model without a template, and for a template that fails.
        """
        attempts = self._attempts(options)
        conversations, is_one = conversation.as_conversations(messages)
        template = options.pop("chat_template", None)
        add_generation_prompt = options.pop("add_generation_prompt", True)
        variables = options.pop("template_variables", None)
        conversation.check_template(template, add_generation_prompt, template_variables=variables)
        several, one = (None, ()) if is_one else ([()] * len(conversations), None)
        requests = _requests(several, sampling, one, options)
        with self._channels.connected() as connection:
            info = wire.decode_server_info(await self._call("GetServerInfo", pb.GetServerInfoRequest(), attempts))
            # In a thread, since a template may take its time, in which the client may be closed.
            texts = await asyncio.to_thread(
                conversation.prompts_of, info, template, add_generation_prompt, conversations, variables
            )
            connection.check_open()
            prompts = await self._tokenize(texts, False, attempts)
            for request, prompt in zip(requests if isinstance(requests, list) else [requests], prompts, strict=True):
                request.token_ids.ids.extend(prompt)
            return await self._complete(requests, attempts)

    @overload
    async def tokenize(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, text: str, *, add_special_tokens: bool = True, timeout: float | None = None
    ) -> list[int]: ...

    @overload
    async def tokenize(
        self, text: Sequence[str], *, add_special_tokens: bool = True, timeout: float | None = None
    ) -> list[list[int]]: ...

    async def tokenize(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, timeout: float | None = None
    ) -> list[int] | list[list[int]]:
        """Returns the token ids of a text, or of each text of a list, as the server makes them of a prompt.

        Without `add_special_tokens`, the only special tokens are those that the text itself names.
        """
        texts = [text] if isinstance(text, str) else as_list("text", text, "a text, or a list of texts")
        for index, each in enumerate(texts):
            require(f"text {index} of the list", each, isinstance(each, str), "a text")
        token_ids = await self._tokenize(texts, add_special_tokens, Attempts(self._retry_s, timeout))
        return token_ids[0] if isinstance(text, str) else token_ids

    @overload
    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> str: ...

    @overload
    async def detokenize(
        self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True, timeout: float | None = None
    ) -> list[str]: ...

    async def detokenize(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str | list[str]:
        """Returns the text of a list of token ids, or the text of each list in a list of such lists."""
        prompts, is_one = as_prompts(token_ids)
        attempts = Attempts(self._retry_s, timeout)
        texts: list[str] = []
        for part in _parts(prompts, MAX_DETOKENIZED_TOKENS):
            request = wire.encode_detokenize(part, skip_special_tokens)
            texts += (await self._call("Detokenize", request, attempts)).texts
        return texts[0] if is_one else texts

    async def submit(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queues a detached request and returns its id: it runs whatever becomes of this client.

        The arguments are those of `stream`; `timeout` is that of queueing it. Where the client retries, it draws the
        id, so that a request whose answer was lost is not queued twice.
        """
        drawn_id = f"req-{secrets.token_hex(8)}" if self._retry_s and options.get("request_id") is None else None
        if drawn_id is not None:
            options["request_id"] = drawn_id
        request = pb.SubmitRequest(request=_request(prompt, sampling, prompt_token_ids, options))
        try:
            # No time of its own: until its first worker is there, a server that has just started lets requests wait.
            return (await self._call("Submit", request, self._attempts(options), limit=None)).request_id
        except AlreadyExists:
            if drawn_id is None:
                raise
            return drawn_id

    def attach(
        self,
        request_id: str,
        *,
        tenant: str = "",
        from_token: int = 0,
        max_reconnects: int = 5,
        timeout: float | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Yields the deltas of a detached request as `stream` does, of every sample from `from_token` on.

        If the connection breaks, it is made again and the deltas go on with the next token. Raises Unavailable after
        `max_reconnects` attempts in a row that brought nothing, NotFound for an unknown id, and OutOfRange for a token
        beyond those that there are; a request that failed ends with its error. Closing the generator leaves the request
        alone.
        """
        is_legal = is_integer(max_reconnects) and max_reconnects >= 0
        require("max_reconnects", max_reconnects, is_legal, "an integer from 0")
        request = wire.message(pb.AttachRequest, request_id=request_id, tenant=tenant or "", from_token=from_token)
        return self._attach(request, Attempts(0.0, timeout), max_reconnects)

    async def result(self, request_id: str, *, tenant: str = "", timeout: float | None = None) -> Result:
        """Returns the state of a detached request and all of its output so far. Raises NotFound for an unknown id."""
        response = await self._ask("GetResult", timeout, request_id=request_id, tenant=tenant or "")
        if not response.outputs:
            text = f"what is kept of {request_id!r} is a record, and not of a detached request"
            raise NotFound(text, code=grpc.StatusCode.NOT_FOUND)
        return wire.decode_result(response)

    async def get_request(self, request_id: str, *, tenant: str = "", timeout: float | None = None) -> RequestReport:
        """Reports the state of an unfinished request and why it waits. Raises NotFound if none of this id runs."""
        return wire.decode_report(await self._ask("GetRequest", timeout, request_id=request_id, tenant=tenant or ""))

    async def abort(self, request_id: str, *, tenant: str = "", timeout: float | None = None) -> None:
        """Ends a running request of the tenant; its stream ends with finish_reason "abort". Raises NotFound if none
        runs."""
        await self._ask("Abort", timeout, request_id=request_id, tenant=tenant or "")

    async def info(self, *, timeout: float | None = None) -> ServerInfo:
        """Describes the model that is served, and the limits of the server."""
        return wire.decode_server_info(await self._ask("GetServerInfo", timeout))

    async def blocks(self, *, timeout: float | None = None) -> BlockMap:
        """Reports the use of every block of the KV cache."""
        return wire.decode_block_map(await self._ask("GetBlocks", timeout))

    async def loads(self, *, timeout: float | None = None) -> Loads:
        """Reports how much the server is doing now."""
        return wire.decode_loads(await self._ask("GetLoads", timeout))

    if not TYPE_CHECKING:  # for a type checker, what is not above is a mistake
        __getattr__ = _say_new_name

        def __enter__(self) -> NoReturn:
            raise TypeError("an AsyncClient is for `async with`; for `with` there is Client, which has the same calls")

        __exit__ = __enter__

    def _attempts(self, options: Mapping[str, Any]) -> Attempts:
        return Attempts(self._retry_s, options.get("timeout"))

    async def _ask(self, method: str, timeout: float | None, **fields: object) -> Any:
        request = wire.message(getattr(pb, f"{method}Request"), **fields)
        return await self._call(method, request, Attempts(self._retry_s, timeout))

    async def _tokenize(self, texts: Sequence[str], add_special_tokens: bool, attempts: Attempts) -> list[list[int]]:
        token_ids: list[list[int]] = []
        for part in _parts(texts, MAX_TOKENIZED_CHARS):
            request = wire.message(pb.TokenizeRequest, texts=part, add_special_tokens=add_special_tokens)
            response = await self._call("Tokenize", request, attempts)
            token_ids += (list(prompt.ids) for prompt in response.prompts)
        return token_ids

    async def _complete(
        self, requests: pb.GenerateRequest | list[pb.GenerateRequest], attempts: Attempts
    ) -> Completion | list[Completion]:
        if isinstance(requests, list):
            return await RequestBatch(requests, self._channels, attempts).run()
        builder = _builder(requests)
        async with contextlib.aclosing(self._stream(requests, attempts, builder)) as outputs:
            async for _ in outputs:
                pass
        return builder.finish(time.monotonic())

    async def _stream(
        self, request: pb.GenerateRequest, attempts: Attempts, builder: CompletionBuilder
    ) -> AsyncGenerator[Output, None]:
        is_small = request.ByteSize() <= MAX_SHARED_BYTES
        with self._channels.connected(is_request=True) as connection:
            while True:
                if is_small and connection.can_share and connection.num_requests >= MIN_SHARED:
                    call = connection.responses(request, attempts.timeout_s)
                else:
                    call = connection.read("Generate", request, attempts.timeout_s)
                try:
                    async with contextlib.aclosing(call) as responses:
                        async for response in responses:
                            attempts.end()
                            output = wire.decode_output(response)
                            builder.add(output, time.monotonic())
                            yield output
                    builder.finish(time.monotonic())
                    return
                except NotShared:
                    connection.can_share = False
                except PagewireError as error:
                    await connection.wait(attempts.next_delay(error))

    async def _attach(
        self, request: pb.AttachRequest, attempts: Attempts, max_reconnects: int
    ) -> AsyncGenerator[Output, None]:
        attachment = Attachment(request.from_token)
        num_failures = 0
        with self._channels.connected() as connection:
            while True:
                request.from_tokens[:] = attachment.reconnect()
                call = connection.read("Attach", request, attempts.timeout_s)
                try:
                    async with contextlib.aclosing(call) as responses:
                        async for response in responses:
                            num_failures = 0
                            output = attachment.take(wire.decode_output(response))
                            if output is not None:
                                yield output
                    attachment.finish()
                    return
                except Unavailable as error:
                    # What comes with a retry delay is the server's own word, not a broken connection.
                    if error.retry_delay is not None or num_failures == max_reconnects:
                        raise
                    await connection.wait(attempts.bounded(DELAYS_S[min(num_failures, len(DELAYS_S) - 1)], error))
                    num_failures += 1

    async def _call(
        self, method: str, request: object, attempts: Attempts, *, limit: float | None = UNARY_TIMEOUT_S
    ) -> Any:
        with self._channels.connected() as connection:
            while True:
                left = attempts.timeout_s
                try:
                    with connection.translated():
                        call = getattr(connection.stub, method)
                        timeout = limit if left is None else left
                        return await call(request, timeout=timeout, metadata=connection.metadata)
                except PagewireError as error:
                    await connection.wait(attempts.next_delay(error))


def _blocking(
    method: Callable[Concatenate[AsyncClient, _Parameters], Coroutine[Any, Any, _Returned]],
) -> "Callable[Concatenate[Client, _Parameters], _Returned]":
    """Returns the method of `Client` that waits for what one of `AsyncClient` returns."""

    @functools.wraps(method)
    def call(self: "Client", /, *arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Returned:
        return background_loop.run(functools.partial(method, self._client, *arguments, **options))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, _Parameters], AsyncGenerator[_Returned, None]],
) -> "Callable[Concatenate[Client, _Parameters], Generator[_Returned, None, None]]":
    """Returns the method of `Client` that yields what one of `AsyncClient` yields."""

    @functools.wraps(method)
    def call(
        self: "Client", /, *arguments: _Parameters.args, **options: _Parameters.kwargs
    ) -> Generator[_Returned, None, None]:
        return self._iterate(method(self._client, *arguments, **options))

    return call


class Client:
    """A connection to a scheduler, for programs that block: the calls of `AsyncClient`, which take the same arguments.

    They run on an event loop in the background. Any number of threads may use the client. The connection is opened at
    its first use and closed by `close`, at the end of `with`, or with the process; used again, it is opened again, also
    in a process that was forked while no call ran.
    """

    def __init__(self, url: str, *, retry: float = 0.0, **connection: Unpack[ConnectionOptions]) -> None:
        self._client = AsyncClient(url, retry=retry, **connection)
        self.url = url
        weakref.finalize(self, background_loop.begin, self._client.aclose).atexit = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Calls that run, in other threads, end with Cancelled."""
        background_loop.finish(self._client.aclose)

    def _iterate(self, items: AsyncGenerator[_Returned, None]) -> Generator[_Returned, None, None]:
        """Keeps the client, and so its connection, as long as something of it is read."""
        yield from background_loop.iterate(items)

    stream = _iterating(AsyncClient.stream)
    complete = _blocking(AsyncClient.complete)
    embed = _blocking(AsyncClient.embed)
    chat = _blocking(AsyncClient.chat)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    submit = _blocking(AsyncClient.submit)
    attach = _iterating(AsyncClient.attach)
    result = _blocking(AsyncClient.result)
    get_request = _blocking(AsyncClient.get_request)
    abort = _blocking(AsyncClient.abort)
    info = _blocking(AsyncClient.info)
    blocks = _blocking(AsyncClient.blocks)
    loads = _blocking(AsyncClient.loads)

    if not TYPE_CHECKING:  # for a type checker, what is not above is a mistake
        __getattr__ = _say_new_name

        def __aenter__(self) -> NoReturn:
            raise TypeError("a Client is for `with`; for `async with` there is AsyncClient, which has the same calls")

        __aexit__ = __aenter__


def _builder(request: pb.GenerateRequest) -> CompletionBuilder:
    return CompletionBuilder(wire.num_samples(request), time.monotonic())


def _requests(
    prompt: object,
    sampling: Any,
    prompt_token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest | list[pb.GenerateRequest]:
    """Encodes one request for one prompt, or a list of requests for a list of prompts."""
    if prompt is None or isinstance(prompt, str):
        if is_listed(sampling):
            raise TypeError("a list of sampling parameters needs a list of prompts")
        return _request(prompt, sampling, prompt_token_ids, options)
    given = as_list("prompt", prompt, "a text, or a list of texts and token ids")
    if prompt_token_ids is not None or options.get("request_id") is not None:
        raise TypeError("prompt_token_ids and request_id belong to one prompt; a list holds texts and token ids")
    prompts = [split_prompt(each, index) for index, each in enumerate(given)]
    requests = []
    for index, ((text, token_ids), chosen) in enumerate(zip(prompts, one_each(sampling, len(prompts)), strict=True)):
        with wire.at_place(index):
            requests.append(_request(text, chosen, token_ids, options))
    return requests


def _request(
    prompt: str | None,
    sampling: SamplingParams | None,
    prompt_token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    kind = "SamplingParams, such as SamplingParams(max_tokens=4)"
    require("sampling", sampling, isinstance(sampling, SamplingParams | None), kind)
    own = (*QueueOptions.__annotations__, "session")
    fields: Any = {name: value for name, value in options.items() if name not in own}
    named = {name: options[name] for name in own if options.get(name) is not None and name != "timeout"}
    merged = (sampling or UNSET).updated(**fields) if fields else sampling
    return wire.encode_request(prompt, merged, prompt_token_ids=prompt_token_ids, **named)


def one_each(given: Any, num_prompts: int, kind: str = "sampling parameters") -> Sequence[Any]:
    """Returns a value for each of a number of prompts, of one for all or a list."""
    if not is_listed(given):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts and {len(given)} {kind}; give one for each")
    return given


def _parts(items: Sequence[Any], max_size: int) -> Iterator[list[Any]]:
    """Yields the items in groups. The lengths of a group's items add up to about `max_size` at most."""
    part: list[Any] = []
    size = 0
    for item in items:
        if part and size + len(item) > max_size:
            yield part
            part, size = [], 0
        part.append(item)
        size += len(item)
    if part:
        yield part
