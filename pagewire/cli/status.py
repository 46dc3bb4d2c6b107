"""`pagewire status`: shows the load of a server, why a request waits, and the use of KV cache blocks."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import NoReturn

import grpc

from pagewire.cli import connection
from pagewire.cli.block_view import BlockView
from pagewire.client.client import Client
from pagewire.client.errors import PagewireError, Unavailable
from pagewire.client.server_info import Loads, RequestReport, ServerInfo
from pagewire.common.process.memory_size import describe_memory
from pagewire.common.strict_json import to_json
from pagewire.hosting.printable import printable
from pagewire.options import Parser

# Switch to the terminal's alternate screen without a cursor, and back.
ENTER_SCREEN, LEAVE_SCREEN = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\033[H", "\033[K", "\033[J"
BOLD, PLAIN = "\033[1m", "\033[0m"
WATCH_INTERVAL_S = 1.0
MIN_MAP_LINES = 4
LEGEND_LINES = 8  # of the block map, including its headings


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="pagewire status",
        description="Show the model, the worker and the load of a server, or what one request is doing.",
    )
    parser.add_argument(
        "--watch", action="store_true", help="refresh every second, with a map of the KV cache's blocks, until Ctrl-C"
    )
    parser.add_argument("--request", metavar="ID", help="instead show what this request is doing, and why it waits")
    parser.add_argument("--tenant", default="", help="tenant that the request belongs to")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    connection.add_flags(parser)
    parsed = parser.parse_args(arguments)
    with connection.client(parser, parsed, Client) as client:
        view = _View(client, parsed.request, parsed.tenant, with_map=parsed.watch)
        if not parsed.watch:
            print(view.text(parsed.json), flush=True)
            return 0
        with _screen() if not parsed.json and sys.stdout.isatty() else contextlib.nullcontext():
            _watch(view, parsed.json)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Switch the terminal to the alternate screen inside a `with` block, and always restore the terminal afterwards."""
    print(ENTER_SCREEN, end="", flush=True)
    try:
        yield
    finally:
        print(LEAVE_SCREEN, end="", flush=True)


def _watch(view: "_View", as_json: bool) -> NoReturn:
    while True:
        try:
            text = view.text(as_json)
        except Unavailable as error:
            text = f"{datetime.now():%H:%M:%S} {printable(str(error))}"
        print(text if as_json or not sys.stdout.isatty() else _frame(text), flush=True)
        time.sleep(WATCH_INTERVAL_S)


def _frame(text: str) -> str:
    """Return the terminal output that overwrites the previous screen with `text`. Lines beyond the height of the
    terminal are left out."""
    lines = text.split("\n")[: shutil.get_terminal_size().lines - 1]
    return HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW


class _View:
    """Shows the state of a server, or of one request on the server, as text or JSON."""

    def __init__(self, client: Client, request_id: str | None, tenant: str, *, with_map: bool) -> None:
        self._client = client
        self._request_id = request_id
        self._tenant = tenant
        self._with_map = with_map
        self._colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._blocks = BlockView(colour=self._colour)

    def text(self, as_json: bool) -> str:
        if self._request_id is not None:
            report = self._client.get_request(self._request_id, tenant=self._tenant)
            return to_json(asdict(report)) if as_json else report_table(report, colour=self._colour)
        info, loads = self._client.info(), self._loads()
        if as_json:
            return to_json({"info": asdict(info), "loads": None if loads is None else asdict(loads)})
        described = table(info, loads, colour=self._colour)
        if not self._with_map:
            return described
        blocks = self._client.blocks()
        size = shutil.get_terminal_size()
        num_lines = max(MIN_MAP_LINES, size.lines - described.count("\n") - LEGEND_LINES)
        return f"{described}\n\n{self._blocks.draw(blocks, size.columns, num_lines)}"

    def _loads(self) -> Loads | None:
        """Return the current load of the server, or None if only operators may read it."""
        try:
            return self._client.loads()
        except PagewireError as error:
            if error.code is not grpc.StatusCode.PERMISSION_DENIED:
                raise
            return None


def table(info: ServerInfo, loads: Loads | None, *, colour: bool) -> str:
    """Return a text table of names and values that describes a server: the model, the limits and the current load."""
    load_rows = [("load", "only operators may see it")] if loads is None else _load_rows(loads)
    return _rows_text([*_info_rows(info), *load_rows], colour)


def report_table(report: RequestReport, *, colour: bool) -> str:
    """Return a text table of names and values that describes the state of an unfinished request."""
    position = "" if report.queue_position is None else f", number {report.queue_position} in the queue"
    holders = [f"{holder.request_id or 'another tenant'} {holder.num_blocks}" for holder in report.holders]
    rows = [
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
    return _rows_text(rows, colour)


def _rows_text(rows: Sequence[tuple[str, str]], colour: bool) -> str:
    width = max(len(name) for name, _ in rows)
    start, end = (BOLD, PLAIN) if colour else ("", "")
    return "\n".join(f"{start}{name:<{width}}{end}  {printable(value)}" for name, value in rows)


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
    rows += [("chat", f"refused: {refusal}") for refusal in info.chat_refusals]
    if info.structured_output_refusal:
        rows.append(("structured output", f"refused: {info.structured_output_refusal}"))
    return rows


def _load_rows(loads: Loads) -> list[tuple[str, str]]:
    held = 100 * loads.num_held_blocks / loads.num_device_blocks if loads.num_device_blocks else 0.0
    hits = 100 * loads.num_cached_prompt_tokens / loads.num_prompt_tokens if loads.num_prompt_tokens else 0.0
    host_hits = 100 * loads.num_host_cached_prompt_tokens / loads.num_prompt_tokens if loads.num_prompt_tokens else 0.0
    return [
        ("running", str(loads.num_running)),
        ("waiting", f"{loads.num_waiting} ({loads.num_waiting_tokens} prompt tokens)"),
        ("KV cache", f"{held:.1f} % held of {loads.num_device_blocks} blocks, {loads.num_cached_blocks} cached"),
        ("swapped", str(loads.num_swapped)),
        (
            "host blocks",
            f"{loads.num_held_host_blocks} held of {loads.num_host_blocks}, {loads.num_cached_host_blocks} cached",
        ),
        ("throughput", f"{loads.generation_throughput:.1f} tokens/s"),
        (
            "tokens",
            f"{loads.num_prompt_tokens} prompt ({hits:.1f} % cached, {host_hits:.1f} % on the host), "
            f"{loads.num_generation_tokens} output",
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
