"""The manifests are valid, agree with each other and with the program, and obey the security policy."""

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "base"
OVERLAYS = sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml"))
KUBERNETES_VERSION = "1.32"
READINESS_SERVICES = {
    "scheduler": "pagewire.scheduler.v1.SchedulerService",
    "worker": "pagewire.worker.v1.WorkerService",
}
CONFIGS = {
    "scheduler": ("scheduler_service.config", "SchedulerConfig"),
    "worker": ("worker_service.config", "WorkerConfig"),
}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def base_objects() -> list[dict[str, Any]]:
    kustomization = documents(BASE / "kustomization.yaml")[0]
    return [item for name in kustomization["resources"] for item in documents(BASE / name)]


def find(objects: list[dict[str, Any]], kind: str, component: str) -> dict[str, Any]:
    (found,) = [
        item for item in objects if item["kind"] == kind and item["metadata"]["name"] == f"pagewire-{component}"
    ]
    return found


def pod_of(component: str) -> dict[str, Any]:
    return find(base_objects(), "Deployment", component)["spec"]["template"]["spec"]


def container_of(component: str) -> dict[str, Any]:
    (container,) = pod_of(component)["containers"]
    return container


def flags_of(component: str) -> dict[str, str]:
    return dict(argument.removeprefix("--").split("=", 1) for argument in container_of(component)["args"])


def settings_of(component: str) -> set[str]:
    module, name = CONFIGS[component]
    return {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}


def overlay_worker(name: str) -> dict[str, Any]:
    return documents(DEPLOY / "overlays" / name / "worker.yaml")[0]["spec"]["template"]["spec"]


def rendered(overlay: Path) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on this machine to render the overlays with")
    result = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [document for document in yaml.safe_load_all(result.stdout) if document]


components = pytest.mark.parametrize("component", ["scheduler", "worker"])
overlays = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)


