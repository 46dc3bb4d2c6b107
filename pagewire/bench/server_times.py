"""Reads the times that a server has measured itself from its /metrics."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from pagewire.errors import CommandError

TIMEOUT_S = 10.0
# No proxy: who reads the metrics of a server stands beside it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Total:
    """The sum and the number of many observations. A sum of times is in seconds."""

    sum: float = 0.0
    count: float = 0.0

    def since(self, before: "Total") -> "Total":
        return Total(self.sum - before.sum, self.count - before.count)

    def plus(self, other: "Total") -> "Total":
        return Total(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """The mean. Raises ValueError if nothing was observed."""
        if not self.count:
            raise ValueError("nothing was observed")
        return self.sum / self.count


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Times since the server's start: of steps on the worker, and of first and later tokens as the scheduler made them
    known."""

    steps: Total = Total()
    first_tokens: Total = Total()
    later_tokens: Total = Total()
    plan_bytes: Total = Total()
    num_output_tokens: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of all steps, by what the worker did

    def since(self, before: "ServerTimes") -> "ServerTimes":
        return ServerTimes(
            self.steps.since(before.steps),
            self.first_tokens.since(before.first_tokens),
            self.later_tokens.since(before.later_tokens),
            self.plan_bytes.since(before.plan_bytes),
            self.num_output_tokens - before.num_output_tokens,
            {name: seconds - before.parts.get(name, 0.0) for name, seconds in self.parts.items()},
        )

    def plus(self, other: "ServerTimes") -> "ServerTimes":
        return ServerTimes(
            self.steps.plus(other.steps),
            self.first_tokens.plus(other.first_tokens),
            self.later_tokens.plus(other.later_tokens),
            self.plan_bytes.plus(other.plan_bytes),
            self.num_output_tokens + other.num_output_tokens,
            {name: self.parts.get(name, 0.0) + seconds for name, seconds in other.parts.items()},
        )


def read(url: str) -> ServerTimes:
    """Returns the times at a /metrics url. Raises CommandError if no server answers there, or no Pagewire."""
    try:
        with _OPENER.open(url, timeout=TIMEOUT_S) as response:
            return parse(response.read().decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = f"cannot read the metrics at {url}: {reason}; give the address that the server logs at its start"
        raise CommandError(text) from None


def parse(text: str) -> ServerTimes:
    """Returns the times in Prometheus' text form. Raises ValueError where a metric is missing."""
    values: dict[str, float] = {}
    parts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            if sample.name == "pagewire:step_part_seconds_total":
                parts[sample.labels["part"]] = sample.value

    def total(name: str) -> Total:
        return Total(_value(values, f"{name}_sum"), _value(values, f"{name}_count"))

    return ServerTimes(
        steps=total("pagewire:step_duration_seconds"),
        first_tokens=total("vllm:time_to_first_token_seconds"),
        later_tokens=total("vllm:inter_token_latency_seconds"),
        plan_bytes=total("pagewire:plan_bytes"),
        num_output_tokens=_value(values, "vllm:generation_tokens_total"),
        parts=parts,
    )


def _value(values: dict[str, float], name: str) -> float:
    if name not in values:
        raise ValueError(f"it has no {name}, so it is no Pagewire scheduler of this version")
    return values[name]
