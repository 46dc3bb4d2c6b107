"""Execution of client programs in an environment that keeps them on this machine."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".venv-clients"
PYTHON = INSTALLED / "python" / "bin"
AIDER = INSTALLED / "aider" / "bin" / "aider"
AIDER_OPTIONS = [
    *("--edit-format", "diff", "--yes-always", "--no-git", "--no-pretty"),
    *("--no-analytics", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings"),
]
NPM = INSTALLED / "node_modules" / ".bin"
SECONDS = 840
# Set by `python -m tests.clients` if only the loopback interface exists.
ISOLATED = "PAGEWIRE_CLIENTS_ISOLATED"
# Variables that disable each program's telemetry, updates, tracing and downloads.
QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


def prepare_aider(home: Path) -> None:
    """Write a file that aider would download otherwise."""
    prices = home / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text('{"another model": {}}')


class ProgramError(AssertionError):
    """A program that failed or did not end."""


@dataclass
class Program:
    """A runner of client programs for one server, each with a home of its own.

    It records the programs' requests to the proxy.
    """

    home: Path
    proxy: str
    asked: list[str] = field(default_factory=list)  # requests to the proxy, which refuses everything

    async def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        given: str = "",
        statuses: tuple[int, ...] = (0,),
    ) -> str:
        """Run a program to its end with `given` on standard input, and return its output."""
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            cwd=cwd or self.home,
            env=self.environ() | (environ or {}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(SECONDS):
                output, errors = await process.communicate(given.encode())
        except TimeoutError:
            raise ProgramError(f"{command[0]} did not end within {SECONDS} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        if process.returncode not in statuses:
            said = output.decode()[-6000:] + errors.decode()[-6000:]
            raise ProgramError(f"{command[0]} ended with {process.returncode}:\n{said}")
        return output.decode()

    def environ(self) -> dict[str, str]:
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), self.proxy)
        proxies |= {"NO_PROXY": "127.0.0.1,localhost"}
        lower = {name.lower(): value for name, value in proxies.items()}
        own = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb"}
        return own | QUIET | proxies | lower


@asynccontextmanager
async def programs(home: Path) -> AsyncIterator[Program]:
    """Provide a runner of programs and a proxy that refuses everything.

    At the end, no program may have used the proxy.
    """

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        program.asked.append((await reader.readline()).decode().strip())
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    program = Program(home, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        yield program
    assert program.asked == [], f"a program tried to leave the machine: {program.asked}"
