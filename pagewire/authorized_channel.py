"""Puts an API key on all calls of a channel. It works on plaintext channels too, unlike gRPC's own call credentials."""

import functools
from typing import Any


class AuthorizedChannel:
    """A channel, synchronous or asynchronous, with the methods that a stub uses."""

    def __init__(self, channel: Any, api_key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {api_key}"),)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._authorized(self._channel.stream_stream(*arguments, **options))

    def close(self) -> Any:
        """Closes the channel. The result is to be awaited if the channel is asynchronous."""
        return self._channel.close()

    def _authorized(self, call: Any) -> Any:
        return functools.partial(call, metadata=self._metadata)
