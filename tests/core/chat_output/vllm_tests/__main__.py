"""Run vLLM's tests of its parsers against Pagewire's parsers, for the formats that both support.

    python -m tests.core.chat_output.vllm_tests FOLDER

FOLDER is the source distribution of vLLM 0.33.0. The run fails if a test fails for an unknown reason.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

_REASONING = (
    *("deepseekr1", "deepseekv3", "ernie45", "glm4_moe", "granite", "granite_thinking"),
    *("nemotron_v3", "olmo3", "qwen3", "step3"),
)
_TOOLS = (
    *("glm47_moe", "glm4_moe", "granite", "granite4", "hermes", "lfm2", "llama3_json", "llama4_pythonic", "olmo3"),
    *("phi4mini", "pythonic", "qwen3coder"),
)
# Reasons why tests fail, with a pattern of the tests' names. The first match counts.
_REASONS = {
    "the inside of their classes": (
        r"deepseekv3.*test_(parser_sel|deepseek_v4|identity|count)|test_count_reasoning_tokens|adjust_request"
        r"|regex_timeout|registry_structural_tag|uses_shared|multi_turn_still|template_(forces|honors)|namespace"
        r"|granite_thinking_streaming_(enable|strips|promotes|no_prom)|nemotron_v3_streaming_(promotes|no_prom)"
    ),
    "Granite 3.2 writes reasoning as prose, which is not read": r"test_granite_reasoning",
    "newlines beside tags are dropped": r"olmo3.*(newline|only_end_think|trailing_space)|new_line"
    r"|chunking_independent|granite4.*complex",
    "no reasoning is none, where theirs is an empty text": r"deepseekr1.*\[(shortest|empty)",
    "a call within reasoning that is never closed is reasoning": r"qwen3_reasoning.*tool_call",
    "their option moves reasoning into content": r"(force_nonempty|disabled|without_thinking)",
    "theirs fails by its own mark, and this passes": r"phi4mini",
    "quotes within quotes that are not escaped make text of a call": r"lfm2.*nested",
    "calls that are told again, behind their tag, are content": r"lfm2.*echoed",
    "a call that is cut or no JSON is told as far as it goes": r"invalid_json",
    "text and spaces beside a call stay": r"llama3_json.*simple|glm.*(whitespace_content|newline_format)",
}


def main(folder: str) -> int:
    """Run the tests in `folder` and return the exit status.

    Raises FileNotFoundError if a test file does not exist.
    """
    tests = [f"tests/reasoning/test_{name}_reasoning_parser.py" for name in _REASONING]
    tests += [f"tests/tool_parsers/test_{name}_tool_parser.py" for name in _TOOLS]
    for path in tests:
        Path(folder, path).stat()
    with tempfile.TemporaryDirectory() as directory:
        report, ini = Path(directory, "report.xml"), Path(directory, "pytest.ini")
        ini.write_text("[pytest]\n")
        plugins = ["-p", "stand_in", "-p", "no:cacheprovider", "-p", "no:asyncio"]
        options = [f"--rootdir={folder}", "-c", str(ini), f"--junitxml={report}", "-q", "--tb=no", "--no-summary"]
        paths = os.pathsep.join([folder, str(Path(__file__).parent)])
        command = [sys.executable, "-m", "pytest", *plugins, *options, *tests]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=False)
        return _explain(report)


def _explain(report: Path) -> int:
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    found = Counter(_reason(name) for name in failed)
    print(f"{len(cases)} tests, {len(failed)} failed")
    for reason, number in found.most_common():
        print(f"  {number:3} {reason or 'for no reason that is known'}")
    unknown = [name for name in failed if not _reason(name)]
    print("\n".join(unknown))
    return bool(unknown or not cases)


def _reason(name: str) -> str:
    return next((reason for reason, pattern in _REASONS.items() if re.search(pattern, name)), "")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
