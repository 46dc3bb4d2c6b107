"""The first steps of Python clients, each run as a separate program in the clients' environment."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Served
from tests.clients.program import AIDER, AIDER_OPTIONS, PYTHON, prepare_aider
from tests.clients.scripts import HELLO

STEPS = Path(__file__).with_name("steps")


@pytest.mark.parametrize(
    ("name", "num_passed"), [("litellm", 4 * 3 + 2), ("pydantic_ai", 4), ("openai_agents", 2)], ids=str
)
async def test_first_steps(served: Served, name: str, num_passed: int) -> None:
    said = await served.program.run(PYTHON / "python", STEPS / f"{name}_steps.py", environ={"SERVER": served.url})
    assert said.count("passed ") == num_passed, said


EDIT = """I change the greeting.

greet.py
```python
<<<<<<< SEARCH
print("hello")
=======
print('one "two" 𝄞')
>>>>>>> REPLACE
```
"""


@pytest.mark.parametrize("model", ["openai/chatty", "ollama_chat/chatty"], ids=str)
async def test_aider(served: Served, tmp_path: Path, model: str) -> None:
    """Aider changes a file, once with streamed responses and once without streaming.

    The first change needs a second request.
    """
    file = tmp_path / "greet.py"
    prepare_aider(served.program.home)
    served.worker.script = lambda conversation: EDIT
    for option in ("--stream", "--no-stream"):
        file.write_text('print("hello")\n')
        command = [AIDER, "--model", model, *AIDER_OPTIONS, option, "--message", "Change the greeting.", "greet.py"]
        said = await served.program.run(*command, cwd=tmp_path, environ=served.environ())
        assert "Applied edit to greet.py" in said, said
        assert file.read_text() == "print('one \"two\" 𝄞')\n"


TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["yes", "no, it is not"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": HELLO,
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 100, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.mark.parametrize(
    ("model", "path", "tokenizer", "tasks", "options"),
    [
        ("local-completions", "completions", "huggingface", ["choices", "answers"], []),
        ("local-completions", "completions", "remote", ["choices", "answers"], []),
        ("local-chat-completions", "chat/completions", "huggingface", ["answers"], ["--apply_chat_template"]),
    ],
    ids=["completions", "the server's tokenizer", "chat"],
)
async def test_lm_eval(
    served: Served,
    checkpoint: Path,
    tmp_path: Path,
    model: str,
    path: str,
    tokenizer: str,
    tasks: list[str],
    options: list[str],
) -> None:
    """Tasks of a few made-up questions: log-likelihoods, where the shorter answer's is higher, and generated texts."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"question": "Is {i} a number?"}}\n' for i in range(5)))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name} | data | task))
    arguments = f"model=chatty,base_url={served.url}/v1/{path},num_concurrent=4,max_retries=1"
    arguments += f",tokenizer={checkpoint},tokenizer_backend={tokenizer}"
    command = [PYTHON / "lm-eval", "run", "--model", model, "--model_args", arguments, "--include_path", tmp_path]
    await served.program.run(*command, "--tasks", ",".join(tasks), *options, "--output_path", tmp_path / "results.json")
    scores = _results(tmp_path)
    found = {name: score.get("acc,none", score.get("exact_match,none")) for name, score in scores.items()}
    assert found == dict.fromkeys(tasks, 1.0), scores


def _results(folder: Path) -> dict[str, dict[str, float]]:
    """Read the results that lm-eval has written; the file's name contains the time."""
    (written,) = folder.glob("results_*.json")
    return json.loads(written.read_text())["results"]
