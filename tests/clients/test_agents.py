"""Claude Code and Codex, each in a loop of ten tool calls with a model that follows a script."""

import json
from pathlib import Path

from scheduler_service.api.http.prompts import IMAGE_LEFT_OUT
from tests.clients.conftest import Served
from tests.clients.program import NPM
from tests.clients.scripts import Call, loop

DONE = "All of it is done."
# Eight by eight pixels.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000080000000808020000004b6d29dc0000001249444154789c63f8cfc0801561171db4120028ff"
    "3fc16eecdf610000000049454e44ae426082"
)


async def test_claude_code(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("alpha\nbeta\n")
    (folder / "red.png").write_bytes(PNG)
    calls = [
        ("Read", {"file_path": str(folder / "notes.txt")}),
        ("Edit", {"file_path": str(folder / "notes.txt"), "old_string": "beta", "new_string": "gamma"}),
        ("Write", {"file_path": str(folder / "new.py"), "content": "print('one \"two\" 𝄞')\n"}),
        *(("Bash", {"command": f"echo {i} >> log.txt; cat log.txt", "description": "Log"}) for i in range(4)),
        ("Bash", {"command": "exit 3"}),
        ("Read", {"file_path": str(folder / "red.png")}),
        ("Bash", {"command": "python3 new.py", "description": "Run"}),
    ]
    assert len(calls) == 10
    served.worker.script = loop(calls, DONE)
    command = [NPM / "claude", "-p", "Do it.", "--output-format", "json", "--model", "chatty"]
    said = await served.program.run(
        *command, "--allowedTools", "Bash,Read,Edit,Write", cwd=folder, environ=served.environ()
    )
    told = json.loads(said)
    assert (told["is_error"], told["num_turns"], told["result"]) == (False, 11, DONE), said
    assert (folder / "log.txt").read_text() == "0\n1\n2\n3\n"
    assert (folder / "notes.txt").read_text() == "alpha\ngamma\n"
    results = served.worker.conversations[-1].texts_of("tool")
    assert len(results) == 10, results
    assert IMAGE_LEFT_OUT in results[8], results
    assert 'one "two" 𝄞' in results[9], results


CODEX_CONFIG = """
model = "chatty"
model_provider = "own"
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
apps = false
plugins = false
remote_plugin = false
[model_providers.own]
name = "own"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
PATCH = "*** Begin Patch\n*** Add File: new.py\n+print('one \"two\" 𝄞')\n*** End Patch\n"
CODEX = [NPM / "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]


async def run_codex(served: Served, folder: Path, config: str, calls: list[Call]) -> list[str]:
    """Run a loop of ten calls, and return the tool results that the model receives."""
    (served.program.home / "config.toml").write_text(config)
    assert len(calls) == 10
    served.worker.script = loop(calls, DONE)
    environ = {"CODEX_HOME": str(served.program.home)}
    said = await served.program.run(*CODEX, "Do it.", cwd=folder, environ=environ)
    events = [json.loads(line) for line in said.splitlines()]
    assert events[-1]["type"] == "turn.completed", said
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [DONE], said
    results = served.worker.conversations[-1].texts_of("tool")
    assert len(results) == 10, results
    return results


async def test_codex(served: Served, tmp_path: Path) -> None:
    """Codex runs commands, a plan and tools of a namespace with a model that it does not know."""
    folder = tmp_path / "work"
    folder.mkdir()
    results = await run_codex(
        served,
        folder,
        CODEX_CONFIG.format(url=served.url),
        [
            *(("exec_command", {"cmd": f"echo {i} >> log.txt; cat log.txt"}) for i in range(5)),
            ("create_goal", {"objective": 'see "it" 𝄞 through'}),
            ("exec_command", {"cmd": "exit 3"}),
            ("multi_agent_v1__close_agent", {"target": "nobody"}),
            ("update_goal", {"status": "complete"}),
            ("exec_command", {"cmd": "printf 'one \"two\" 𝄞'"}),
        ],
    )
    assert (folder / "log.txt").read_text() == "0\n1\n2\n3\n4\n"
    assert 'see \\"it\\" 𝄞 through' in results[5], results
    assert "exited with code 3" in results[6], results
    assert 'one "two" 𝄞' in results[9], results


async def test_codex_with_a_custom_tool(served: Served, tmp_path: Path) -> None:
    """Codex changes files by patches with a model of its catalogue; the patch tool accepts a text instead of JSON."""
    environ = {"CODEX_HOME": str(served.program.home)}
    listed = json.loads(await served.program.run(NPM / "codex", "debug", "models", environ=environ))["models"]
    known = next(model for model in listed if model["slug"] == "gpt-5.5")
    own = known | {"slug": "chatty", "supports_search_tool": False, "support_verbosity": False}
    catalogue = tmp_path / "catalogue.json"
    catalogue.write_text(json.dumps({"models": [own]}))
    folder = tmp_path / "work"
    folder.mkdir()
    results = await run_codex(
        served,
        folder,
        f'model_catalog_json = "{catalogue}"\n{CODEX_CONFIG.format(url=served.url)}',
        [
            ("apply_patch", {"input": PATCH}),
            ("exec_command", {"cmd": "python3 new.py"}),
            ("apply_patch", {"input": "no patch"}),
            *(("exec_command", {"cmd": f"echo {i} >> log.txt; cat log.txt"}) for i in range(7)),
        ],
    )
    assert (folder / "new.py").read_text() == "print('one \"two\" 𝄞')\n"
    assert 'one "two" 𝄞' in results[1], results
    assert (folder / "log.txt").read_text() == "0\n1\n2\n3\n4\n5\n6\n"
