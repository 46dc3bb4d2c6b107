"""Kinds of other projects, and the Compose file, against deploy/schemas; examples against the program."""

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
from pagewire.hosting.gateway import GatewayConfig
from scheduler_service.config import SchedulerConfig
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
    """Kinds that kubernetes-validate does not know have a schema here."""
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


def test_the_pool_is_of_the_gateways_in_the_schedulers_pods() -> None:
    objects = rendered(DEPLOY / "overlays" / "inference-pool")
    pool = find(objects, "InferencePool", "")["spec"]
    template = find(objects, "StatefulSet", "scheduler")["spec"]["template"]
    assert selects(pool["selector"], template["metadata"]["labels"])
    scheduler, gateway = template["spec"]["containers"]
    flags = parse_flags(gateway["args"])
    assert [port["number"] for port in pool["targetPorts"]] == [int(flags["port"])]
    assert gateway["ports"] == [{"name": "http", "containerPort": int(flags["port"])}]
    assert flags["worker-urls"] == f"grpc://127.0.0.1:{parse_flags(scheduler['args'])['port']}"
    assert flags["control-plane-api-keys"].endswith(":admin:$(ADMIN_KEY)")
    route = find(objects, "HTTPRoute", "")["spec"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (
        "InferencePool",
        find(objects, "InferencePool", "")["metadata"]["name"],
    )
    clients, picker = find(objects, "NetworkPolicy", "inference-pool")["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == [int(flags["port"])]
    assert [port["port"] for port in picker["ports"]] == [int(parse_flags(scheduler["args"])["metrics-port"])]


def test_the_gateway_beside_a_scheduler_has_the_flags_of_the_one_in_front() -> None:
    in_front = flags_of(
        find(rendered(DEPLOY / "overlays" / "smg"), "Deployment", "gateway")["spec"]["template"]["spec"]
    )
    template = find(rendered(DEPLOY / "overlays" / "inference-pool"), "StatefulSet", "scheduler")["spec"]["template"]
    beside = parse_flags(template["spec"]["containers"][1]["args"])
    own = {"worker-urls", "prometheus-host"}
    assert {name: value for name, value in in_front.items() if name in beside and name not in own} == {
        name: value for name, value in beside.items() if name not in own
    }


def test_the_serving_runtime_is_a_pod_that_kubernetes_takes_and_a_command_that_we_know() -> None:
    (runtime,) = documents(KSERVE / "serving-runtime.yaml")
    spec = {key: runtime["spec"][key] for key in ("containers", "volumes")}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pagewire"}, "spec": spec}
    assert kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
    container = container_of(spec)
    assert container["name"] == "kserve-container", "KServe mounts the model there"
    assert container["command"] == ["env", "--block-signal=TERM", "pagewire", "serve"]
    flags = parse_flags(container["args"])
    known = options.options_of(SchedulerConfig, WorkerConfig, GatewayConfig, logs.LogConfig)
    assert {name.replace("-", "_") for name in flags} <= set(known)
    assert container["ports"][0]["containerPort"] == int(flags["gateway-port"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == int(flags["gateway-port"])
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (service,) = documents(KSERVE / "inference-service.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = {item["name"] for item in runtime["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > wait + int(flags["drain-timeout"])
    assert not {"runAsUser", "runAsGroup"} & set(container["securityContext"]), "clusters assign them"
    assert (flags["gateway-host"], flags["metrics-host"]) == ("::", "::")


# One machine.


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
    assert flags["gateway"]["worker-urls"] == f"grpc://scheduler:{flags['scheduler']['port']}"
    members = {
        name: {n for n, service in services.items() if name in service["networks"]} for name in compose()["networks"]
    }
    assert members == {"link": {"worker", "scheduler"}, "clients": {"scheduler", "gateway"}}
    assert compose()["networks"]["link"]["internal"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert "ports" not in services["worker"]
    assert ":?" in flags["gateway"]["control-plane-api-keys"], "no gateway without a key"


def test_composed_services_know_their_flags() -> None:
    services = compose()["services"]
    for name, config in (("scheduler", SchedulerConfig), ("worker", WorkerConfig)):
        verb, *arguments = services[name]["command"]
        assert verb == name
        assert {flag.replace("-", "_") for flag in parse_flags(arguments)} <= set(options.options_of(config))
    in_front = flags_of(
        find(rendered(DEPLOY / "overlays" / "smg"), "Deployment", "gateway")["spec"]["template"]["spec"]
    )
    composed = parse_flags(services["gateway"]["command"][1:])
    assert set(composed) - {"worker-urls"} <= set(in_front)


# The model.

MODEL_OVERLAYS = ("model-claim", "model-hub", "model-bucket")
STORYTELLER = ROOT / "models" / "storyteller"


def pods_of(overlay: str) -> dict[str, Manifest]:
    objects = rendered(DEPLOY / "overlays" / overlay)
    return {name: find(objects, "Deployment", name)["spec"]["template"]["spec"] for name in ("scheduler", "worker")}


def verified(component: str, model: Path, sums: Path) -> bool:
    """Returns what the pod's own command says of a model's directory."""
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
    """Offline it says that it cannot fetch; of arguments that it does not know it would speak first."""
    fetch = pods_of("model-hub")["scheduler"]["initContainers"][0]
    values = {"$(MODEL_ID)": "a/b", "$(MODEL_REVISION)": "0" * 40, "/model": str(tmp_path / "model")}
    arguments = [values.get(argument, argument) for argument in fetch["args"]]
    environ = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    program, verb = fetch["command"]
    command = [str(Path(sys.executable).parent / program), verb, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "offline" in done.stderr + done.stdout
