"""Tests of other projects' resource kinds and the Compose file against deploy/schemas, and of examples against the
program."""

import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pagewire import options
from pagewire.hosting import logs
from scheduler_service.config import HTTP_PORT, FrontEndConfig, HttpOptions, SchedulerConfig
from tests.project.manifests import (
    DEPLOY,
    OVERLAYS,
    ROOT,
    Manifest,
    container_of,
    documents,
    find,
    flags_of,
    load_all,
    parse_flags,
    rendered,
    selects,
)
from worker_service.config import WorkerConfig

SCHEMAS = DEPLOY / "schemas"
KSERVE = DEPLOY / "kserve"
KUBERNETES_VERSION = "1.32"


@functools.cache
def schema(kind: str) -> dict[str, Any]:
    (found,) = load_all((SCHEMAS / f"{kind}.yaml").read_text())
    return found


EXAMPLES = [*OVERLAYS, *sorted(KSERVE.iterdir())]


def manifests(example: Path) -> list[Manifest]:
    return rendered(example) if example.is_dir() else documents(example)


def has_schema(item: Manifest) -> bool:
    return (SCHEMAS / f"{item['kind']}.yaml").exists()


@functools.cache
def custom() -> list[Manifest]:
    return [item for example in EXAMPLES for item in manifests(example) if has_schema(item)]


@pytest.mark.parametrize("path", sorted(SCHEMAS.iterdir()), ids=lambda path: path.stem)
def test_schema_is_one_says_its_source_and_is_used(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(path.stem))
    assert re.match(
        r"Written after (\S+/\S+, \S+ at [0-9a-f]{12}|the documentation of \S+ \S+)", schema(path.stem)["$comment"]
    )
    assert path.stem == "compose" or path.stem in {item["kind"] for item in custom()}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_manifest_is_valid(example: Path) -> None:
    """Resource kinds unknown to kubernetes-validate have a schema here."""
    for item in manifests(example):
        if has_schema(item):
            jsonschema.validate(item, schema(item["kind"]))
        else:
            assert kubernetes_validate.validate(item, KUBERNETES_VERSION, strict=True)


