"""Tests the Prometheus rules and the KEDA scaling query with promtool's unit tests in rules_test.yaml.

    python deploy/check_rules.py

The script needs promtool (Debian: apt-get install prometheus; or a release of Prometheus 2.42 or newer) and PyYAML.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent
RULES = DEPLOY / "components" / "monitoring" / "rules.yaml"
SCALED = DEPLOY / "overlays" / "keda" / "scaled-objects.yaml"
TESTS = DEPLOY / "rules_test.yaml"


def query() -> str:
    """Return the Prometheus query in KEDA's scaled object."""
    scheduler, _ = yaml.safe_load_all(SCALED.read_text())
    (trigger,) = scheduler["spec"]["triggers"]
    return trigger["metadata"]["query"]


def main() -> int:
    promtool = shutil.which("promtool")
    if promtool is None:
        print(
            "promtool is missing: apt-get install prometheus, or put a release's promtool on the PATH", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder, "rules.yaml")
        rules.write_text(yaml.safe_dump(yaml.safe_load(RULES.read_text())["spec"]))
        tests = Path(folder, TESTS.name)
        tests.write_text(TESTS.read_text().replace("'@keda@'", repr(query())))
        for command in (["check", "rules", str(rules)], ["test", "rules", str(tests)]):
            done = subprocess.run([promtool, *command], check=False)
            if done.returncode != 0:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
