"""`pagewire serve` with its HTTP API, as a separate process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pagewire.hosting.supervisor import free_port
from testing.parity import STORYTELLER

TOOL_TEMPLATE = """{% for message in messages %}{{ message.content }}
{% for call in message.tool_calls %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{% endfor %}{% endfor %}"""


def with_tools(folder: Path) -> Path:
    """Return `folder` with the bundled model and a chat template that supports tool calls."""
    for path in STORYTELLER.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@contextmanager
def serving(
    *flags: str, model: Path = STORYTELLER, stderr: IO[bytes] | None = None
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    port = free_port("127.0.0.1")
    base = ("--port=0", "--metrics-port=0", "--num-device-blocks=512", "--num-threads=1", f"--http-port={port}")
    command = [sys.executable, "-m", "pagewire", "serve", str(model), *base, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            url = f"{'https' if any('tls' in flag for flag in flags) else 'http'}://127.0.0.1:{port}"
            assert lines[1] == f"ready on {url}\n", lines
            yield process, url
        finally:
            process.kill()
