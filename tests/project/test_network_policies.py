"""Tests of the allowed connections: the network policies name both sides."""

import ipaddress
from pathlib import Path

import pytest

from tests.project.manifests import (
    DEPLOY,
    WORKERS_RESOLVE_IN,
    Manifest,
    base_objects,
    container_of,
    find,
    flags_of,
    overlays,
    parse_flags,
    pod_templates,
    ports_of,
    rendered,
)

pytestmark = pytest.mark.thorough

CLIENTS = ["podSelector:pagewire-client=true", "namespaceSelector:pagewire-client=true"]
PROMETHEUS = "namespaceSelector:kubernetes.io/metadata.name=monitoring podSelector:app.kubernetes.io/name=prometheus"


def policy_of(objects: list[Manifest], component: str) -> Manifest:
    return find(objects, "NetworkPolicy", component)["spec"]


def ports(rule: Manifest) -> list[int]:
    """Return the ports of a rule, which has either one range of ports or single ports."""
    return [number for port in rule["ports"] for number in range(port["port"], port.get("endPort", port["port"]) + 1)]


def peers(rule: Manifest, direction: str) -> list[str]:
    """Return the peers of a rule: components, addresses, and labels of pods and namespaces."""
    found = []
    for peer in rule[direction]:
        if "ipBlock" in peer:
            found.append(peer["ipBlock"]["cidr"])
            continue
        labels = [(kind, dict(selector["matchLabels"])) for kind, selector in peer.items()]
        pods = dict(labels).get("podSelector", {})
        if pods.get("app.kubernetes.io/name") == "pagewire":
            found.append(pods["app.kubernetes.io/component"])
        else:
            found.append(" ".join(f"{kind}:{name}={value}" for kind, own in labels for name, value in own.items()))
    return found


@overlays
def test_every_rule_names_who_and_where(overlay: Path) -> None:
    for item in rendered(overlay):
        if item["kind"] == "NetworkPolicy":
            for side, direction in (("ingress", "from"), ("egress", "to")):
                for rule in item["spec"].get(side, []):
                    assert rule[direction], item["metadata"]["name"]
                    assert rule["ports"], item["metadata"]["name"]
                    everybody = {"0.0.0.0/0", "::/0"} & set(peers(rule, direction))
                    assert not everybody or item["metadata"]["name"] == "pagewire-model"


@pytest.mark.parametrize("overlay", ["model-hub", "model-bucket"])
def test_a_model_is_fetched_from_public_addresses_over_tls_and_from_nowhere_in_the_cluster(overlay: str) -> None:
    (rule,) = policy_of(rendered(DEPLOY / "overlays" / overlay), "model")["egress"]
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    blocks = [peer["ipBlock"] for peer in rule["to"]]
    assert [block["cidr"] for block in blocks] == ["0.0.0.0/0", "::/0"]
    private = [ipaddress.ip_network(network) for block in blocks for network in block["except"]]
    # Addresses of the cluster itself, and of the metadata service from which cloud machines get credentials.
    for address in (
        "10.1.2.3",
        "172.20.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "fd00:ec2::254",
        "fe80::1",
    ):
        assert any(ipaddress.ip_address(address) in network for network in private)


@overlays
def test_only_the_scheduler_and_other_ranks_reach_the_worker(overlay: Path) -> None:
    objects = rendered(overlay)
    pods = {component: template["spec"] for component, template in pod_templates(objects)}
    worker = policy_of(objects, "worker")
    rule, *from_ranks = worker["ingress"]
    assert peers(rule, "from") == ["scheduler"]
    dialled = sorted({int(address.rpartition(":")[2]) for address in flags_of(pods["scheduler"])["worker"].split(",")})
    assert ports(rule) == dialled
    if overlay.name == "multi-node":
        (from_rank,), (to_rank,) = from_ranks, worker["egress"]
        assert peers(from_rank, "from") == peers(to_rank, "to") == ["worker"]
        # gloo and NCCL choose any ports except privileged ones.
        assert from_rank["ports"] == to_rank["ports"] == [{"port": 1024, "endPort": 65535, "protocol": "TCP"}]
    else:
        assert (from_ranks, worker["egress"]) == ([], [])
    (to_worker,) = policy_of(objects, "scheduler")["egress"]
    assert peers(to_worker, "to") == ["worker"]
    assert to_worker["ports"] == rule["ports"]


def test_clients_and_prometheus_reach_the_scheduler() -> None:
    flags = flags_of(find(base_objects(), "Deployment", "scheduler")["spec"]["template"]["spec"])
    clients, prometheus = policy_of(base_objects(), "scheduler")["ingress"]
    assert peers(clients, "from") == ["router", "frontend", *CLIENTS]
    assert ports(clients) == [int(flags["port"])]
    assert peers(prometheus, "from") == [PROMETHEUS]
    assert ports(prometheus) == [int(flags["metrics-port"])]


