"""`pagewire status`: shows the load of a server, why a request waits, and the use of KV cache blocks."""

import argparse
import asyncio
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import grpc

from pagewire.cli import SUCCESS, connection, figures
from pagewire.cli.block_view import BlockView
from pagewire.cli.watch import INTERVAL_S, Watch
from pagewire.client.client import AsyncClient
from pagewire.client.errors import PagewireError, Unavailable
from pagewire.client.server_info import BlockMap, Loads, RequestReport, ServerInfo
from pagewire.common.process.memory_size import describe_memory
from pagewire.common.strict_json import to_json
from pagewire.hosting.printable import printable
from pagewire.options import Parser

BOLD, PLAIN = "\033[1m", "\033[0m"
GAP = "  "
PLAIN_TEXT_SIZE = 80, 24  # columns and lines of the block map without a terminal
MIN_MAP_LINES = 8  # with its legend
# The rows that --watch shows above the map of the blocks. The other rows follow the map.
FIRST_ROWS = {
    *("model", "load", "running", "waiting", "KV cache", "throughput", "first token", "per token", "queue time"),
    "tokens",
}


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="pagewire status",
        description="Show the model, the worker and the load of a server, or what one request is doing. "
        "The latencies are those of the last 1,000 sequences.",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="refresh every second, with a map of the KV cache's blocks, until q or Ctrl-C; the last line of the "
        "screen names the keys",
    )
    parser.add_argument("--request", metavar="ID", help="instead show what this request is doing, and why it waits")
    parser.add_argument("--tenant", default="", help="tenant that the request belongs to")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    connection.add_flags(parser)
    parsed = parser.parse_args(arguments)
    return asyncio.run(_show(connection.client(parser, parsed, AsyncClient), parsed))


async def _show(client: AsyncClient, parsed: argparse.Namespace) -> int:
    """Print the state once, or show it repeatedly for `--watch`. Return the exit code."""
    has_screen = sys.stdout.isatty()
    view = View(colour=has_screen and not os.environ.get("NO_COLOR"))
    async with client:
        if parsed.watch and not parsed.json and has_screen:
            await Watch(view.lines).run(lambda: _read(client, parsed))
        while True:
            try:
                state = await _read(client, parsed)
                values = {name: value for name, value in asdict(state).items() if name != "blocks"}
                print(to_json(values) if parsed.json else view.text(state), flush=True)
            except Unavailable as error:
                if not parsed.watch:
                    raise
                print(f"{datetime.now():%H:%M:%S} {printable(str(error))}", flush=True)
            if not parsed.watch:
                return SUCCESS
            await asyncio.sleep(INTERVAL_S)


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of a server. `loads` and `blocks` are None if only operators may read them, and `blocks` also if no map
    is needed."""

    info: ServerInfo
    loads: Loads | None
    blocks: BlockMap | None


async def _read(client: AsyncClient, parsed: argparse.Namespace) -> ServerState | RequestReport:
    """Return the current state of the server or, with `--request`, of the request."""
    if parsed.request is not None:
        return await client.get_request(parsed.request, tenant=parsed.tenant)
    info = await client.info()
    try:
        return ServerState(info, await client.loads(), await client.blocks() if parsed.watch else None)
    except PagewireError as error:
        if error.code is not grpc.StatusCode.PERMISSION_DENIED:
            raise
        return ServerState(info, None, None)


class View:
    """Shows the state of a server or of a request as text, again and again."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._blocks = BlockView(colour=colour)

    def text(self, state: ServerState | RequestReport) -> str:
        """Return a state as text for standard output."""
        described = "\n".join(line for lines in _row_lines(_rows(state), self._colour) for line in lines)
        if isinstance(state, RequestReport) or state.blocks is None:
            return described
        return f"{described}\n\n{self._blocks.draw(state.blocks, *PLAIN_TEXT_SIZE)}"

    def lines(self, state: ServerState | RequestReport, num_columns: int, num_lines: int, wanted: str) -> list[str]:
        """Return a state as lines for a terminal: the most important rows, the map of the blocks, and the other rows.
        If `wanted` is not empty, return only rows and requests that contain this text.

        The map fills the lines that the rows leave free or, in a low terminal, that the first rows leave free.
        """
        rows = _rows(state)
        described = zip(rows, _row_lines(rows, self._colour, num_columns), strict=True)
        shown = [
            (row[0] in FIRST_ROWS, lines) for row, lines in described if wanted.casefold() in " ".join(row).casefold()
        ]
        first, others = ([line for key, lines in shown if key is kind for line in lines] for kind in (True, False))
        if isinstance(state, RequestReport) or state.blocks is None:
            return [*first, *others]
        num_free = num_lines - len(first) - len(others)
        num_free = num_free if num_free >= MIN_MAP_LINES else num_lines - len(first)
        return [*first, *self._blocks.draw(state.blocks, num_columns, num_free, wanted).split("\n"), *others]


def _rows(state: ServerState | RequestReport) -> list[tuple[str, str]]:
    if isinstance(state, RequestReport):
        return _report_rows(state)
    load_rows = [("load", "only operators may see it")] if state.loads is None else _load_rows(state.loads)
    return [*_info_rows(state.info), *load_rows]


