"""Traces of requests, read from three published formats, and the token ids of their prompts and outputs.

In every format, a trace is a list of sessions. Content is known only by block ids: equal ids are equal content.
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

MOONCAKE_BLOCK_SIZE = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_GZIP_MAGIC = b"\x1f\x8b"

BlockRuns = tuple[tuple[int, int], ...]


class TraceError(ValueError):
    """Raised if a file is not a trace of requests, or if one of its lines has missing or invalid fields. The message
    names the file, and the line if one is at fault."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request that a trace has recorded. Lengths are in tokens."""

    think_s: float  # seconds after the previous answer; 0 for the first request of a session
    num_prompt_tokens: int
    num_output_tokens: int  # at least 1
    block_runs: BlockRuns  # (first id, count) of the blocks that the prompt starts with
    num_needed_tokens: int  # prompt tokens that no earlier request has contained


@dataclass(frozen=True, slots=True)
class TraceSession:
    """A series of requests that one client of a trace sends, for example a conversation.

    The first request is sent at `start_s`, and each later request after the answer to the previous request.
    """

    name: str
    start_s: float
    requests: tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded series of requests to replay, as sessions in the order of the file.

    `block_size` is the number of tokens in each block of a prompt. It is 0 if the file format does not describe the
    content of prompts.
    """

    form: str
    block_size: int
    shares_blocks: bool  # a block id means the same content in all sessions, not only within one
    sessions: tuple[TraceSession, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)


def read_trace(path: Path, max_requests: int | None = None) -> Trace:
    """Read a trace of requests from a file in any of the supported formats, plain or compressed by gzip.

    At most `max_requests` requests are read. Raises TraceError for a file that is not a trace, and OSError for a file
    that cannot be read.
    """
    with path.open("rb") as file:
        opener: Any = gzip.open if file.read(2) == _GZIP_MAGIC else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            trace = _read(path, lines, max_requests)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is not a trace: {error}") from None
    if not trace.sessions:
        raise TraceError(f"{path} has no requests")
    return trace


class TraceContent:
    """Generates token ids for the prompts and outputs of a trace, which contains only ids of blocks instead of text.

    All tokens of a block are the same number, which is derived from the block's id. So equal blocks have equal tokens.
    If a request has tokens that no block id describes, they get a number that no other request uses.
    """

    def __init__(self, trace: Trace, scale: int) -> None:
        """Create the generator of a trace's token ids.

        One generated token represents `scale` tokens of the trace. The scale must divide the trace's block size.
        """
        self._trace = trace
        self._scale = scale
        self._num_block_tokens = trace.block_size // scale
        num_ids = [_num_ids(request.block_runs for request in session.requests) for session in trace.sessions]
        if trace.shares_blocks:
            self._num_contents = max(num_ids)
            self._bases = [0] * len(num_ids)
        else:
            *self._bases, self._num_contents = accumulate(num_ids, initial=0)

    def tokens(self, session: int, index: int) -> tuple[list[int], list[int]]:
        """Return the token ids of a request's prompt, and the token ids of its output. Neither list is empty.

        `session` is the index of the session in the trace. `index` is the index of the request in the session.
        """
        requests = self._trace.sessions[session].requests
        request, base = requests[index], self._bases[session]
        num_prompt = max(1, round(request.num_prompt_tokens / self._scale))
        # The first token comes with the prompt. The number of further tokens gives them the duration of the trace's
        # tokens.
        num_output = 1 + round((request.num_output_tokens - 1) / self._scale)
        continues = index + 1 < len(requests) and _continues(request, requests[index + 1])
        tokens = self._tokens_of(base, requests[index + 1 if continues else index].block_runs)
        num_fresh = num_prompt + num_output - len(tokens)
        if num_fresh > 0:
            self._num_contents += 1
            tokens += [self._num_contents] * num_fresh
        return tokens[:num_prompt], tokens[num_prompt : num_prompt + num_output]

    def _tokens_of(self, base: int, runs: BlockRuns) -> list[int]:
        repeats = range(self._num_block_tokens)
        return [
            number for first, count in runs for number in range(base + first, base + first + count) for _ in repeats
        ]


def _num_ids(prompts: Iterable[BlockRuns]) -> int:
    """Return the number of possible block ids in the prompts: the greatest block id plus 1."""
    return max((first + count for runs in prompts for first, count in runs), default=0)


def _continues(request: TraceRequest, following: TraceRequest) -> bool:
    """Return whether the prompt of `following` starts with all blocks of the prompt of `request`.

    The further blocks of the following prompt then describe the output of `request`.
    """
    return common_blocks(request.block_runs, following.block_runs) == num_blocks(request.block_runs)


def common_blocks(runs: BlockRuns, others: BlockRuns) -> int:
    """Return the number of blocks in the common prefix of two prompts. Each prompt is given as runs of block ids."""
    num_common = 0
    for block, other in zip(_blocks(runs), _blocks(others), strict=False):
        if block != other:
            break
        num_common += 1
    return num_common


def num_blocks(runs: BlockRuns) -> int:
    """Return the number of blocks of a prompt, which is given as runs of block ids."""
    return sum(count for _, count in runs)


def _blocks(runs: BlockRuns) -> Iterator[int]:
    for first, count in runs:
        yield from range(first, first + count)


def _read(path: Path, lines: IO[str], max_requests: int | None) -> Trace:
    first = lines.readline()
    lines.seek(0)
    if first.strip().split(",") == list(AZURE_COLUMNS):
        return Trace("azure", 0, False, tuple(_limited(_azure(path, lines), max_requests)))
    try:
        keys = set(json.loads(first))
    except (ValueError, TypeError):
        keys = set()
    if {"session", "requests"} <= keys:
        block_sizes: set[int] = set()
        sessions = tuple(_limited(_agent_sessions(path, lines, block_sizes), max_requests))
        if len(block_sizes) > 1:
            raise TraceError(f"{path} has blocks of {sorted(block_sizes)} tokens, but must have one block size")
        return Trace("agent sessions", next(iter(block_sizes), 0), False, sessions)
    if {"timestamp", "hash_ids"} <= keys:
        return Trace("mooncake", MOONCAKE_BLOCK_SIZE, True, tuple(_limited(_mooncake(path, lines), max_requests)))
    raise TraceError(
        f"{path} is not a trace: its first line is neither a session nor a request with hash_ids in JSON, nor the "
        f"header {','.join(AZURE_COLUMNS)}"
    )


def _limited(sessions: Iterable[TraceSession], max_requests: int | None) -> Iterator[TraceSession]:
    """Yield the sessions of a trace, up to `max_requests` requests in total. If necessary, the last session is cut
    short. None means no limit."""
    num_requests = 0
    for session in sessions:
        if max_requests is not None and num_requests + len(session.requests) >= max_requests:
            yield replace(session, requests=session.requests[: max_requests - num_requests])
            return
        num_requests += len(session.requests)
        yield session


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where} is not JSON: {error}") from None


def _agent_sessions(path: Path, lines: Iterable[str], block_sizes: set[int]) -> Iterator[TraceSession]:
    for where, entry in _json_lines(path, lines):
        try:
            block_size = int(entry["block_size"])
            block_sizes.add(block_size)
            session = TraceSession(str(entry["session"]), 0.0, _requests_of(entry["requests"], block_size))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{where} is not a session: {_fault(error)}") from None
        if session.requests:
            yield session


def _requests_of(entries: list[dict[str, Any]], block_size: int) -> tuple[TraceRequest, ...]:
    """Build the requests of a session from its entries in an agent trace. A request must compute the prompt tokens that
    follow the longest common prefix with the session's previous prompt."""
    requests: list[TraceRequest] = []
    for entry in entries:
        runs = tuple((int(first), int(count)) for first, count in entry["blocks"])
        before = requests[-1].block_runs if requests else ()
        num_known = common_blocks(runs, before) * block_size
        think_s = float(entry["think_s"] or 0.0) if requests else 0.0
        requests.append(_request(think_s, int(entry["input"]), int(entry["output"]), runs, num_known))
    return tuple(requests)


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceSession]:
    """Read the sessions of a trace in the Mooncake format. Each request is a session of its own.

    A block id in this format identifies the block together with all blocks before it. Raises TraceError for a line that
    is not a request.
    """
    seen: set[int] = set()
    for where, entry in _json_lines(path, lines):
        try:
            blocks = [int(block) for block in entry["hash_ids"]]
            num_known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
            num_known *= MOONCAKE_BLOCK_SIZE
            seen.update(blocks)
            runs = tuple(_runs(blocks))
            request = _request(0.0, int(entry["input_length"]), int(entry["output_length"]), runs, num_known)
            yield TraceSession(where.rpartition(" ")[2], float(entry["timestamp"]) / 1000, (request,))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{where} is not a request: {_fault(error)}") from None


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceSession]:
    """Read the sessions of a trace in the Azure format. Each request is a session of its own, and only the lengths of
    prompt and output are known.

    Raises TraceError for a line that is not a request.
    """
    first_at: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            arrived_at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first_at = first_at or arrived_at
            request = _request(0.0, int(row["ContextTokens"]), int(row["GeneratedTokens"]), (), 0)
            yield TraceSession(str(number), (arrived_at - first_at).total_seconds(), (request,))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number} is not a request: {_fault(error)}") from None


def _request(
    think_s: float, num_prompt_tokens: int, num_output_tokens: int, runs: BlockRuns, num_known: int
) -> TraceRequest:
    """Return a request of a trace. An empty output becomes one token long, because a request ends with a token.

    Raises ValueError if a number is negative or a run of blocks is empty.
    """
    if min(num_prompt_tokens, num_output_tokens, think_s) < 0 or any(first < 0 or count < 1 for first, count in runs):
        raise ValueError("a number is negative, or a run of blocks is empty")
    num_needed = max(0, num_prompt_tokens - num_known)
    return TraceRequest(think_s, num_prompt_tokens, max(1, num_output_tokens), runs, num_needed)


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive block ids in `blocks`, as (first id, count)."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i


def _fault(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
