"""The client of a scheduler: one class with asynchronous and synchronous methods."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, overload

import grpc
import grpc.aio

from pagewire import blocking_call, conversation, wire
from pagewire.attachment import Attachment
from pagewire.batch import RequestBatch
from pagewire.channels import Channels
from pagewire.common.transport.tls import TlsFile, TlsFiles
from pagewire.completion import Completion, CompletionBuilder, Output, PromptEmbedding, Result
from pagewire.conversation import Message, Session
from pagewire.errors import AlreadyExists, PagewireError
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.retry import DELAYS_S, Attempts
from pagewire.sampling import UNSET, SamplingFields, SamplingParams
from pagewire.server import BlockMap, Loads, RequestReport, ServerInfo
from pagewire.shared_stream import NotShared

UNARY_TIMEOUT_S = 10.0
# Requests in flight, the new one included, from which on new ones share a call: fewer messages, for the server and for
# this process. A message that a request has to itself costs as much as a message for all.
MIN_SHARED = 2
# Of a request that shares a call. A server refuses a message that is too large together with the call that brought it.
MAX_SHARED_BYTES = 1 << 20
# Of one message of Tokenize and of Detokenize, far below what a server accepts.
MAX_TOKENIZED_CHARS = 500_000
MAX_DETOKENIZED_TOKENS = 200_000


class Client:
    """A connection to a scheduler.

    `url` is "host:port", "grpc://host:port", "grpcs://host:port" (TLS) or a gRPC target such as "dns:///name:port".
    TLS is used with "grpcs://" or any of the PEM files `tls_ca` (who signs the server; default: the system's),
    `tls_cert` and `tls_key` (this client, for mutual TLS). `api_key` says whose requests these are, where the server
    has tenants; without TLS others can read it. ValueError for a url, a key or a set of files that cannot be.

    `retry` is for how many seconds after its begin a call is made again that the server could not take: nobody answers
    at the url yet, it restarts, has no worker, or its queue is full. Output that has begun is never begun again.

    Synchronous: `complete`, `stream`, `chat`, `embed`, `tokenize`, `detokenize`, `info`.
    Asynchronous: `acomplete`, `generate`, `achat`, `aembed`, `atokenize`, `adetokenize`, `submit`, `attach`, `result`,
    `abort`, `get_request`, `blocks`, `server_info`, `loads`. Requests of `generate` and `acomplete` that begin while
    others are in flight share a call: same results, same errors.

    The connection is opened at its first use and closed by `close` or `aclose`, at the end of `with` or `async with`,
    or with the process; used again, it is opened again. The client may be used by any number of tasks and threads.
    Calls fail with a `PagewireError`. A lost worker is no error: the stream goes on where it was.
    """

    def __init__(
        self,
        url: str,
        *,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        api_key: str | None = None,
        retry: float = 0.0,
    ) -> None:
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if api_key is not None and not (
            api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""
        ):
            raise ValueError("api_key must be printable ASCII without spaces around it, and not empty")
        if not retry >= 0:
            raise ValueError(f"retry is {retry}, but must be a number of seconds from 0")
        self.url = url
        self._retry_s = retry
        uses_tls = url.startswith("grpcs://") or tls_ca or tls_cert
        credentials = None
        if uses_tls:
            files = TlsFiles(
                ca=TlsFile("tls_ca", tls_ca), cert=TlsFile("tls_cert", tls_cert), key=TlsFile("tls_key", tls_key)
            )
            credentials = files.current().for_channel()
        self._channels = Channels(url, credentials, api_key)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes what synchronous calls have opened; those that run fail."""
        self._channels.close()

    async def aclose(self) -> None:
        """Closes what calls of this event loop, and synchronous ones, have opened; those that run fail."""
        await self._channels.aclose()

    def generate(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> AsyncGenerator[Output, None]:
        """Yields the deltas of 1 to n samples of a prompt as they come.

        Give either `prompt` or `prompt_token_ids`. `sampling` and more keyword arguments, the fields of
        `SamplingParams`, say how tokens are chosen; what neither names is left to the server. A lower `priority` runs
        first. `timeout` in seconds covers the whole request, time in the queue included. `session` says which
        conversation it is part of. Closing the generator or cancelling its task aborts the request; leave the loop
        early inside `contextlib.aclosing`, so that this happens at once.
        """
        request = wire.encode_request(
            prompt,
            _merged(sampling, fields),
            prompt_token_ids=prompt_token_ids,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            session=session,
        )
        return self._generate(request, Attempts(self._retry_s, timeout))

    def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[Output, None, None]:
        """The synchronous twin of `generate`. Closing the generator aborts the request."""
        request = wire.encode_request(
            prompt,
            _merged(sampling, fields),
            prompt_token_ids=prompt_token_ids,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            session=session,
        )
        return self._stream(request, Attempts(self._retry_s, timeout))

    @overload
    def complete(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...

    @overload
    def complete(
        self,
        prompt: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    def complete(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion | list[Completion]:
        """Returns the whole output of a request, with the same arguments as `stream`.

        A list of prompts, each a text or token ids, gives a list of results in the same order; `sampling` may then be a
        list of the same length. The requests run at the same time, as many as the server takes; one that fails ends
        all.
        """
        requests = self._requests(
            prompt, sampling, fields, prompt_token_ids, request_id, priority, cache_salt, tenant, session
        )
        return self._complete(requests, Attempts(self._retry_s, timeout))

    @overload
    async def acomplete(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...

    @overload
    async def acomplete(
        self,
        prompt: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    async def acomplete(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - sent as the deadline of the call, so that the server knows it
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion | list[Completion]:
        """The asynchronous twin of `complete`."""
        requests = self._requests(
            prompt, sampling, fields, prompt_token_ids, request_id, priority, cache_salt, tenant, session
        )
        return await self._acomplete(requests, Attempts(self._retry_s, timeout))

    @overload
    def embed(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
    ) -> PromptEmbedding: ...

    @overload
    def embed(
        self,
        prompt: Sequence[str | Sequence[int]],
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
    ) -> list[PromptEmbedding]: ...

    def embed(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
    ) -> PromptEmbedding | list[PromptEmbedding]:
        """Returns the embedding of a prompt, or of each prompt of a list, with the arguments of `complete`.

        It is made of the hidden states of the prompt's tokens, pooled as the checkpoint says, and has the length 1.
        """
        requests = self._requests(prompt, None, {}, prompt_token_ids, request_id, priority, cache_salt, tenant)
        batch = self._embedding_batch(requests, Attempts(self._retry_s, timeout))
        embeddings = [PromptEmbedding.of(completion) for completion in batch.run()]
        return embeddings if isinstance(requests, list) else embeddings[0]

    @overload
    async def aembed(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109
        cache_salt: str = "",
        tenant: str = "",
    ) -> PromptEmbedding: ...

    @overload
    async def aembed(
        self,
        prompt: Sequence[str | Sequence[int]],
        *,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109
        cache_salt: str = "",
        tenant: str = "",
    ) -> list[PromptEmbedding]: ...

    async def aembed(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - sent as the deadline of the call, so that the server knows it
        cache_salt: str = "",
        tenant: str = "",
    ) -> PromptEmbedding | list[PromptEmbedding]:
        """The asynchronous twin of `embed`."""
        requests = self._requests(prompt, None, {}, prompt_token_ids, request_id, priority, cache_salt, tenant)
        batch = self._embedding_batch(requests, Attempts(self._retry_s, timeout))
        embeddings = [PromptEmbedding.of(completion) for completion in await self._run_in_thread(batch)]
        return embeddings if isinstance(requests, list) else embeddings[0]

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion | list[Completion]:
        """Returns the model's answer to a conversation, or a list of answers to a list of conversations.

        A conversation is a list of messages such as {"role": "user", "content": "Hello"}. The model's chat template, or
        `chat_template` in its place, makes the prompt of it: a text, or a name if the model has several;
        `template_variables` are passed to the template.
        Everything else is as in `complete`. Raises InvalidRequest for a model without a template, and for a template
        that fails.
        """
        prompts_of = partial(conversation.prompts_of, self.info(), chat_template, add_generation_prompt)
        prompts = self.tokenize(prompts_of(messages, template_variables), add_special_tokens=False)
        several, one = (None, prompts[0]) if conversation.is_one(messages) else (prompts, None)
        requests = self._requests(several, sampling, fields, one, request_id, priority, cache_salt, tenant, session)
        return self._complete(requests, Attempts(self._retry_s, timeout))

    @overload
    async def achat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...

    @overload
    async def achat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - sent as the deadline of the call, so that the server knows it
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion | list[Completion]:
        """The asynchronous twin of `chat`."""
        prompts_of = partial(conversation.prompts_of, await self.server_info(), chat_template, add_generation_prompt)
        prompts = await self.atokenize(prompts_of(messages, template_variables), add_special_tokens=False)
        several, one = (None, prompts[0]) if conversation.is_one(messages) else (prompts, None)
        requests = self._requests(several, sampling, fields, one, request_id, priority, cache_salt, tenant, session)
        return await self._acomplete(requests, Attempts(self._retry_s, timeout))

    @overload
    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...  # type: ignore[overload-overlap]

    @overload
    def tokenize(self, text: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]: ...

    def tokenize(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Returns the token ids of a text, or of each text of a list, as the server makes them of a prompt.

        Without `add_special_tokens`, the only special tokens are those that the text itself names.
        """
        token_ids = [
            ids
            for request in _tokenize_requests(text, add_special_tokens)
            for ids in wire.decode_prompts(self._call_synchronously(self._channels.stub.Tokenize, request))
        ]
        return token_ids[0] if isinstance(text, str) else token_ids

    @overload
    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @overload
    def detokenize(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]: ...

    def detokenize(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> str | list[str]:
        """Returns the text of a list of token ids, or the text of each list in a list of such lists."""
        prompts, is_one = wire.as_prompts(token_ids)
        texts = [
            text
            for part in _parts(prompts, MAX_DETOKENIZED_TOKENS)
            for text in self._call_synchronously(
                self._channels.stub.Detokenize, wire.encode_detokenize(part, skip_special_tokens)
            ).texts
        ]
        return texts[0] if is_one else texts

    @overload
    async def atokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...  # type: ignore[overload-overlap]

    @overload
    async def atokenize(self, text: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]: ...

    async def atokenize(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True
    ) -> list[int] | list[list[int]]:
        """The asynchronous twin of `tokenize`."""
        token_ids = [
            ids
            for request in _tokenize_requests(text, add_special_tokens)
            for ids in wire.decode_prompts(await self._call(self._channels.of_loop.stub.Tokenize, request))
        ]
        return token_ids[0] if isinstance(text, str) else token_ids

    @overload
    async def adetokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @overload
    async def adetokenize(
        self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]: ...

    async def adetokenize(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> str | list[str]:
        """The asynchronous twin of `detokenize`."""
        prompts, is_one = wire.as_prompts(token_ids)
        detokenize = self._channels.of_loop.stub.Detokenize
        texts = [
            text
            for part in _parts(prompts, MAX_DETOKENIZED_TOKENS)
            for text in (await self._call(detokenize, wire.encode_detokenize(part, skip_special_tokens))).texts
        ]
        return texts[0] if is_one else texts

    async def submit(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        session: Session | None = None,
        **fields: Unpack[SamplingFields],
    ) -> str:
        """Queues a detached request and returns its id: it runs whatever becomes of this client.

        The arguments are those of `generate`. Where the client retries, it draws the id, so that a request whose
        answer was lost is not queued twice.
        """
        drawn_id = f"req-{secrets.token_hex(8)}" if self._retry_s and request_id is None else None
        request = wire.encode_request(
            prompt,
            _merged(sampling, fields),
            prompt_token_ids=prompt_token_ids,
            request_id=request_id or drawn_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            session=session,
        )
        try:
            # No timeout: until its first worker is there, a server that has just started lets requests wait.
            submit = self._channels.of_loop.stub.Submit
            return (await self._call(submit, pb.SubmitRequest(request=request), timeout=None)).request_id
        except AlreadyExists:
            if drawn_id is None:
                raise
            return drawn_id

    async def attach(
        self, request_id: str, *, tenant: str = "", from_token: int = 0, max_reconnects: int = 5
    ) -> AsyncGenerator[Output, None]:
        """Yields the deltas of a detached request as `generate` does, of every sample from `from_token` on.

        If the connection breaks, it is made again and the deltas go on with the next token. Raises Unavailable after
        `max_reconnects` attempts in a row that brought nothing, NotFound for an unknown id, and OutOfRange for a token
        beyond those that there are; a request that failed ends with its error. Closing the generator leaves the request
        alone.
        """
        attachment = Attachment(from_token)
        num_failures = 0
        while True:
            call = self._channels.of_loop.stub.Attach(
                wire.message(
                    pb.AttachRequest,
                    request_id=request_id,
                    tenant=tenant,
                    from_token=from_token,
                    from_tokens=attachment.reconnect(),
                )
            )
            try:
                async for response in call:
                    num_failures = 0
                    output = attachment.take(wire.decode_output(response))
                    if output is not None:
                        yield output
                attachment.finish()
                return
            except grpc.RpcError as error:
                failure = wire.decode_error(error, self.url)
                # What comes with a retry delay is the server's own word, not a broken connection.
                is_broken = failure.code is grpc.StatusCode.UNAVAILABLE and failure.retry_delay is None
                if not is_broken or num_failures == max_reconnects:
                    raise failure from None
            finally:
                call.cancel()
            await asyncio.sleep(DELAYS_S[min(num_failures, len(DELAYS_S) - 1)])
            num_failures += 1

    async def result(self, request_id: str, *, tenant: str = "") -> Result:
        """Returns the state of a detached request and all of its output so far. Raises NotFound for an unknown id."""
        request = wire.message(pb.GetResultRequest, request_id=request_id, tenant=tenant)
        return wire.decode_result(await self._call(self._channels.of_loop.stub.GetResult, request))

    async def get_request(self, request_id: str, *, tenant: str = "") -> RequestReport:
        """Reports the state of an unfinished request and why it waits. Raises NotFound if none of this id runs."""
        request = wire.message(pb.GetRequestRequest, request_id=request_id, tenant=tenant)
        return wire.decode_report(await self._call(self._channels.of_loop.stub.GetRequest, request))

    async def blocks(self) -> BlockMap:
        """Reports the use of every block of the KV cache."""
        return wire.decode_block_map(await self._call(self._channels.of_loop.stub.GetBlocks, pb.GetBlocksRequest()))

    async def abort(self, request_id: str, *, tenant: str = "") -> None:
        """Ends a running request of the tenant; its stream ends with finish_reason "abort". Raises NotFound if none
        runs."""
        request = wire.message(pb.AbortRequest, request_id=request_id, tenant=tenant)
        await self._call(self._channels.of_loop.stub.Abort, request)

    async def server_info(self) -> ServerInfo:
        """Describes the model that is served, and the limits of the server."""
        return wire.decode_server_info(
            await self._call(self._channels.of_loop.stub.GetServerInfo, pb.GetServerInfoRequest())
        )

    def info(self) -> ServerInfo:
        """The synchronous twin of `server_info`."""
        method = self._channels.stub.GetServerInfo
        return wire.decode_server_info(self._call_synchronously(method, pb.GetServerInfoRequest()))

    async def loads(self) -> Loads:
        """Reports how much the server is doing now."""
        return wire.decode_loads(await self._call(self._channels.of_loop.stub.GetLoads, pb.GetLoadsRequest()))

    def _requests(
        self,
        prompt: str | Sequence[str | Sequence[int]] | None,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None,
        fields: SamplingFields,
        prompt_token_ids: Sequence[int] | None,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        tenant: str,
        session: Session | None = None,
    ) -> pb.GenerateRequest | list[pb.GenerateRequest]:
        """Encodes one request for one prompt, or a list of requests for a list of prompts."""
        encode = partial(wire.encode_request, priority=priority, cache_salt=cache_salt, tenant=tenant, session=session)
        if prompt is None or isinstance(prompt, str):
            if isinstance(sampling, Sequence):
                raise TypeError("a list of sampling parameters needs a list of prompts")
            merged = _merged(sampling, fields)
            return encode(prompt, merged, prompt_token_ids=prompt_token_ids, request_id=request_id)
        if prompt_token_ids is not None or request_id is not None:
            raise TypeError("prompt_token_ids and request_id belong to one prompt; a list holds texts and token ids")
        prompts = [wire.split_prompt(each, index) for index, each in enumerate(prompt)]
        requests = []
        for index, ((text, token_ids), chosen) in enumerate(
            zip(prompts, one_each(sampling, len(prompts)), strict=True)
        ):
            with wire.at_place(index):
                requests.append(encode(text, _merged(chosen, fields), prompt_token_ids=token_ids, request_id=None))
        return requests

    def _complete(
        self, requests: pb.GenerateRequest | list[pb.GenerateRequest], attempts: Attempts
    ) -> Completion | list[Completion]:
        if isinstance(requests, list):
            return RequestBatch(requests, self._channels.stub, self.url, attempts).run()
        builder = CompletionBuilder(wire.num_samples(requests), attempts.started_at)
        for output in self._stream(requests, attempts):
            builder.add(output, time.monotonic())
        return builder.finish(time.monotonic())

    async def _acomplete(
        self, requests: pb.GenerateRequest | list[pb.GenerateRequest], attempts: Attempts
    ) -> Completion | list[Completion]:
        if isinstance(requests, list):
            return await self._run_in_thread(RequestBatch(requests, self._channels.stub, self.url, attempts))
        builder = CompletionBuilder(wire.num_samples(requests), attempts.started_at)
        async with contextlib.aclosing(self._generate(requests, attempts)) as outputs:
            async for output in outputs:
                builder.add(output, time.monotonic())
        return builder.finish(time.monotonic())

    def _stream(self, request: pb.GenerateRequest, attempts: Attempts) -> Generator[Output, None, None]:
        builder = CompletionBuilder(wire.num_samples(request), attempts.started_at)
        while True:
            call = self._channels.stub.Generate(request, timeout=attempts.timeout_s)
            try:
                for response in blocking_call.responses(call):
                    attempts.end()
                    output = wire.decode_output(response)
                    builder.add(output, time.monotonic())
                    yield output
                builder.finish(time.monotonic())
                return
            except grpc.RpcError as error:
                failure = wire.decode_error(error, self.url)
            finally:
                call.cancel()
            time.sleep(attempts.next_delay(failure))

    async def _generate(self, request: pb.GenerateRequest, attempts: Attempts) -> AsyncGenerator[Output, None]:
        builder = CompletionBuilder(wire.num_samples(request), attempts.started_at)
        while True:
            try:
                async with contextlib.aclosing(self._responses(request, attempts.timeout_s)) as responses:
                    async for response in responses:
                        attempts.end()
                        output = wire.decode_output(response)
                        builder.add(output, time.monotonic())
                        yield output
                builder.finish(time.monotonic())
                return
            except PagewireError as error:
                failure = error
            await asyncio.sleep(attempts.next_delay(failure))

    async def _responses(
        self,
        request: pb.GenerateRequest,
        timeout: float | None,  # noqa: ASYNC109 - sent to the server too
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the responses to one request, on a call of its own, or on the call that requests in flight share."""
        connection = self._channels.of_loop
        connection.num_in_flight += 1
        may_share = connection.num_in_flight >= MIN_SHARED and request.ByteSize() <= MAX_SHARED_BYTES
        try:
            if connection.shared is not None and may_share:
                try:
                    async with contextlib.aclosing(connection.shared.responses(request, timeout)) as responses:
                        async for response in responses:
                            yield response
                    return
                except NotShared:
                    connection.shared = None
            call = connection.stub.Generate(request, timeout=timeout)
            try:
                async for response in call:
                    yield response
            except grpc.RpcError as error:
                raise wire.decode_error(error, self.url) from None
            finally:
                call.cancel()
        finally:
            connection.num_in_flight -= 1

    def _embedding_batch(
        self, requests: pb.GenerateRequest | list[pb.GenerateRequest], attempts: Attempts
    ) -> RequestBatch:
        several = requests if isinstance(requests, list) else [requests]
        for request in several:
            request.embed = True
        return RequestBatch(several, self._channels.stub, self.url, attempts)

    async def _run_in_thread(self, batch: RequestBatch) -> list[Completion]:
        running = asyncio.ensure_future(asyncio.to_thread(batch.run))
        # Once the caller has gone, nothing else asks how it ended, which asyncio would complain of.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            batch.cancel()
            await asyncio.wait({running})
            raise

    async def _call(self, method: Any, request: Any, timeout: float | None = UNARY_TIMEOUT_S) -> Any:  # noqa: ASYNC109
        attempts = Attempts(self._retry_s)
        while True:
            try:
                return await method(request, timeout=timeout)
            except grpc.RpcError as error:
                failure = wire.decode_error(error, self.url)
            await asyncio.sleep(attempts.next_delay(failure))

    def _call_synchronously(self, method: Any, request: Any) -> Any:
        attempts = Attempts(self._retry_s)
        while True:
            try:
                return method(request, timeout=UNARY_TIMEOUT_S)
            except grpc.RpcError as error:
                failure = wire.decode_error(error, self.url)
            time.sleep(attempts.next_delay(failure))


def _merged(sampling: SamplingParams | None, fields: SamplingFields) -> SamplingParams | None:
    """Returns sampling parameters that are updated by the fields that were given one by one."""
    return (sampling or UNSET).updated(**fields) if fields else sampling


def one_each(
    sampling: SamplingParams | Sequence[SamplingParams | None] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """Returns sampling parameters for each of a number of prompts."""
    if not isinstance(sampling, Sequence):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts and {len(sampling)} sampling parameters; give one for each")
    return sampling


def _tokenize_requests(text: str | Sequence[str], add_special_tokens: bool) -> Iterator[pb.TokenizeRequest]:
    """Yields the messages that have a text, or the texts of a list, tokenized."""
    for part in _parts([text] if isinstance(text, str) else text, MAX_TOKENIZED_CHARS):
        yield wire.message(pb.TokenizeRequest, texts=part, add_special_tokens=add_special_tokens)


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
