"""`pagewire status`: what a server serves and does now."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from pagewire import connection
from pagewire.client import Client
from pagewire.errors import Unavailable
from pagewire.options import Parser
from pagewire.server import Loads, ServerInfo

HOME_AND_CLEAR = "\033[H\033[J"
BOLD, PLAIN = "\033[1m", "\033[0m"
WATCH_INTERVAL_S = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="pagewire status", description="Show what a server serves and does now.")
    parser.add_argument("--watch", action="store_true", help="show it again each second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    connection.add_flags(parser)
    parsed = parser.parse_args(arguments)
    asyncio.run(_show(connection.client(parser, parsed), watch=parsed.watch, as_json=parsed.json))
    return 0


async def _show(client: Client, *, watch: bool, as_json: bool) -> None:
    clear = HOME_AND_CLEAR if watch and sys.stdout.isatty() else ""
    async with client:
        while True:
            try:
                text = await _describe(client, as_json)
            except Unavailable as error:
                if not watch:
                    raise
                text = f"{datetime.now():%H:%M:%S} {error}"
            print(clear + text, flush=True)
            if not watch:
                return
            await asyncio.sleep(WATCH_INTERVAL_S)


async def _describe(client: Client, as_json: bool) -> str:
    info, loads = await asyncio.gather(client.server_info(), client.loads())
    if as_json:
        return json.dumps({"info": asdict(info), "loads": asdict(loads)})
    return table(info, loads, colour=sys.stdout.isatty())


def table(info: ServerInfo, loads: Loads, *, colour: bool) -> str:
    """Two columns, names and values."""
    rows = [*_info_rows(info), *_load_rows(loads)]
    width = max(len(name) for name, _ in rows)
    start, end = (BOLD, PLAIN) if colour else ("", "")
    return "\n".join(f"{start}{name:<{width}}{end}  {value}" for name, value in rows)


def _info_rows(info: ServerInfo) -> list[tuple[str, str]]:
    worker = info.worker
    if worker is None:
        described = "none connected"
    else:
        described = f"{worker.device} {worker.dtype}, {worker.attention_backend} attention, epoch {worker.epoch}"
    return [
        ("model", f"{info.served_model_name}, {info.max_model_len} positions, {info.vocab_size} tokens"),
        ("server", f"pagewire {info.version}, {info.instance_id}"),
        ("worker", described),
        ("step", f"{info.max_num_seqs} sequences, {info.max_num_batched_tokens} tokens, depth {info.pipeline_depth}"),
    ]


def _load_rows(loads: Loads) -> list[tuple[str, str]]:
    held = 100 * loads.num_held_blocks / loads.num_device_blocks if loads.num_device_blocks else 0.0
    hits = 100 * loads.num_cached_prompt_tokens / loads.num_prompt_tokens if loads.num_prompt_tokens else 0.0
    return [
        ("running", str(loads.num_running)),
        ("waiting", f"{loads.num_waiting} ({loads.num_waiting_tokens} prompt tokens)"),
        ("KV cache", f"{held:.1f} % held of {loads.num_device_blocks} blocks, {loads.num_cached_blocks} cached"),
        ("throughput", f"{loads.generation_throughput:.1f} tokens/s"),
        ("tokens", f"{loads.num_prompt_tokens} prompt ({hits:.1f} % cached), {loads.num_generation_tokens} output"),
        ("since start", f"{loads.num_preemptions} preemptions, {loads.num_worker_losses} workers lost"),
    ]
