"""The clients of a server: `AsyncClient` for asyncio, and `Client` for blocking code."""

import asyncio
import contextlib
import functools
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
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

# The timeout in seconds of each attempt of a unary call, unless the caller sets another one.
UNARY_TIMEOUT_S = 10.0
# The number of requests in flight, including the new one, from which a new request uses the shared call. A message for
# a single request costs the server and the client as much as a message that several requests share.
MIN_SHARED = 2
# The size of one Tokenize or Detokenize message, far below the server's limit.
MAX_TOKENIZED_CHARS = 500_000
MAX_DETOKENIZED_TOKENS = 200_000
# The methods of earlier versions and their replacements, for error messages.
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
    """The options that every request accepts besides its prompt.

    - `request_id`: a unique id of at most 128 characters. By default, the server generates one.
    - `priority`: requests with a lower number run first. The default is 0.
    - `timeout`: the limit in seconds for the whole call, including the time in the queue and retries.
    - `cache_salt`: cached prefixes are shared only among requests with the same salt.
    - `tenant`: the tenant that the request belongs to.
    """

    request_id: str | None
    priority: int
    timeout: float | None
    cache_salt: str
    tenant: str


class RequestOptions(QueueOptions, SamplingFields, total=False):
    """The keyword options of a generation request.

    The options include all of `QueueOptions`, and the fields of `SamplingParams`, which override the fields of the
    argument `sampling`. `session` is the conversation that the request belongs to.
    """

    session: Session | None


class ChatOptions(RequestOptions, total=False):
    """The keyword options of a chat request.

    - `chat_template`: the text of a template, or the name of one of the model's templates. By default, the model's own
      default template is used.
    - `add_generation_prompt`: whether the prompt ends with the beginning of the model's answer. The default is True.
    - `template_variables`: additional variables for the template, such as `{"enable_thinking": False}`.
    """

    chat_template: str | None
    add_generation_prompt: bool
    template_variables: Mapping[str, Any] | None


def _say_new_name(self: object, name: str) -> NoReturn:
    kind = type(self).__name__
    hint = f": use {_FORMER_NAMES[name]}" if name in _FORMER_NAMES else ""
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=self)