def test_a_misspelt_field_is_seen() -> None:
    (scaled, *_) = [item for item in custom() if item["kind"] == "ScaledObject"]
    scaled = yaml.safe_load(yaml.safe_dump(scaled))
    scaled["spec"]["minReplicas"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplicas"):
        jsonschema.validate(scaled, schema("ScaledObject"))


# InferencePool and KServe.


def test_the_pool_is_of_the_front_ends_in_the_schedulers_pods() -> None:
    objects = rendered(DEPLOY / "overlays" / "inference-pool")
    pool = find(objects, "InferencePool", "")["spec"]
    template = find(objects, "StatefulSet", "scheduler")["spec"]["template"]
    assert selects(pool["selector"], template["metadata"]["labels"])
    scheduler, front_end = template["spec"]["containers"]
    flags = parse_flags(front_end["args"])
    assert [port["number"] for port in pool["targetPorts"]] == [int(flags["http-port"])]
    assert front_end["ports"] == [{"name": "http", "containerPort": int(flags["http-port"])}]
    route = find(objects, "HTTPRoute", "")["spec"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (
        "InferencePool",
        find(objects, "InferencePool", "")["metadata"]["name"],
    )
    (clients,) = find(objects, "NetworkPolicy", "http")["spec"]["ingress"]
    (picker,) = find(objects, "NetworkPolicy", "inference-pool")["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == [int(flags["http-port"])]
    assert [port["port"] for port in picker["ports"]] == [int(parse_flags(scheduler["args"])["metrics-port"])]


def test_the_front_end_beside_a_scheduler_is_one_of_those_in_front() -> None:
    pod = find(rendered(DEPLOY / "overlays" / "inference-pool"), "StatefulSet", "scheduler")["spec"]["template"]["spec"]
    scheduler, beside = pod["containers"]
    in_front = find(rendered(DEPLOY / "overlays" / "frontends"), "Deployment", "frontend")["spec"]["template"]["spec"]
    flags, others = parse_flags(beside["args"]), parse_flags(scheduler["args"])
    assert (beside["image"], beside["command"]) == (scheduler["image"], container_of(in_front)["command"])
    assert {name: flags[name] for name in ("model", "http-host", "http-port", "drain-timeout")}.items() <= flags_of(
        in_front
    ).items()
    assert flags["scheduler"] == f"127.0.0.1:{others['port']}"
    assert (flags["host"], flags["metrics-port"]) == ("127.0.0.1", "0"), "the scheduler's are the pod's"
    assert len({flags["port"], flags["http-port"], others["port"], others["metrics-port"]}) == 4
    assert_probes(beside, "http")


def assert_probes(container: Manifest, port: str | int) -> None:
    """Assert that HTTP probes use existing paths, and that liveness depends on no worker."""
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port}
    assert probes["readiness"]["path"] == "/health"
    assert probes["liveness"]["path"] == "/version"


def test_the_serving_runtime_is_a_pod_that_kubernetes_takes_and_a_command_that_we_know() -> None:
    (runtime,) = documents(KSERVE / "serving-runtime.yaml")
    spec = {key: runtime["spec"][key] for key in ("containers", "volumes")}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pagewire"}, "spec": spec}
    assert kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
    container = container_of(spec)
    assert container["name"] == "kserve-container", "KServe mounts the model there"
    assert container["command"] == ["env", "--block-signal=TERM", "pagewire", "serve"]
    flags = parse_flags(container["args"])
    known = options.options_of(SchedulerConfig, WorkerConfig, HttpOptions, logs.LogConfig)
    assert {name.replace("-", "_") for name in flags} <= set(known)
    assert container["ports"][0]["containerPort"] == int(flags["http-port"]) == HTTP_PORT
    assert_probes(container, HTTP_PORT)
    assert container["startupProbe"]["httpGet"]["path"] == "/health", "which waits for the worker"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (service,) = documents(KSERVE / "inference-service.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = {item["name"] for item in runtime["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > wait + int(flags["drain-timeout"])
    assert not {"runAsUser", "runAsGroup"} & set(container["securityContext"]), "clusters assign them"
    assert (flags["http-host"], flags["metrics-host"]) == ("::", "::")


# One machine


def compose() -> Manifest:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_file_is_valid() -> None:
    jsonschema.validate(compose(), schema("compose"))
    for service in compose()["services"].values():
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).exists()
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


def test_composed_services_find_each_other_and_no_other_finds_the_worker() -> None:
    services = compose()["services"]
    flags = {name: parse_flags(service["command"][1:]) for name, service in services.items()}
    assert flags["scheduler"]["worker"] == f"worker:{flags['worker']['port']}"
    assert flags["frontend"]["scheduler"] == f"scheduler:{flags['scheduler']['port']}"
    members = {
        name: {n for n, service in services.items() if name in service["networks"]} for name in compose()["networks"]
    }
    assert members == {"link": {"worker", "scheduler"}, "clients": {"scheduler", "frontend"}}
    assert compose()["networks"]["link"]["internal"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert "ports" not in services["worker"]
    assert services["frontend"]["ports"] == [f"127.0.0.1:{HTTP_PORT}:{flags['frontend']['http-port']}"]
    for name, own in flags.items():
        ours = {own["port"], own.get("http-port"), own.get("metrics-port")}
        assert {port.rpartition(":")[2] for port in services[name].get("ports", [])} <= ours


def test_composed_services_know_their_flags() -> None:
    services = compose()["services"]
    for name, config in (("scheduler", SchedulerConfig), ("worker", WorkerConfig), ("frontend", FrontEndConfig)):
        verb, *arguments = services[name]["command"]
        assert verb == name
        assert {flag.replace("-", "_") for flag in parse_flags(arguments)} <= set(options.options_of(config))


# The model

MODEL_OVERLAYS = ("model-claim", "model-hub", "model-bucket")
STORYTELLER = ROOT / "models" / "storyteller"


def pods_of(overlay: str) -> dict[str, Manifest]:
    objects = rendered(DEPLOY / "overlays" / overlay)
    return {name: find(objects, "Deployment", name)["spec"]["template"]["spec"] for name in ("scheduler", "worker")}


def verified(component: str, model: Path, sums: Path) -> bool:
    """Return the result of the pod's own check of a model directory."""
    (verify,) = [item for item in pods_of("model-claim")[component]["initContainers"] if item["name"] == "verify"]
    shell, flag, script = verify["command"]
    script = script.replace("/etc/model/", f"{sums}/").replace("/model", str(model))
    return subprocess.run([shell, flag, script], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("component", ["scheduler", "worker"])
def test_only_the_very_files_of_the_sums_are_served(component: str, tmp_path: Path) -> None:
    model, sums = tmp_path / "files", tmp_path / "sums"
    model.mkdir()
    sums.mkdir()
    (sums / "SHA256SUMS").write_bytes((DEPLOY / "components" / "model-digest" / "SHA256SUMS").read_bytes())
    for path in STORYTELLER.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    assert verified(component, model, sums)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert verified(component, model, sums) is (component == "scheduler"), "the scheduler reads no weights"
    weights.unlink()
    assert verified(component, model, sums) is (component == "scheduler")
    weights.write_bytes((STORYTELLER / weights.name).read_bytes())
    (model / "tokenizer.json").write_text("{}")
    assert not verified(component, model, sums)
    (sums / "SHA256SUMS").write_text("# none\n")
    assert not verified(component, model, sums), "no sums are no licence"


@pytest.mark.parametrize("overlay", MODEL_OVERLAYS)
def test_scheduler_and_worker_agree_on_the_sums(overlay: str) -> None:
    objects = rendered(DEPLOY / "overlays" / overlay)
    (sums,) = [item for item in objects if item["kind"] == "ConfigMap"]
    assert sums["data"]["SHA256SUMS"] == (DEPLOY / "components" / "model-digest" / "SHA256SUMS").read_text()
    name = sums["metadata"]["name"]
    assert re.fullmatch(r"pagewire-model-[a-z0-9]{10}", name), "other sums are another name, and start both pods again"
    for pod in pods_of(overlay).values():
        (volume,) = [item["configMap"] for item in pod["volumes"] if item["name"] == "sums"]
        assert volume["name"] == name
        *fetch, verify = pod["initContainers"]
        assert verify["name"] == "verify", "what was fetched is checked"
        assert [item["name"] for item in fetch] == ([] if overlay == "model-claim" else ["fetch"])
        sources = [item.get("valueFrom", {}) for container in fetch for item in container["env"]]
        settings = [source["configMapKeyRef"] for source in sources if "configMapKeyRef" in source]
        assert bool(settings) is bool(fetch)
        for setting in settings:
            assert setting["name"] == name
            assert setting["key"] in sums["data"]


@pytest.mark.parametrize("overlay", ["model-hub", "model-bucket"])
def test_the_scheduler_fetches_no_weights(overlay: str) -> None:
    for component, pod in pods_of(overlay).items():
        arguments = pod["initContainers"][0]["args"]
        left_out = {value for flag, value in itertools.pairwise(arguments) if flag == "--exclude"}
        assert {"*.bin", "*.pth", "*.gguf", "original/*"} <= left_out
        assert ("*.safetensors" in left_out) is (component == "scheduler")
        (volume,) = [item for item in pod["volumes"] if item["name"] == "model"]
        assert set(volume) == {"name", "emptyDir"}


def test_the_hubs_client_knows_the_arguments(tmp_path: Path) -> None:
    """Offline, the client reports that it cannot download. It would report unknown arguments first."""
    fetch = pods_of("model-hub")["scheduler"]["initContainers"][0]
    values = {"$(MODEL_ID)": "a/b", "$(MODEL_REVISION)": "0" * 40, "/model": str(tmp_path / "model")}
    arguments = [values.get(argument, argument) for argument in fetch["args"]]
    environ = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    program, verb = fetch["command"]
    command = [str(Path(sys.executable).parent / program), verb, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "offline" in done.stderr + done.stdout