@pytest.mark.parametrize("manifest", base_objects(), ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_base_manifest_is_valid(manifest: dict[str, Any]) -> None:
    assert kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_validation_sees_a_misspelt_field() -> None:
    manifest = find(base_objects(), "Deployment", "worker")
    manifest["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@overlays
def test_rendered_overlay_is_valid(overlay: Path) -> None:
    objects = rendered(overlay)
    assert len(objects) == len(base_objects())
    for manifest in objects:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda path: path.name)
def test_every_file_is_named_by_its_kustomization_and_exists(folder: Path) -> None:
    kustomization = documents(folder / "kustomization.yaml")[0]
    named = kustomization["resources"] + [patch["path"] for patch in kustomization.get("patches", [])]
    for name in named:
        assert (folder / name).exists(), f"{folder.name}/kustomization.yaml names {name}, which does not exist"
    assert {path.name for path in folder.glob("*.yaml")} == {"kustomization.yaml"} | {
        Path(n).name for n in named if n.endswith(".yaml")
    }


@overlays
def test_patches_target_existing_objects_and_containers(overlay: Path) -> None:
    existing = {(item["kind"], item["metadata"]["name"]): item for item in base_objects()}
    for patch in documents(overlay / "kustomization.yaml")[0].get("patches", []):
        for document in documents(overlay / patch["path"]):
            target = existing[document["kind"], document["metadata"]["name"]]
            names = {container["name"] for container in target["spec"]["template"]["spec"]["containers"]}
            assert {container["name"] for container in document["spec"]["template"]["spec"]["containers"]} <= names


@components
def test_ports_agree(component: str) -> None:
    container, flags = container_of(component), flags_of(component)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["grpc"] == int(flags["port"])
    assert ports.get("metrics") == (int(flags["metrics-port"]) if "metrics-port" in flags else None)
    assert flags["host"] == "0.0.0.0", "the default, loopback, is out of reach for probes and Services"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc"]
    service = find(base_objects(), "Service", component)["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == ports
    assert all(port["targetPort"] in ports for port in service["ports"])
    assert [port["appProtocol"] for port in service["ports"] if port["name"] == "grpc"] == ["kubernetes.io/h2c"]
    exposed = re.search(r"^EXPOSE (.+)$", (DEPLOY / f"Dockerfile.{component}").read_text(), re.MULTILINE)
    assert exposed is not None
    assert sorted(map(int, exposed[1].split())) == sorted(ports.values())


def test_scheduler_dials_the_headless_service_of_the_worker() -> None:
    service = find(base_objects(), "Service", "worker")
    assert service["spec"]["clusterIP"] == "None"
    assert flags_of("scheduler")["worker"] == f"{service['metadata']['name']}:{flags_of('worker')['port']}"


@components
def test_probes_ask_for_served_health_services(component: str) -> None:
    container = container_of(component)
    assert container["livenessProbe"]["grpc"]["service"] == "liveness"
    assert container["readinessProbe"]["grpc"]["service"] == READINESS_SERVICES[component]
    module = importlib.import_module(f"protos.gen.pagewire.{component}.v1.{component}_pb2")
    assert [service.full_name for service in module.DESCRIPTOR.services_by_name.values()] == [
        READINESS_SERVICES[component]
    ]


def test_a_worker_may_load_for_30_minutes() -> None:
    probe = container_of("worker")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 30 * 60


@components
def test_selectors_match_the_pods(component: str) -> None:
    objects = base_objects()
    deployment = find(objects, "Deployment", component)["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"].items() <= labels
    assert find(objects, "Service", component)["spec"]["selector"].items() <= labels


def test_only_the_scheduler_reaches_the_worker() -> None:
    policy = find(base_objects(), "NetworkPolicy", "worker")["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"
    (rule,) = policy["ingress"]
    assert [peer["podSelector"]["matchLabels"] for peer in rule["from"]] == [
        {"app.kubernetes.io/component": "scheduler"}
    ]
    assert [port["port"] for port in rule["ports"]] == [int(flags_of("worker")["port"])]


@components
def test_one_replica_at_a_time(component: str) -> None:
    deployment = find(base_objects(), "Deployment", component)["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}


def test_grace_periods_add_up() -> None:
    pre_stop = {name: container_of(name)["lifecycle"]["preStop"]["sleep"]["seconds"] for name in CONFIGS}
    drain = int(flags_of("scheduler")["drain-timeout"])
    assert pod_of("scheduler")["terminationGracePeriodSeconds"] > pre_stop["scheduler"] + drain
    assert pre_stop["worker"] >= pre_stop["scheduler"] + drain, "the worker exits last"
    # A running step is finished first, and the scheduler waits up to 30 s for one.
    assert pod_of("worker")["terminationGracePeriodSeconds"] > pre_stop["worker"] + 30


@components
def test_pods_are_locked_down(component: str) -> None:
    pod, container = pod_of(component), container_of(component)
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
    assert mounts[flags_of(component)["model"]]["readOnly"] is True
    assert volumes[mounts["/model"]["name"]]["persistentVolumeClaim"]["readOnly"] is True
    assert set(container["resources"]) == {"requests", "limits"}


@overlays
def test_overlays_keep_the_lock_down_and_the_resources(overlay: Path) -> None:
    objects = rendered(overlay)
    for component in CONFIGS:
        pod = find(objects, "Deployment", component)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"] == pod_of(component)["securityContext"]
        assert container["securityContext"] == container_of(component)["securityContext"]
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        labels = find(objects, "Deployment", component)["spec"]["template"]["metadata"]["labels"].items()
        assert find(objects, "Service", component)["spec"]["selector"].items() <= labels


def test_cpu_overlay_has_a_thread_for_every_cpu_and_no_gpu() -> None:
    (container,) = overlay_worker("cpu")["containers"]
    environment = {variable["name"]: variable for variable in container["env"]}
    assert environment["OMP_NUM_THREADS"]["valueFrom"] == {"resourceFieldRef": {"resource": "limits.cpu"}}
    assert container["resources"]["limits"]["cpu"].isdigit(), "a fraction would be rounded up to one thread more"
    assert environment["PAGEWIRE_DEVICE"]["value"] == "cpu"
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_gpu_overlay_asks_for_one_gpu() -> None:
    pod = overlay_worker("gpu")
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu"]
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == "/dev/shm"
    assert {volume["name"]: volume["emptyDir"]["medium"] for volume in pod["volumes"]} == {mount["name"]: "Memory"}


@components
def test_every_flag_is_a_setting_of_the_program(component: str) -> None:
    assert {flag.replace("-", "_") for flag in flags_of(component)} <= settings_of(component)


@overlays
def test_every_variable_of_an_overlay_is_a_setting_of_the_worker(overlay: Path) -> None:
    (container,) = overlay_worker(overlay.name)["containers"]
    names = [variable["name"] for variable in container["env"]]
    settings = {name.removeprefix("PAGEWIRE_").lower() for name in names if name.startswith("PAGEWIRE_")}
    assert settings
    assert settings <= settings_of("worker")


@components
def test_help_of_the_command_knows_every_flag(component: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("pagewire.command")
    assert command.main([component, "--help"]) == 0
    known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    assert {f"--{flag}" for flag in flags_of(component)} <= known


@components
def test_image_runs_the_command_as_an_unprivileged_user(component: str) -> None:
    lines = (DEPLOY / f"Dockerfile.{component}").read_text().splitlines()
    instructions = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    assert [argument for name, argument in instructions if name == "USER"] == ["10001:10001"]
    final = max(index for index, (name, _) in enumerate(instructions) if name == "FROM")
    assert all(name != "RUN" for name, _ in instructions[final:]), "what is built is built in the first stage"
    extras = [argument for name, argument in instructions if name == "RUN" and "pip install" in argument]
    (installed,) = [shlex.split(command)[-1] for command in extras]
    assert installed == {"scheduler": "/src", "worker": "/src[worker]"}[component]
    assert container_of(component)["command"] == ["pagewire", component]
    assert ["ENTRYPOINT", '["pagewire"]'] in instructions


def test_images_see_everything_that_the_package_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    seen = {line.removeprefix("!") for line in lines if line.startswith("!")}
    project = (ROOT / "pyproject.toml").read_text()
    packages = re.search(r"^include = \[(.+)\]$", project, re.MULTILINE)
    assert packages is not None
    assert seen == {"pyproject.toml", "README.md", "LICENSE"} | {name.strip(' "*') for name in packages[1].split(",")}