def _report_rows(report: RequestReport) -> list[tuple[str, str]]:
    position = "" if report.queue_position is None else f", number {report.queue_position} in the queue"
    holders = [f"{holder.request_id or 'another tenant'} {holder.num_blocks}" for holder in report.holders]
    return [
        ("request", report.request_id + (f" of tenant {report.tenant}" if report.tenant else "")),
        ("state", f"{report.state}{position}, {report.age_seconds:.1f} s old"),
        ("why", report.reason or "it runs freely"),
        ("sequences", f"{report.num_sequences}, {report.num_running_sequences} of them run"),
        ("tokens", f"{report.num_prompt_tokens} prompt, {report.num_output_tokens} output"),
        ("computed", f"{report.num_computed_tokens} positions"),
        ("blocks", f"{report.num_held_blocks} held, {report.num_held_host_blocks} on the host"),
        ("wanted", f"{report.num_wanted_blocks} blocks, {report.num_free_blocks} are free"),
        ("preempted", f"{report.num_preemptions} times"),
        ("holders", ", ".join(holders) or "none"),
    ]


def _row_lines(rows: Sequence[tuple[str, str]], colour: bool, num_columns: int = sys.maxsize) -> list[list[str]]:
    """Return the lines of each row. A value that is too long for `num_columns` continues below itself."""
    name_width = max(len(name) for name, _ in rows)
    start, end = (BOLD, PLAIN) if colour else ("", "")
    found = []
    for name, value in rows:
        parts = textwrap.wrap(printable(value), num_columns - name_width - len(GAP)) or [""]
        margin = " " * (name_width + len(GAP))
        found.append([f"{start}{name:<{name_width}}{end}{GAP}{parts[0]}", *(margin + part for part in parts[1:])])
    return found


def _info_rows(info: ServerInfo) -> list[tuple[str, str]]:
    worker = info.worker
    if worker is None:
        described = "none connected"
    else:
        described = f"{worker.device} {worker.dtype}, {worker.attention_backend} attention, epoch {worker.epoch}"
        host, _, process = worker.worker_id.partition(":")
        if process:
            described += f", process {process.partition(':')[0]} on {host}"
    rows = [
        ("model", f"{info.served_model_name}, a vocabulary of {info.vocab_size} tokens"),
        ("context", f"at most {info.max_model_len} tokens, prompt and output together"),
        ("server", f"pagewire {info.version}, {info.instance_id}"),
        ("worker", described),
        ("step", f"{info.max_num_seqs} sequences, {info.max_num_batched_tokens} tokens, depth {info.pipeline_depth}"),
    ]
    if worker is not None and worker.weight_format:
        rows.insert(2, ("weights", f"{worker.weight_format}, {describe_memory(worker.weight_bytes)} of memory"))
    if worker is not None and any(worker.layer_group_windows):
        rows.append(("layer groups", _describe_windows(worker.layer_group_windows)))
    if worker is not None and worker.state_bytes:
        size = describe_memory(worker.state_bytes)
        rows.append(("states", f"{size} for each sequence besides its KV cache, of {worker.num_state_layers} layers"))
    rows += [("chat", f"refused: {refusal}") for refusal in info.chat_refusals]
    if info.structured_output_refusal:
        rows.append(("structured output", f"refused: {info.structured_output_refusal}"))
    return rows


def _describe_windows(windows: Sequence[int]) -> str:
    """Return the numbers of layer groups without a window and with each window, as one line."""
    return ", ".join(
        f"{number} with a window of {window} tokens" if window else f"{number} without a window"
        for window, number in Counter(windows).items()
    )


def _load_rows(loads: Loads) -> list[tuple[str, str]]:
    latencies = {
        "first token": loads.time_to_first_token,
        "per token": loads.time_per_output_token,
        "queue time": loads.queue_time,
    }
    seconds = {name: (found.mean, found.p50, found.p99) for name, found in latencies.items() if found}
    described = {name: "mean {}, p50 {}, p99 {}".format(*map(figures.duration, seconds[name])) for name in seconds}
    held = 100 * loads.num_held_blocks / loads.num_device_blocks if loads.num_device_blocks else 0.0
    hits = 100 * loads.num_cached_prompt_tokens / loads.num_prompt_tokens if loads.num_prompt_tokens else 0.0
    host_hits = 100 * loads.num_host_cached_prompt_tokens / loads.num_prompt_tokens if loads.num_prompt_tokens else 0.0
    states = f"{loads.num_held_states} held of {loads.num_device_states}, {loads.num_cached_states} cached"
    return [
        ("running", f"{loads.num_running}, {loads.num_swapped} more are swapped out"),
        ("waiting", f"{loads.num_waiting} ({loads.num_waiting_tokens} prompt tokens)"),
        ("KV cache", f"{held:.1f} % held of {loads.num_device_blocks} blocks, {loads.num_cached_blocks} cached"),
        *([("states", states)] if loads.num_device_states else []),
        ("throughput", f"{loads.generation_throughput:.1f} tokens/s"),
        *((name, described.get(name, "none yet")) for name in latencies),
        (
            "tokens",
            f"{loads.num_generation_tokens} output, {loads.num_prompt_tokens} prompt ({hits:.1f} % cached)",
        ),
        (
            "host blocks",
            f"{loads.num_held_host_blocks} held of {loads.num_host_blocks}, {loads.num_cached_host_blocks} cached; "
            f"{host_hits:.1f} % of the prompt tokens were found there",
        ),
        (
            "sessions",
            f"{sum(loads.num_kept_session_tokens)} prompt tokens kept for their return, "
            f"{sum(loads.num_lost_session_tokens)} computed again",
        ),
        (
            "admitted",
            f"{loads.num_admitted_requests} requests, {loads.num_overdue_requests} of them after --max-wait",
        ),
        (
            "since start",
            f"{loads.num_preemptions} preemptions ({loads.num_swap_preemptions} by swapping), "
            f"{loads.num_moved_blocks_out} blocks moved out, {loads.num_moved_blocks_in} in, "
            f"{loads.num_worker_losses} workers lost",
        ),
    ]
