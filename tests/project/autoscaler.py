"""A simulation of the HorizontalPodAutoscaler that a ScaledObject creates, following Kubernetes' autoscaling/v2
documentation.

The metric is external with an average value, so the wanted number of replicas is total / target. Within a tolerance of
a tenth of the current number, nothing changes. A stabilization window uses its lowest recommendation for scaling up and
its highest for scaling down. Policies bound the change per period.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.1
SYNC_PERIOD = 15  # seconds between two evaluations
_LONGEST_WINDOW = 3600  # seconds; the maximum that Kubernetes allows
# Kubernetes' defaults for scaling up and down.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "scaleUp": {
        "stabilizationWindowSeconds": 0,
        "policies": [
            {"type": "Percent", "value": 100, "periodSeconds": 15},
            {"type": "Pods", "value": 4, "periodSeconds": 15},
        ],
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    },
}


@dataclass
class Autoscaler:
    """A HorizontalPodAutoscaler. `target` is the metric's value per replica. Times are in seconds and must increase."""

    target: float
    least: int
    most: int
    behavior: dict[str, Any]
    replicas: int
    recommendations: list[tuple[float, int]] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def of(cls, scaled_object: dict[str, Any], replicas: int = 1) -> "Autoscaler":
        spec = scaled_object["spec"]
        (trigger,) = spec["triggers"]
        target = float(trigger["metadata"].get("threshold", trigger["metadata"].get("value")))
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        return cls(target, spec["minReplicaCount"], spec["maxReplicaCount"], behavior, replicas)

    def look(self, now: float, total: float) -> int:
        """Evaluate the metric's total at time `now`, and return the new number of replicas."""
        ratio = total / (self.target * self.replicas)
        wanted = self.replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(total / self.target)
        self.recommendations = [(at, before) for at, before in self.recommendations if at > now - _LONGEST_WINDOW]
        self.recommendations.append((now, wanted))
        upwards = min(self._recommended("scaleUp", now))
        downwards = max(self._recommended("scaleDown", now))
        stable = upwards if self.replicas < upwards else downwards if self.replicas > downwards else self.replicas
        stable = min(max(stable, self.least), self.most)
        if stable > self.replicas:
            stable = min(stable, max(self._bounds("scaleUp", now, 1)))
        elif stable < self.replicas:
            stable = max(stable, min(self._bounds("scaleDown", now, -1)))
        if stable != self.replicas:
            self.changes.append((now, stable - self.replicas))
            self.replicas = stable
        return self.replicas

    def _setting(self, direction: str, name: str) -> Any:
        return self.behavior.get(direction, {}).get(name, _DEFAULTS[direction][name])

    def _recommended(self, direction: str, now: float) -> list[int]:
        """Return the recommendations within the window, always including the one of `now`."""
        window = self._setting(direction, "stabilizationWindowSeconds")
        return [wanted for at, wanted in self.recommendations if at > now - window or at == now]

    def _bounds(self, direction: str, now: float, sign: int) -> Iterable[int]:
        """Yield the limit that each policy sets for the number of replicas now."""
        for policy in self._setting(direction, "policies"):
            recent = sum(change for at, change in self.changes if at > now - policy["periodSeconds"])
            before = self.replicas - (recent if recent * sign > 0 else 0)
            step = policy["value"] if policy["type"] == "Pods" else math.ceil(before * policy["value"] / 100)
            yield before + sign * step


def num_turns(changes: Iterable[tuple[float, int]], since: float, until: float) -> int:
    """Return how often the direction of change reversed from `since` to `until`.

    The last change before `since` counts as the first direction.
    """
    turns, last = 0, 0
    for at, change in changes:
        if change * last < 0 and since <= at < until:
            turns += 1
        last = change
    return turns
