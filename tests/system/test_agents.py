"""Agents as separate processes, with a served model whose worker is killed in between."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testing.services import children_of, command_line
from tests.system.agents.tools import NUM_CALLS
from tests.system.http_server import serving, with_tools

pytestmark = pytest.mark.thorough

AGENTS = (("openai_agent", "chat"), ("openai_agent", "responses"), ("openai_agent", "stored"), ("anthropic_agent",))
DEATHS = (5, 23, 41)  # numbers of calls by the first agent after which the worker is killed
_FOLDER = Path(__file__).parents[2]


def calls_of(agent: tuple[str, ...], url: str, how: str, at_each: Callable[[int], None] = lambda _: None) -> list[str]:
    """Return the lines that an agent's process prints, one for each call.

    `at_each` receives the number of lines so far.
    """
    name, *api = agent
    command = [sys.executable, "-m", f"tests.system.agents.{name}", *api, url, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_FOLDER) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                at_each(len(lines))
            assert process.wait(60) == 0
            return lines
        finally:
            process.kill()


def test_agents_make_the_same_calls_through_deaths_of_the_worker(tmp_path: Path) -> None:
    """Streamed calls while workers die equal the calls of whole responses."""
    with (
        serving("--served-model-name=tooled", model=with_tools(tmp_path)) as (server, url),
        ThreadPoolExecutor() as pool,
    ):

        def kill(num_calls: int) -> None:
            if num_calls in DEATHS:
                (worker,) = [child for child in children_of(server.pid) if b"worker" in command_line(child)]
                os.kill(worker, signal.SIGKILL)

        calm = list(pool.map(lambda agent: calls_of(agent, url, "whole"), AGENTS))
        assert [len(calls) for calls in calm] == [NUM_CALLS] * len(AGENTS)
        assert calm[1] == calm[2]  # whether the client or the server keeps the conversation
        assert min(len(set(calls)) for calls in calm) > 3, calm
        streams = [pool.submit(calls_of, agent, url, "streamed") for agent in AGENTS[1:]]
        assert [calls_of(AGENTS[0], url, "streamed", kill), *(stream.result() for stream in streams)] == calm