def test_clients_and_prometheus_reach_a_front_end() -> None:
    objects = rendered(DEPLOY / "overlays" / "frontends")
    flags = flags_of(find(objects, "Deployment", "frontend")["spec"]["template"]["spec"])
    clients, prometheus = policy_of(objects, "frontend")["ingress"]
    assert peers(clients, "from") == ["router", *CLIENTS]
    assert ports(clients) == [int(flags["port"]), int(flags["http-port"])]
    assert (peers(prometheus, "from"), ports(prometheus)) == ([PROMETHEUS], [int(flags["metrics-port"])])


def test_clients_reach_the_front_ends_beside_schedulers() -> None:
    """With front ends as sidecars, a separate Service and policy lets clients connect, also when KEDA scales the
    pairs."""
    objects = rendered(DEPLOY / "overlays" / "keda")
    _, beside = find(objects, "StatefulSet", "scheduler")["spec"]["template"]["spec"]["containers"]
    (clients,) = policy_of(objects, "http")["ingress"]
    assert (peers(clients, "from"), ports(clients)) == (CLIENTS, [int(parse_flags(beside["args"])["http-port"])])
    (port,) = find(objects, "Service", "http")["spec"]["ports"]
    assert (port["targetPort"], [port["port"]]) == (beside["ports"][0]["name"], ports(clients))


def test_names_are_resolved_by_the_clusters_dns_by_openshifts_and_by_the_nodes_cache() -> None:
    cluster, openshift, node = find(base_objects(), "NetworkPolicy", "dns")["spec"]["egress"]
    assert peers(cluster, "to") == [
        "namespaceSelector:kubernetes.io/metadata.name=kube-system podSelector:k8s-app=kube-dns"
    ]
    assert peers(openshift, "to") == [
        "namespaceSelector:kubernetes.io/metadata.name=openshift-dns "
        "podSelector:dns.operator.openshift.io/daemonset-dns=default"
    ]
    # The address of NodeLocal DNSCache, and the address of kube-dns in kubeadm's clusters, where it also answers.
    assert peers(node, "to") == ["169.254.20.10/32", "10.96.0.10/32", "fd00::/8"]
    for rule, port in ((cluster, 53), (openshift, 5353), (node, 53)):
        assert rule["ports"] == [{"port": port, "protocol": "UDP"}, {"port": port, "protocol": "TCP"}]


@overlays
def test_a_pod_that_dials_a_name_may_resolve_it(overlay: Path) -> None:
    objects = rendered(overlay)
    (expression,) = find(objects, "NetworkPolicy", "dns")["spec"]["podSelector"]["matchExpressions"]
    dialling = {name for name, _ in pod_templates(objects) if name != "worker" or overlay.name in WORKERS_RESOLVE_IN}
    assert dialling <= set(expression["values"])
    assert ("worker" in expression["values"]) is (overlay.name in WORKERS_RESOLVE_IN)


def test_the_router_is_reached_by_clients_and_finds_our_schedulers_alone() -> None:
    objects = rendered(DEPLOY / "overlays" / "router")
    role = find(objects, "Role", "router")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    binding = find(objects, "RoleBinding", "router")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])
    pod = find(objects, "Deployment", "router")["spec"]["template"]["spec"]
    assert [subject["name"] for subject in binding["subjects"]] == [pod["serviceAccountName"]]
    (variable,) = [item for item in container_of(pod)["env"] if item["name"] == "ADMIN_KEY"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "pagewire-router", "key": "admin-key"}}, "not optional"
    flags = flags_of(pod)
    scheduler = find(objects, "Deployment", "scheduler")["spec"]["template"]
    selected = dict(pair.split("=") for pair in flags["selector"].split())
    assert selected == {"app.kubernetes.io/name": "pagewire", "app.kubernetes.io/component": "scheduler"}
    assert selected.items() <= scheduler["metadata"]["labels"].items()
    assert flags["service-discovery-port"] == flags_of(scheduler["spec"])["port"]
    clients, prometheus = policy_of(objects, "router")["ingress"]
    assert (peers(clients, "from"), ports(clients)) == (CLIENTS, [ports_of(pod)["http"]])
    assert (peers(prometheus, "from"), ports(prometheus)) == ([PROMETHEUS], [ports_of(pod)["metrics"]])
    to_schedulers, to_api = policy_of(objects, "router")["egress"]
    assert peers(to_schedulers, "to") == ["scheduler"]
    assert peers(to_api, "to") == ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"]
    assert ports(to_api) == [443, 6443]