class AsyncClient:
    """A client of a Pagewire server, for asyncio programs. `Client` has the same methods for blocking code.

        async with AsyncClient("127.0.0.1:50051", retry=60) as client:
            completion = await client.complete("Once upon a time", max_tokens=32)
            print(completion.outputs[0].text)

    The connection opens at its first use. It closes with `aclose`, at the end of `async with`, or with the process. A
    closed client reconnects at its next use. Any number of tasks may share one client, also on several event loops.
    Concurrent requests share one gRPC call, which changes neither results nor errors.

    - `url`: "host:port", "grpc://host:port", "grpcs://host:port" for TLS, or a gRPC target such as "dns:///name:port".
    - `retry`: how long, in seconds, a call is retried if the server cannot accept it: the server is unreachable,
      restarting, without a worker, or its queue is full. The default is 0, no retries. Output that has begun is never
      restarted. Every method accepts a `timeout` in seconds, which takes precedence over `retry`.
    - `tls_ca`: the PEM file of the authority that signed the server's certificate. The default is the system's set.
    - `tls_cert`, `tls_key`: the PEM files of the client's certificate and private key, for mutual TLS.
    - `api_key`: a key of the server's `--api-key`, or the key of a tenant. Without TLS, the key is readable on the
      network.

    TLS is used if the URL begins with "grpcs://" or if `tls_ca` or `tls_cert` is given. The constructor raises
    ValueError for an invalid URL, API key or set of TLS files.

    Methods raise a subclass of `PagewireError` if a call fails. The loss of a worker is not an error: the stream
    continues where it stopped as soon as the server has a worker again.
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
        """Close the client's connection that belongs to the running event loop. Requests in progress on this connection
        raise Cancelled."""
        await self._channels.aclose()

    def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Output, None]:
        """Generate text for one prompt, and yield the deltas of its samples as they arrive.

        Give either `prompt` or `prompt_token_ids`. `sampling` and the fields of `SamplingParams` as keyword arguments
        control the sampling. Keyword arguments override `sampling`, and unset fields use the server's defaults. The
        other options are described in `RequestOptions`.

        Closing the generator or cancelling its task aborts the request. To leave the loop early, wrap the generator in
        `contextlib.aclosing` (`contextlib.closing` for `Client`), so that the abort happens immediately.
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
        """Generate text for one prompt or a list of prompts, and return the complete results.

        The arguments are the same as for `stream`. A list of prompts, each a text or a list of token ids, returns a
        list of results in the same order. `sampling` may then be a list of the same length. The requests run
        concurrently, limited by the server's queue. If a request fails, the others are aborted, and the error names the
        position of the failed prompt.
        """
        return await self._complete(_requests(prompt, sampling, prompt_token_ids, options), self._attempts(options))

    @overload
    async def embed(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        prompt_name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> PromptEmbedding: ...

    @overload
    async def embed(
        self, prompt: Sequence[str | Sequence[int]], *, prompt_name: str | None = None, **options: Unpack[QueueOptions]
    ) -> list[PromptEmbedding]: ...

    async def embed(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        prompt_name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> PromptEmbedding | list[PromptEmbedding]:
        """Return the embedding of a prompt, or of each prompt in a list.

        The prompt arguments are the same as for `complete`; the options are described in `QueueOptions`. The embedding
        is computed from the hidden states of the prompt's tokens, pooled as the checkpoint specifies, and normalized to
        length 1. `prompt_name` is the name of the checkpoint's prompt that precedes each text, such as "query". By
        default, the checkpoint's default prompt precedes it, if there is one.
        """
        refuse_unknown("embed", options, QueueOptions)
        requests = _requests(prompt, None, prompt_token_ids, options)
        several = requests if isinstance(requests, list) else [requests]
        for request in several:
            request.embed = True
            if prompt_name is not None:
                wire.put(request, "prompt_name", prompt_name)
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
        """Return the model's answer to a conversation, or a list of answers to a list of conversations.

        A conversation is a list of messages such as `{"role": "user", "content": "Hello"}`. The client renders the
        messages to a prompt with the model's chat template. `chat_template` selects another template, by its text or by
        its name, and `template_variables` are passed to the template. The other arguments are the same as for
        `complete`.

        Raise InvalidRequest if the model has no chat template, or if the template fails.
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
            # Rendering runs in a thread, because it may be slow. The client may be closed meanwhile.
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
        """Return the token ids of a text, or of each text in a list, as the server tokenizes prompts.

        With `add_special_tokens` False, the result contains only those special tokens that are spelled out in the text.
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
        """Return the text of a list of token ids, or a list of texts for a list of such lists.

        With `skip_special_tokens` False, the text includes special tokens.
        """
        prompts, is_one = as_prompts(token_ids)
        attempts = Attempts(self._retry_s, timeout)
        texts: list[str] = []
        for part in _parts(prompts, MAX_DETOKENIZED_TOKENS):
            texts += (await self._call("Detokenize", wire.encode_detokenize(part, skip_special_tokens), attempts)).texts
        return texts[0] if is_one else texts

    async def submit(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queue a detached request and return its id. A detached request runs on the server independently of this
        client; `attach` and `result` return its output.

        The arguments are the same as for `stream`, except that `timeout` limits only the submission. If the client was
        created with `retry`, the client chooses the request id itself. If the server's response is lost, the retry then
        does not queue the request twice.
        """
        drawn_id = f"req-{secrets.token_hex(8)}" if self._retry_s and options.get("request_id") is None else None
        if drawn_id is not None:
            options["request_id"] = drawn_id
        request = pb.SubmitRequest(request=_request(prompt, sampling, prompt_token_ids, options))
        try:
            # No default timeout: a server that has just started holds requests until its first worker connects.
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
        """Yield the output deltas of a detached request as `stream` does, beginning with the token at index
        `from_token` of every sample. A detached request is a request that was queued by `submit` and runs independently
        of the client.

        If the connection breaks, the client reconnects and continues with the next token. Raise Unavailable after
        `max_reconnects` consecutive attempts without output, NotFound for an unknown id, and OutOfRange if `from_token`
        is beyond the end of the output. If the request failed, its error is raised. Closing the generator does not
        abort the request.
        """
        is_legal = is_integer(max_reconnects) and max_reconnects >= 0
        require("max_reconnects", max_reconnects, is_legal, "an integer from 0")
        request = wire.message(pb.AttachRequest, request_id=request_id, tenant=tenant or "", from_token=from_token)
        return self._attach(request, Attempts(0.0, timeout), max_reconnects)

    async def result(self, request_id: str, *, tenant: str = "", timeout: float | None = None) -> Result:
        """Return the state of a detached request, which was queued by `submit`, and its output so far. Raise NotFound
        for an unknown request id."""
        response = await self._ask("GetResult", timeout, request_id=request_id, tenant=tenant or "")
        if not response.outputs:
            text = f"{request_id!r} is a retained record, not a detached request"
            raise NotFound(text, code=grpc.StatusCode.NOT_FOUND)
        return wire.decode_result(response)

    async def get_request(self, request_id: str, *, tenant: str = "", timeout: float | None = None) -> RequestReport:
        """Return the state of an unfinished request and, if the request waits, the reason.

        Raise NotFound if no request with this id is running or waiting.
        """
        return wire.decode_report(await self._ask("GetRequest", timeout, request_id=request_id, tenant=tenant or ""))

    async def abort(self, request_id: str, *, tenant: str = "", timeout: float | None = None) -> None:
        """Abort an unfinished request of the tenant. Its stream ends with the finish_reason "abort".

        Raise NotFound if no request with this id is running or waiting.
        """
        await self._ask("Abort", timeout, request_id=request_id, tenant=tenant or "")

    async def info(self, *, timeout: float | None = None) -> ServerInfo:
        """Return information about the server: the served model and the limits of requests."""
        return wire.decode_server_info(await self._ask("GetServerInfo", timeout))

    async def blocks(self, *, timeout: float | None = None) -> BlockMap:
        """Return a map of the server's KV cache that shows the current use of every block."""
        return wire.decode_block_map(await self._ask("GetBlocks", timeout))

    async def loads(self, *, timeout: float | None = None) -> Loads:
        """Return the current load of the server, such as the number of waiting requests."""
        return wire.decode_loads(await self._ask("GetLoads", timeout))

    if not TYPE_CHECKING:  # so that type checkers report unknown attributes
        __getattr__ = _say_new_name

        def __enter__(self) -> NoReturn:
            raise TypeError("use `async with` for an AsyncClient; for `with`, use Client, which has the same methods")

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
        is_small, has_begun = request.ByteSize() <= MAX_SHARED_BYTES, False
        call: AbstractAsyncContextManager[AsyncIterator[pb.GenerateResponse]]
        with self._channels.connected(is_request=True) as connection:
            while True:
                if is_small and connection.can_share and connection.num_requests >= MIN_SHARED:
                    call = contextlib.aclosing(connection.responses(request, attempts.timeout_s))
                else:
                    call = connection.read("Generate", request, attempts.timeout_s)
                try:
                    async with call as responses:
                        async for response in responses:
                            has_begun = True
                            output = wire.decode_output(response)
                            builder.add(output, time.monotonic())
                            yield output
                    builder.finish(time.monotonic())
                    return
                except NotShared:
                    connection.can_share = False
                except PagewireError as error:
                    if has_begun:  # what has begun is never begun again
                        raise
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
                    async with call as responses:
                        async for response in responses:
                            num_failures = 0
                            output = attachment.take(wire.decode_output(response))
                            if output is not None:
                                yield output
                    attachment.finish()
                    return
                except Unavailable as error:
                    # An error with a retry delay was sent by the server, so the connection is not broken.
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
    """Return a blocking version of a coroutine method of `AsyncClient`, for use as a method of `Client`."""

    @functools.wraps(method)
    def call(self: "Client", /, *arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Returned:
        return background_loop.run(functools.partial(method, self._client, *arguments, **options))

    return call


def _blocking_generator(
    method: Callable[Concatenate[AsyncClient, _Parameters], AsyncGenerator[_Returned, None]],
) -> "Callable[Concatenate[Client, _Parameters], Generator[_Returned, None, None]]":
    """Return a blocking version of a method of `AsyncClient` that is an asynchronous generator, for use as a method of
    `Client`."""

    @functools.wraps(method)
    def call(
        self: "Client", /, *arguments: _Parameters.args, **options: _Parameters.kwargs
    ) -> Generator[_Returned, None, None]:
        return self._iterate(method(self._client, *arguments, **options))

    return call


class Client:
    """A client of a Pagewire server, for blocking code. It has the same methods as `AsyncClient`.

        with Client("127.0.0.1:50051", retry=60) as client:
            completion = client.complete("Once upon a time", max_tokens=32)
            print(completion.outputs[0].text)

    The connection opens at its first use. It closes with `close`, at the end of `with`, or with the process. A closed
    client reconnects at its next use. Any number of threads may share one client. The calls run on an event loop in a
    background thread. After a fork, the child may use the client if no call was in progress and no `AsyncClient` was
    open.

    - `url`: "host:port", "grpc://host:port", "grpcs://host:port" for TLS, or a gRPC target such as "dns:///name:port".
    - `retry`: how long, in seconds, a call is retried if the server cannot accept it. The default is 0, no retries.
    - `tls_ca`, `tls_cert`, `tls_key`, `api_key`: see `AsyncClient`.

    Methods raise a subclass of `PagewireError` if a call fails. The constructor raises ValueError for an invalid URL,
    API key or set of TLS files.
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
        """Close the client's connection to the server. Calls in progress in other threads raise Cancelled."""
        background_loop.finish(self._client.aclose)

    def _iterate(self, items: AsyncGenerator[_Returned, None]) -> Generator[_Returned, None, None]:
        """Yield the items of an asynchronous generator to blocking code. The generator runs on the background event
        loop.

        The reference to `self` keeps the client, and therefore its connection, alive during the iteration.
        """
        yield from background_loop.iterate(items)

    stream = _blocking_generator(AsyncClient.stream)
    complete = _blocking(AsyncClient.complete)
    embed = _blocking(AsyncClient.embed)
    chat = _blocking(AsyncClient.chat)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    submit = _blocking(AsyncClient.submit)
    attach = _blocking_generator(AsyncClient.attach)
    result = _blocking(AsyncClient.result)
    get_request = _blocking(AsyncClient.get_request)
    abort = _blocking(AsyncClient.abort)
    info = _blocking(AsyncClient.info)
    blocks = _blocking(AsyncClient.blocks)
    loads = _blocking(AsyncClient.loads)

    if not TYPE_CHECKING:  # so that type checkers report unknown attributes
        __getattr__ = _say_new_name

        def __aenter__(self) -> NoReturn:
            raise TypeError("use `with` for a Client; for `async with`, use AsyncClient, which has the same methods")

        __aexit__ = __aenter__


def _builder(request: pb.GenerateRequest) -> CompletionBuilder:
    return CompletionBuilder(wire.num_samples(request), time.monotonic())


def _requests(
    prompt: object,
    sampling: Any,
    prompt_token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest | list[pb.GenerateRequest]:
    """Encode the arguments of a call as requests. For a list of prompts, return a list with one request for each
    prompt. For a single prompt, return one request."""
    if prompt is None or isinstance(prompt, str):
        if is_listed(sampling):
            raise TypeError("a list of sampling parameters needs a list of prompts")
        return _request(prompt, sampling, prompt_token_ids, options)
    given = as_list("prompt", prompt, "a text, or a list of texts and token ids")
    if prompt_token_ids is not None or options.get("request_id") is not None:
        raise TypeError("prompt_token_ids and request_id are for one prompt; a list contains texts and token ids")
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
    """Return a list with one value for each of `num_prompts` prompts. `given` is either a single value for all prompts
    or a list of values.

    Raise ValueError if the list has another length. `kind` names the values in the error.
    """
    if not is_listed(given):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts and {len(given)} {kind}; give one for each")
    return given


def _parts(items: Sequence[Any], max_size: int) -> Iterator[list[Any]]:
    """Yield the items in groups, such that the total length of each group is at most `max_size`. An item longer than
    `max_size` forms its own group."""
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
