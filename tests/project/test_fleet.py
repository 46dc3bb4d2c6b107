"""Tests of pairs of schedulers and workers: their addresses, evictions, and their number under load."""

import math
import random
import re
from pathlib import Path

import pytest

from testing.seeds import seeded
from tests.project.autoscaler import SYNC_PERIOD, Autoscaler, num_turns
from tests.project.manifests import DEPLOY, Manifest, container_of, find, flags_of, overlays, pod_templates, rendered
from worker_service.config import WorkerConfig

pytestmark = pytest.mark.thorough

HOUR = 3600
ORDINAL = {
    "name": "ORDINAL",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}},
}


def objects_of(overlay: str) -> list[Manifest]:
    return rendered(DEPLOY / "overlays" / overlay)


def worker_addresses(objects: list[Manifest]) -> list[str]:
    """Return the worker addresses of the scheduler with this number."""
    pod = find(objects, "StatefulSet", "scheduler")["spec"]["template"]["spec"]
    assert ORDINAL in container_of(pod)["env"]
    return flags_of(pod)["worker"].split(",")


@pytest.mark.parametrize("overlay", ["pairs", "tensor-parallel", "keda"])
def test_scheduler_n_dials_worker_n(overlay: str) -> None:
    objects = objects_of(overlay)
    workers = find(objects, "StatefulSet", "worker")
    service = find(objects, "Service", "worker")
    assert workers["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "a name is there before the model is loaded"
    name, port = workers["metadata"]["name"], int(flags_of(workers["spec"]["template"]["spec"])["port"])
    num_ranks = int(flags_of(workers["spec"]["template"]["spec"]).get("tensor-parallel-size", "1"))
    host = f"{name}-$(ORDINAL).{service['metadata']['name']}"
    assert worker_addresses(objects) == [f"{host}:{port + rank}" for rank in range(num_ranks)]


@pytest.mark.parametrize("overlay", ["pairs", "tensor-parallel", "multi-node", "keda"])
def test_evicting_a_scheduler_or_a_worker_leaves_the_other(overlay: str) -> None:
    """Each kind of pod has its own controller and disruption budget, and no pod owns another pod."""
    objects = objects_of(overlay)
    owners = {
        name: [item["kind"] for item in objects if [name] == [component for component, _ in pod_templates([item])]]
        for name in ("scheduler", "worker")
    }
    assert owners["scheduler"] == ["StatefulSet"]
    assert owners["worker"] == (["LeaderWorkerSet"] if overlay == "multi-node" else ["StatefulSet"])
    for name in owners:
        budget = find(objects, "PodDisruptionBudget", name)["spec"]
        assert budget["selector"]["matchLabels"]["app.kubernetes.io/component"] == name


@overlays
def test_where_there_are_other_pairs_nothing_that_could_begin_there_waits_for_a_worker(overlay: Path) -> None:
    """A single scheduler lets requests wait for its worker, because no other scheduler could serve them."""
    for component, template in pod_templates(rendered(overlay)):
        if component == "scheduler":
            flags = flags_of(template["spec"])
            has_others = "$(ORDINAL)" in flags["worker"]
            assert flags.get("worker-grace") == ("5" if has_others else None)
            assert float(flags["worker-timeout"]) == 600
            probe = container_of(template["spec"])["readinessProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] <= 5, "and soon no endpoint leads to it"


@pytest.mark.parametrize("overlay", ["pairs", "tensor-parallel"])
def test_there_are_as_many_workers_as_schedulers(overlay: str) -> None:
    sets = [find(objects_of(overlay), "StatefulSet", name)["spec"] for name in ("scheduler", "worker")]
    assert {spec["replicas"] for spec in sets} == {2}
    assert {spec["podManagementPolicy"] for spec in sets} == {"Parallel"}


def test_ranks_of_one_pod_have_a_gpu_each_and_ports_that_follow_each_other() -> None:
    pod = find(objects_of("tensor-parallel"), "StatefulSet", "worker")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    size = flags_of(pod)["tensor-parallel-size"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == size, "one container sees all: else there is no NVLink"
    assert "tensor-parallel-rank" not in flags_of(pod)
    assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_ranks_on_several_nodes_are_a_group_whose_first_pod_is_rank_0() -> None:
    objects = objects_of("multi-node")
    group = find(objects, "LeaderWorkerSet", "worker")
    spec = group["spec"]["leaderWorkerTemplate"]
    assert "leaderTemplate" not in spec, "the leader is a rank as well"
    pod = spec["workerTemplate"]["spec"]
    flags = flags_of(pod)
    assert int(flags["tensor-parallel-size"]) == spec["size"]
    # The controller sets both variables in each container.
    assert flags["tensor-parallel-rank"] == "$(LWS_WORKER_INDEX)"
    ports = {port["name"]: port["containerPort"] for port in container_of(pod)["ports"]}
    assert flags["tensor-parallel-address"] == f"$(LWS_LEADER_ADDRESS):{ports['store']}"
    name = group["metadata"]["name"]
    pods = [f"{name}-$(ORDINAL)", *(f"{name}-$(ORDINAL)-{index}" for index in range(1, spec["size"]))]
    assert worker_addresses(objects) == [f"{pod}.{name}:{flags['port']}" for pod in pods]
    assert group["spec"]["replicas"] == find(objects, "StatefulSet", "scheduler")["spec"]["replicas"]


# Scaling.


def scaled(component: str) -> Manifest:
    return find(objects_of("keda"), "ScaledObject", component)


def test_apply_does_not_reset_what_is_scaled() -> None:
    """`apply` does not change a field that no manifest names."""
    objects = objects_of("keda")
    for component in ("scheduler", "worker"):
        target = scaled(component)["spec"]["scaleTargetRef"]
        found = find(objects, target["kind"], component)
        assert (target["apiVersion"], target["name"]) == (found["apiVersion"], found["metadata"]["name"])
        assert "replicas" not in found["spec"]


def test_a_pair_is_full_at_seven_tenths_of_what_runs_at_once() -> None:
    (trigger,) = scaled("scheduler")["spec"]["triggers"]
    pods = dict(pod_templates(objects_of("keda")))
    settings = [flags_of(pods[name]["spec"]).get("max-num-seqs") for name in ("scheduler", "worker")]
    assert settings == [None, None], "the worker's default decides"
    assert int(trigger["metadata"]["threshold"]) == math.floor(0.7 * WorkerConfig(model="m").max_num_seqs)
    assert trigger["metadata"]["ignoreNullValues"] == "false", "no answer is no reason to scale down"


def test_the_query_is_of_this_namespace_and_model() -> None:
    objects = objects_of("keda")
    (trigger,) = scaled("scheduler")["spec"]["triggers"]
    pod = find(objects, "StatefulSet", "scheduler")
    namespace, model = pod["metadata"]["namespace"], Path(flags_of(pod["spec"]["template"]["spec"])["model"]).name
    selectors = re.findall(r"\{([^}]*)\}", trigger["metadata"]["query"])
    assert selectors == [f'namespace="{namespace}", model_name="{model}"'] * 2
    assert re.findall(r"vllm:\w+", trigger["metadata"]["query"]) == [
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
    ]


def test_what_runs_asks_for_pairs_as_what_waits_does() -> None:
    """Running requests count, too. Before, 200 running and no waiting requests led to one pair."""
    autoscaler = Autoscaler.of(scaled("scheduler"))
    for look in range(20):
        replicas = autoscaler.look(look * SYNC_PERIOD, 200)
    assert replicas == 2


def loads(rng: random.Random, mean: float, hours: float, duration: float = 30.0) -> list[float]:
    """Return the number of requests in the system at each evaluation.

    Requests arrive at random and stay for `duration` seconds on average.
    """
    keep = math.exp(-SYNC_PERIOD / duration)
    spread = math.sqrt(mean)  # standard deviation of a Poisson distribution
    deviation, found = 0.0, []
    for _ in range(int(hours * HOUR / SYNC_PERIOD)):
        deviation = keep * deviation + math.sqrt(1 - keep * keep) * rng.gauss(0, spread)
        found.append(max(0.0, mean + deviation))
    return found


@pytest.mark.parametrize("pairs_worth", [0.5, 0.95, 1.0, 1.05, 1.1, 2.05, 3.1, 4.4, 7.7])
def test_a_steady_load_changes_direction_at_most_once_an_hour(pairs_worth: float) -> None:
    seed = 17
    print(f"seed {seed}")
    autoscaler = Autoscaler.of(scaled("scheduler"))
    curve = loads(random.Random(seed), pairs_worth * autoscaler.target, hours=6)
    for look, total in enumerate(curve):
        autoscaler.look(look * SYNC_PERIOD, total)
    starts = range(HOUR, 5 * HOUR + 1, 5 * 60)
    assert max(num_turns(autoscaler.changes, start, start + HOUR) for start in starts) <= 1
    assert autoscaler.replicas >= min(pairs_worth / 1.1, autoscaler.most), "each has its share, and the tolerance"


def test_without_windows_a_steady_load_would_flap() -> None:
    """Shows that the previous test would detect flapping."""
    scaled_object = scaled("scheduler")
    behavior = {name: {"stabilizationWindowSeconds": 0} for name in ("scaleUp", "scaleDown")}
    autoscaler = Autoscaler(179, 1, 8, behavior, 1)
    assert scaled_object["spec"]["maxReplicaCount"] == 8
    for look, total in enumerate(loads(random.Random(17), 1.05 * 179, hours=2)):
        autoscaler.look(look * SYNC_PERIOD, total)
    assert num_turns(autoscaler.changes, HOUR, 2 * HOUR) > 5


def test_a_day_of_load_gets_its_pairs_and_gives_them_back() -> None:
    """The load has a quiet night, a busy day, and a rush that triples the load within two minutes."""
    seed = 3
    rng = seeded(seed)
    schedulers, workers = Autoscaler.of(scaled("scheduler")), Autoscaler.of(scaled("worker"))
    short_since, longest, rush, most = 0.0, 0.0, 13 * HOUR, 0
    for look in range(24 * HOUR // SYNC_PERIOD):
        now = look * SYNC_PERIOD
        mean = 100 + 350 * max(0.0, math.sin(math.pi * (now / HOUR - 6) / 12))
        if rush <= now < rush + HOUR:
            mean *= 1 + 2 * min(1.0, (now - rush) / 120)
        total = rng.gauss(mean, math.sqrt(mean))
        pairs = workers.look(now, schedulers.look(now, total))
        assert abs(pairs - schedulers.replicas) <= 4, "workers follow within a look of how fast schedulers may come"
        most = max(most, pairs)
        short_since = short_since if total > 1.1 * schedulers.target * pairs else now
        longest = max(longest, now - short_since)
    assert most >= 1300 / 1.1 / schedulers.target, "what the rush takes, but for the tolerance"
    assert (schedulers.replicas, workers.replicas) == (1, 1)
    # During the growth of the rush, the following stabilization window of a minute, and two evaluations.
    assert longest <= 120 + 60 + 2 * SYNC_PERIOD


def test_workers_follow_schedulers_exactly() -> None:
    """The autoscaler's tolerance hides no missing pair, whatever the previous number was."""
    (trigger,) = scaled("worker")["spec"]["triggers"]
    assert (trigger["type"], trigger["metadata"]["value"]) == ("kubernetes-workload", "1")
    selected = dict(pair.split("=") for pair in trigger["metadata"]["podSelector"].split(","))
    labels = {name: template["metadata"]["labels"] for name, template in pod_templates(objects_of("keda"))}
    assert [name for name, own in labels.items() if selected.items() <= own.items()] == ["scheduler"]
    most = scaled("worker")["spec"]["maxReplicaCount"]
    assert most == scaled("scheduler")["spec"]["maxReplicaCount"]
    for before in range(1, most + 1):
        for wanted in range(1, most + 1):
            autoscaler = Autoscaler.of(scaled("worker"), before)
            for look in range(20):
                autoscaler.look(look * SYNC_PERIOD, wanted)
            assert autoscaler.replicas == wanted
