"""Tests that the dashboard and rules use only metrics and labels that the scheduler exports."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagewire.common.wire.transport.tls import DAYS_LEFT, SHARE_LEFT
from tests.project.exported_metrics import NAME, exported
from tests.project.manifests import DEPLOY, documents

pytestmark = pytest.mark.thorough

MONITORING = DEPLOY / "components" / "monitoring"
LABEL_USE = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"")


def dashboard() -> dict:
    return json.loads((MONITORING / "dashboard.json").read_text())


def rules() -> list[dict]:
    (manifest,) = documents(MONITORING / "rules.yaml")
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the location of each PromQL expression, and the expression."""
    for panel in dashboard()["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for rule in rules():
        yield rule.get("alert", rule.get("record", "")), rule["expr"]
    for scaled in documents(DEPLOY / "overlays" / "keda" / "scaled-objects.yaml"):
        triggers = [trigger["metadata"] for trigger in scaled["spec"]["triggers"] if trigger["type"] == "prometheus"]
        yield from (("keda", trigger["query"]) for trigger in triggers)


@pytest.mark.parametrize(("place", "expression"), list(expressions()), ids=[place for place, _ in expressions()])
def test_expression_asks_for_what_is_exported(place: str, expression: str) -> None:
    series = exported() | {rule["record"]: {"namespace", "model_name"} for rule in rules() if "record" in rule}
    names = set(NAME.findall(expression))
    assert names
    assert names <= set(series), f"{place} asks for {sorted(names - set(series))}, which is not exported"
    known = set.union(*(series[name] for name in names))
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(",")}
    assert set(LABEL_USE.findall(expression)) | grouped <= known
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_an_unknown_metric_would_be_noticed() -> None:
    assert "vllm:num_requests_waiting" in exported()
    assert "vllm:num_requests_wating" not in exported()


def test_values_are_read_as_what_they_are() -> None:
    """A counter is used in a rate or a comparison with another counter, and a histogram through its buckets."""
    for place, expression in expressions():
        for name in NAME.findall(expression):
            if name.endswith("_bucket"):
                assert "histogram_quantile" in expression, place
                assert re.search(r"\ble\b", expression), place
            elif name.endswith("_total") and place != "PagewireWithoutWorker":
                assert re.search(rf"(?:rate|increase)\({re.escape(name)}", expression), place


def test_alerts_say_what_is_wrong() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 0
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_a_certificate_is_told_of_when_the_log_warns_of_it() -> None:
    (alert,) = [rule for rule in rules() if rule.get("alert") == "PagewireCertificateEnds"]
    days, share = f"pagewire:certificate_days_left < {DAYS_LEFT:g}", f"pagewire:certificate_share_left < {SHARE_LEFT:g}"
    assert alert["expr"] == f"{days} and {share}"


def test_panels_do_not_overlap() -> None:
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard()["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_every_alert_and_record_has_a_unit_test() -> None:
    """deploy/check_rules.py runs the unit tests; promtool is not available on PyPI."""
    (cases,) = documents(DEPLOY / "rules_test.yaml")
    fired = {
        test["alertname"] for case in cases["tests"] for test in case.get("alert_rule_test", []) if test["exp_alerts"]
    }
    asked = {test["expr"] for case in cases["tests"] for test in case.get("promql_expr_test", [])}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}
    assert asked == {rule["record"] for rule in rules() if "record" in rule} | {"@keda@"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed; see deploy/check_rules.py")
def test_rules_pass_promtools_unit_tests() -> None:
    subprocess.run([sys.executable, DEPLOY / "check_rules.py"], check=True)
