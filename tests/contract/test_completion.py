"""The scripts of `pagewire completion`: zsh runs the script for bash, and fish has its own."""

import shutil
import subprocess

import pytest

from pagewire.cli.command import BENCHES, VERBS, main

COMPLETE = """
{script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _pagewire; echo "${{COMPREPLY[@]}}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("pagewire com", "complete completion"),
        ("pagewire serve --max-num-s", "--max-num-seqs"),
        ("pagewire serve --device ''", "auto cpu cuda"),
        ("pagewire complete --early-stopping n", "never"),
        ("pagewire bench l", "latency"),
        ("pagewire bench latency --batch", "--batch-size"),
        ("pagewire serve --batch-si", ""),
        ("pagewire completion z", "zsh"),
        ("pagewire no-verb --", ""),
        ("pagewire complete --json-schema ''", ""),
        ("pagewire complete ''", ""),
        ("pagewire worker --device = cu", "cuda"),
        ("pagewire help comple", "complete completion"),
        ("pagewire serve --kv-cache-dtype=f", "--kv-cache-dtype=float16 --kv-cache-dtype=fp8"),  # as zsh inserts it
    ],
)
def test_bash_completes(words: str, completed: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = COMPLETE.format(script=script("bash", capsys), words=words)
    told = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert (told.stdout.strip(), told.stderr) == (completed, "")


@pytest.mark.parametrize("verb", ["serve", "complete", "chat", "completion"])
def test_describe_is_not_a_flag(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--describe"]) == 2
    assert "error: unknown flag --describe" in capsys.readouterr().err


def test_zsh_takes_what_bash_takes(capsys: pytest.CaptureFixture[str]) -> None:
    first, begin, rest = script("zsh", capsys).partition("autoload -Uz bashcompinit && bashcompinit\n")
    assert begin
    # Completions that the user has set up already are kept.
    assert first == "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n"
    assert rest == script("bash", capsys)


def test_fish_is_told_of_every_verb_and_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    lines = script("fish", capsys).splitlines()
    assert all(line.startswith("complete -c pagewire ") for line in lines)
    for verb in (*VERBS.keys() - {"bench", "completion"}, *(f"bench {name}" for name in BENCHES)):
        assert any(f" {verb}( |$)" in line and "-l help" in line for line in lines), verb
    assert any(line.endswith("-l device -xa 'auto cpu cuda'") for line in lines)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("pagewire com", ["complete", "completion"]),
        ("pagewire serve --kv-cache-dtype f", ["float16", "fp8"]),
        ("pagewire serve --kv-cache-dtype=f", ["--kv-cache-dtype=float16", "--kv-cache-dtype=fp8"]),
        ("pagewire completion ", ["bash", "fish", "zsh"]),
    ],
)
def test_fish_completes(words: str, completed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program = f"{script('fish', capsys)}\ncomplete -C '{words}'"
    told = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in told.stdout.splitlines()] == completed
