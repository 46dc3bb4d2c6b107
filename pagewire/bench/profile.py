"""The time profile of a single stream: on the worker, in the scheduler, and on the way to the client.

The same tokens are timed at three places: on the worker, when the scheduler publishes a token, and when the client
receives the token. The time between two places is the difference of their times. Requests with equally long prompts and
one output token separate the prefill steps from the decode steps.
"""

import urllib.request
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from pagewire.bench.run import RequestRecord
from pagewire.client.errors import CommandError

COLUMN = 46
TIMEOUT_S = 10.0
# Without a proxy, since the metrics port is read from the same machine or network.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Total:
    """The sum and the number of the observations of one metric. A sum of times is in seconds."""

    sum: float = 0.0
    count: float = 0.0

    def since(self, before: "Total") -> "Total":
        return Total(self.sum - before.sum, self.count - before.count)

    def plus(self, other: "Total") -> "Total":
        return Total(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """The mean of the observations. Raise ValueError if there are none."""
        if not self.count:
            raise ValueError("no observations")
        return self.sum / self.count


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Times in seconds that a server has accumulated since its start.

    `steps` has the durations of the worker's model steps. `first_tokens` has the times from the arrival of a request to
    its first token. `later_tokens` has the times between consecutive tokens of a request. For both, the scheduler reads
    the clock when it publishes a token.
    """

    steps: Total = Total()
    first_tokens: Total = Total()
    later_tokens: Total = Total()
    plan_bytes: Total = Total()
    num_output_tokens: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of all steps, by part of the step

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


def read_times(url: str) -> ServerTimes:
    """Read the accumulated times of a server from the URL of its Prometheus metrics.

    Raise CommandError if no server answers at the URL, or if the server is not a Pagewire scheduler.
    """
    try:
        with _OPENER.open(url, timeout=TIMEOUT_S) as response:
            return parse_times(response.read().decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = f"cannot read the metrics at {url}: {reason}; give the address that the server logs at its start"
        raise CommandError(text) from None


def parse_times(text: str) -> ServerTimes:
    """Parse the accumulated times of a server from Prometheus' text format. Raise ValueError if a metric is missing."""
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
        raise ValueError(f"the metric {name} is missing, so this is not a Pagewire scheduler of this version")
    return values[name]


@dataclass(frozen=True, slots=True)
class Profile:
    """The mean times of the first token and of each later token of a single response stream, in seconds. The times are
    measured at three places: the worker, the scheduler and the client. The difference between the times at two places
    can be negative because of measurement errors."""

    num_requests: int
    num_prefill_steps: float  # per request
    prefill: float  # per request, on the worker
    server_ttft: float
    client_ttft: float
    decode_step: float  # on the worker
    server_itl: float
    client_itl: float
    plan_bytes: float  # per step, on the wire
    prefill_parts: Mapping[str, float]  # per request on the worker, by part of the step
    decode_parts: Mapping[str, float]  # per decode step

    @property
    def admission(self) -> float:
        """The time in seconds from the arrival of a request at the scheduler to the first token, without the duration
        of the worker's steps."""
        return self.server_ttft - self.prefill

    @property
    def first_delivery(self) -> float:
        """The time for the request to reach the scheduler plus the time for the first token to reach the client, in
        seconds."""
        return self.client_ttft - self.server_ttft

    @property
    def between_steps(self) -> float:
        """The part of the time per output token in which the worker is idle, in seconds.

        This is the time to plan a step, to process its results, and to transmit the plan and the results. Work that
        overlaps with the worker's computation is not included.
        """
        return self.server_itl - self.decode_step

    @property
    def delivery(self) -> float:
        """The inter-token latency at the client minus the inter-token latency at the scheduler, in seconds. A constant
        network delay cancels out."""
        return self.client_itl - self.server_itl


def profile(prefill: ServerTimes, full: ServerTimes, records: Sequence[RequestRecord]) -> Profile:
    """Compute the time profile of a single stream from two kinds of requests. `prefill` has the server's times for
    requests with one output token. `full` has the times for the same number of requests with all output tokens.
    `records` has the timing of these full requests at the client.

    Raise CommandError if the server's token counts differ from the benchmark's, which means that other requests ran.
    """
    num_requests = len(records)
    num_tokens = sum(record.num_output_tokens for record in records)
    if (prefill.num_output_tokens, full.num_output_tokens) != (num_requests, num_tokens):
        raise CommandError(
            f"the server made {prefill.num_output_tokens:.0f} + {full.num_output_tokens:.0f} tokens during this "
            f"benchmark, not {num_requests} + {num_tokens}: --profile needs a server without other requests"
        )
    itls = [itl for record in records for itl in record.itls]
    ttfts = [record.ttft for record in records if record.ttft is not None]
    return Profile(
        num_requests=num_requests,
        num_prefill_steps=prefill.steps.count / num_requests,
        prefill=prefill.steps.sum / num_requests,
        server_ttft=full.first_tokens.mean,
        client_ttft=sum(ttfts) / len(ttfts),
        decode_step=full.steps.since(prefill.steps).mean,
        server_itl=full.later_tokens.mean,
        client_itl=sum(itls) / len(itls),
        plan_bytes=full.plan_bytes.mean,
        prefill_parts={name: seconds / num_requests for name, seconds in prefill.parts.items()},
        decode_parts={
            name: (seconds - prefill.parts.get(name, 0.0)) / (full.steps.count - prefill.steps.count)
            for name, seconds in full.parts.items()
        },
    )


def report(found: Profile) -> str:
    """Return the time profile as text tables: the first token, each later token, and the parts of the worker's
    steps."""
    steps = "step" if found.num_prefill_steps == 1 else "steps"
    first = [
        (f"worker ({found.num_prefill_steps:g} {steps})", found.prefill),
        ("queue, scheduler and wire to the worker", found.admission),
        ("request in, token out", found.first_delivery),
    ]
    later = [
        ("worker step", found.decode_step),
        ("scheduler and wire between steps", found.between_steps),
        ("delivery to the client", found.delivery),
    ]
    told = {name for parts in (found.prefill_parts, found.decode_parts) for name, time in parts.items() if time > 0.0}
    return "\n".join(
        [
            *_part(f"First token, mean of {found.num_requests} requests", first, found.client_ttft),
            *_part("Each token after it", later, found.client_itl),
            *_part("A prompt on the worker", _part_rows(found.prefill_parts, told), found.prefill, "steps"),
            *_part("A decode step on the worker", _part_rows(found.decode_parts, told), found.decode_step, "step"),
            f"A plan has {found.plan_bytes:.0f} bytes on the wire.",
        ]
    )


# The parts of a step that the worker reports; see `StepParts` in the proto.
PARTS = {
    "plan": "plan into the table of rows",
    "batch": "batch and attention's preparation",
    "products": "matrix products",
    "attention": "attention",
    "norms": "norms and residual",
    "rotary": "rotary embedding and cache write",
    "model": "rest of the model",
    "head": "head (logits)",
    "sampling": "sampling",
}


def _part_rows(parts: Mapping[str, float], told: Set[str]) -> list[tuple[str, float]]:
    """Return the rows (text, seconds) of a table that shows the parts of a worker's step. The table has a row for each
    part whose name is in `told`, even if the time of the part in `parts` is 0."""
    return [(text, parts.get(name, 0.0)) for name, text in PARTS.items() if name in told]


def _part(title: str, rows: Sequence[tuple[str, float]], total: float, place: str = "at the client") -> list[str]:
    return [
        f"{title:<{COLUMN}} {'ms':>9} {'%':>7}",
        *(
            f"  {name:<{COLUMN - 2}} {seconds * 1e3:9.3f} {100 * seconds / total:7.1f}"
            for name, seconds in [*rows, (place, total)]
        ),
    ]
