"""Prometheus metrics under vLLM's names, for existing dashboards and routers. Other names begin with `pagewire:`.

The step loop reports once per step, and the values are converted to Prometheus' format only at a scrape. A histogram
adds many equal observations in one operation, so that the cost of a step does not depend on its number of rows.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pagewire.common.wire.messages import GrammarKind, RowStatus, StepParts, StepResult, WorkerCapacity
from pagewire.common.wire.transport.tls import Life
from scheduler_service.core.request import (
    SESSION_AGES_S,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    EndReason,
    KvEventCounts,
    Request,
    SchedulerStats,
    SequenceEnd,
)
from scheduler_service.serving.activity import share
from scheduler_service.serving.observer import NON_FAILURES, Observer
from scheduler_service.serving.output import TokenCounts

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip  # noqa: E501
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PAUSE_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
_BYTES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 16_384, 65_536, 1_048_576, 8_388_608)

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time to first token.", _TTFT),
    "vllm:inter_token_latency_seconds": ("Time between two tokens of a sequence.", _ITL),
    "vllm:request_time_per_output_token_seconds": ("Mean time per output token, excluding the first.", _ITL),
    "vllm:e2e_request_latency_seconds": ("Time from arrival to end.", _LATENCY),
    "vllm:request_queue_time_seconds": ("Time in the queue before the first run.", _LATENCY),
    "vllm:request_prefill_time_seconds": ("Time from the first run to the first token.", _LATENCY),
    "vllm:request_decode_time_seconds": ("Time from the first token to the end.", _LATENCY),
    "vllm:request_inference_time_seconds": ("Time from the first run to the end.", _LATENCY),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "vllm:request_generation_tokens": ("Output tokens of a request.", _TOKENS),
    "vllm:iteration_tokens_total": ("Prompt and output tokens of a step.", _STEP_TOKENS),
    "pagewire:step_duration_seconds": ("Duration of a step on the worker.", _STEP_SECONDS),
    "pagewire:plan_bytes": ("Size of a plan on the wire, in bytes.", _BYTES),
    "pagewire:grammar_check_seconds": ("Time to compile a grammar that was not cached.", _PAUSE_SECONDS),
    "pagewire:gc_pause_seconds": ("Time for which a garbage collection paused the scheduler.", _PAUSE_SECONDS),
    "pagewire:gc_cpu_seconds": ("CPU time of a garbage collection.", _PAUSE_SECONDS),
}
# The latencies in GetLoads' answer, and their histograms.
_LATENCIES = {
    "time_to_first_token": "vllm:time_to_first_token_seconds",
    "time_per_output_token": "vllm:request_time_per_output_token_seconds",
    "queue_time": "vllm:request_queue_time_seconds",
}
NUM_RECENT = 1000
# Gauges: help text, and attribute of SchedulerStats.
_GAUGES = {
    "vllm:num_requests_running": ("Running sequences.", "num_running"),
    "vllm:num_requests_waiting": ("Waiting sequences.", "num_waiting"),
    "vllm:num_requests_swapped": ("Sequences that are swapped out or being swapped out or in.", "num_swapped"),
    "pagewire:device_blocks": ("Blocks in the device pool.", "num_device_blocks"),
    "pagewire:held_device_blocks": ("Device blocks allocated to sequences.", "num_held_blocks"),
    "pagewire:cached_device_blocks": ("Device blocks in the prefix cache.", "num_cached_blocks"),
    "pagewire:host_blocks": ("Blocks in the host pool.", "num_host_blocks"),
    "pagewire:held_host_blocks": ("Host blocks allocated to sequences.", "num_held_host_blocks"),
    "pagewire:cached_host_blocks": ("Host blocks in the prefix cache.", "num_cached_host_blocks"),
    "pagewire:device_states": ("States besides K and V in the device pool.", "num_device_states"),
    "pagewire:held_device_states": ("Device states allocated to sequences or being saved.", "num_held_states"),
    "pagewire:cached_device_states": ("Device states in the prefix cache.", "num_cached_states"),
}
# Gauges with the used share of a block pool: help text, and the attributes of SchedulerStats to divide.
_USAGES = {
    "vllm:kv_cache_usage_perc": (
        "Share of the device blocks that are allocated to sequences, 0 to 1.",
        "num_held_blocks",
        "num_device_blocks",
    ),
    "vllm:cpu_cache_usage_perc": (
        "Share of the host blocks that are allocated to sequences, 0 to 1.",
        "num_held_host_blocks",
        "num_host_blocks",
    ),
}
_COUNTERS = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the cache.", "num_prompt_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the cache.", "num_cached_prompt_tokens"),
    "vllm:prompt_tokens": ("Prompt tokens of sequences that have run.", "num_prompt_tokens"),
    "vllm:num_preemptions": ("Preemptions of requests.", "num_preemptions"),
    "pagewire:admitted_requests": ("Requests that have started to run.", "num_admitted_requests"),
    "pagewire:overdue_requests": ("Admitted requests that had waited longer than --max-wait.", "num_overdue_requests"),
}
# Counters with an additional label: help text, and name of the label.
_LABELLED_COUNTERS = {
    "pagewire:cached_prompt_tokens": ("Prompt tokens found in the cache, by tier.", "tier"),
    "pagewire:kept_session_tokens": (
        "Prompt tokens of a session's earlier requests that were still cached when it returned, by its idle time.",
        "age",
    ),
    "pagewire:lost_session_tokens": (
        "Prompt tokens of a session's earlier requests that had to be computed again, by its idle time.",
        "age",
    ),
    "pagewire:preemptions": ("Preemptions of requests, by the handling of their KV cache.", "kind"),
    "pagewire:moved_blocks": ("Blocks moved from device to host (out) and back (in).", "direction"),
    "vllm:request_success": ("Sequences that ended, by reason.", "finished_reason"),
    "pagewire:kv_events": ("Changes of the prefix cache, by kind.", "kind"),
    "pagewire:grammar_requests": ("Accepted requests with a grammar, by its kind.", "kind"),
    "pagewire:grammar_checks": ("Grammars compiled to be checked, by result.", "result"),
    "pagewire:step_part_seconds": ("Seconds of all steps on the worker, by part of the step.", "part"),
}
# Counters of output tokens: help text, and attribute of TokenCounts.
_TOKEN_COUNTERS = {
    "vllm:generation_tokens": (
        "Output tokens delivered to clients, also through front ends. With stop texts, counted at the request's end.",
        "num_kept",
    ),
    "pagewire:discarded_tokens": (
        "Output tokens computed but not delivered: after a stop text, and by beams that were not returned.",
        "num_discarded",
    ),
}
# Counters: help text, and attribute of Metrics.
_METRICS_COUNTERS = {
    "pagewire:invariant_failures": ("Violations of the scheduler's invariants.", "num_invariant_failures"),
    "pagewire:mask_seconds": ("Time that the worker took to compute grammar masks.", "mask_seconds"),
    "pagewire:late_rows": (
        "Rows that missed a step because their grammar mask was not ready in time.",
        "num_late_rows",
    ),
}
# Gauges: help text, and attribute of ServiceStats.
_SERVICE_GAUGES = {
    "pagewire:waiting_text_bytes": (
        "Bytes of clients' texts that wait to be processed.",
        "waiting_text_bytes",
    ),
    "pagewire:detached_bytes": ("Bytes retained for detached requests and responses.", "detached_bytes"),
    "pagewire:kv_event_bytes": ("Bytes of KV events retained for subscribers.", "kv_event_bytes"),
    "pagewire:unread_failures": (
        "Failures that are not delivered yet because clients of GenerateMany do not read them.",
        "num_unread_failures",
    ),
    "pagewire:waiting_grammar_bytes": ("Bytes of grammars that wait to be checked.", "waiting_grammar_bytes"),
    "pagewire:grammar_verdicts": (
        "Cached verdicts on grammars.",
        "num_grammar_verdicts",
    ),
}


# Counters: help text, and attribute of ServiceStats.
_SERVICE_COUNTERS = {
    "pagewire:worker_losses": ("Lost workers.", "num_worker_losses"),
    "pagewire:epochs": ("Epochs started.", "num_epochs"),
    "pagewire:log_lines_dropped": (
        "Log lines dropped because standard error was not read.",
        "num_log_lines_dropped",
    ),
}
# Metrics of a front end: help text, and attribute of FrontEndStats.
_FRONT_END_GAUGES = {
    "pagewire:frontend_connected": ("Whether the front end has a connection to its scheduler, 1 or 0.", "is_connected"),
    "pagewire:frontend_running_samples": ("Unfinished samples of its clients.", "num_running"),
    "pagewire:waiting_text_bytes": (_SERVICE_GAUGES["pagewire:waiting_text_bytes"][0], "waiting_text_bytes"),
    "pagewire:unread_failures": (_SERVICE_GAUGES["pagewire:unread_failures"][0], "num_unread_failures"),
}
_FRONT_END_COUNTERS = {
    "pagewire:frontend_generation_tokens": (
        "Output tokens delivered to its clients. The scheduler's vllm:generation_tokens_total includes them.",
        "num_generation_tokens",
    ),
    "pagewire:frontend_failed_requests": ("Failed requests of its clients.", "num_failed"),
    "pagewire:log_lines_dropped": _SERVICE_COUNTERS["pagewire:log_lines_dropped"],
}


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Statistics of the scheduler service, for its metrics, apart from the scheduler core's own statistics. They cover
    the worker, the memory of stored data, and dropped log lines. Sizes are in bytes."""

    capacity: WorkerCapacity | None = None  # of the connected worker, or of the last one
    num_worker_losses: int = 0
    num_epochs: int = 0
    num_kv_events: KvEventCounts = field(default_factory=Counter)
    num_log_lines_dropped: int = 0
    waiting_text_bytes: int = 0
    detached_bytes: int = 0
    kv_event_bytes: int = 0
    num_unread_failures: int = 0
    waiting_grammar_bytes: int = 0
    num_grammar_verdicts: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    certificate_validity: Mapping[str, Life] = field(default_factory=dict)  # by the flag that names the file


@dataclass(frozen=True, slots=True)
class FrontEndStats:
    """Statistics of a front end process, for its metrics. Sizes are in bytes."""

    model_name: str = ""
    is_connected: bool = False
    num_running: int = 0
    num_ended: Mapping[EndReason, int] = field(default_factory=dict)
    num_failed: int = 0
    num_generation_tokens: int = 0
    waiting_text_bytes: int = 0
    num_unread_failures: int = 0
    num_log_lines_dropped: int = 0
    certificate_validity: Mapping[str, Life] = field(default_factory=dict)  # by the flag that names the file


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=NUM_RECENT)  # the last values; the values of one call count once

    def observe(self, value: float, count: int = 1) -> None:
        self.recent.append(value)
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Return the buckets of the histogram in Prometheus' form, as pairs. Each pair contains an upper bound, and the
        number of all observations up to this bound."""
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


def _latency(ordered: Sequence[float]) -> dict[str, float]:
    """Return the fields of the message `Latency` for sorted values. Unlike the percentiles of a histogram's buckets,
    these percentiles are measured values."""
    count = len(ordered)
    p50, p99 = (ordered[count * percent // 100] for percent in (50, 99))
    return {"num_sequences": count, "mean": sum(ordered) / count, "p50": p50, "p99": p99}


class Metrics(Observer):
    """An observer of the step loop that collects the values of the scheduler's Prometheus metrics."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.num_ended = dict.fromkeys(EndReason, 0)
        self.num_invariant_failures = 0
        self.mask_seconds = 0.0
        self.num_late_rows = 0
        self.num_grammar_requests = {kind.name.lower(): 0 for kind in GrammarKind}
        self.num_grammar_checks = {"accepted": 0, "refused": 0}
        self._num_computed_prompt_tokens = 0
        # The total time of all steps on the worker, by part of the step, in microseconds.
        self.parts_us = dict.fromkeys((field.name for field in fields(StepParts)), 0)
        self._collection_began_at = 0.0, 0.0

    def latencies(self) -> dict[str, dict[str, float]]:
        """Return the latencies in GetLoads' answer by name. A latency without values is left out."""
        ordered = {name: sorted(self.histograms[metric].recent) for name, metric in _LATENCIES.items()}
        return {name: _latency(values) for name, values in ordered.items() if values}

    def collection(self, phase: str, info: dict[str, Any]) -> None:
        """Record the duration of a garbage collection, in wall time and CPU time. The function must be in
        `gc.callbacks`: Python then calls it at the start and the end of each collection."""
        if phase == "start":
            self._collection_began_at = time.perf_counter(), time.thread_time()
        else:
            self._observe("pagewire:gc_pause_seconds", time.perf_counter() - self._collection_began_at[0])
            self._observe("pagewire:gc_cpu_seconds", time.thread_time() - self._collection_began_at[1])

    @contextmanager
    def submission(self, request: Request, trace_headers: Mapping[str, str]) -> Iterator[Request]:
        yield request
        if request.grammar is not None:
            self.num_grammar_requests[request.grammar.kind.name.lower()] += 1

    def grammar_checked(self, seconds: float, is_good: bool) -> None:
        """Record the result of a grammar check: its duration in seconds, and whether the grammar is valid."""
        self._observe("pagewire:grammar_check_seconds", seconds)
        self.num_grammar_checks["accepted" if is_good else "refused"] += 1

    def step_finished(self, result: StepResult, num_computed_prompt_tokens: int) -> None:
        # All chunks of a prompt count in the step in which its sequence first runs.
        num_tokens = len(result.token_ids) + num_computed_prompt_tokens - self._num_computed_prompt_tokens
        self._observe("vllm:iteration_tokens_total", num_tokens)
        self._num_computed_prompt_tokens = num_computed_prompt_tokens
        self._observe("pagewire:step_duration_seconds", result.duration_us / 1e6)
        for name in self.parts_us:
            self.parts_us[name] += getattr(result.parts, name)
        self.mask_seconds += sum(result.mask_us) / 1e6
        self.num_late_rows += result.statuses.count(RowStatus.LATE)

    def first_token_after(self, seconds: float) -> None:
        self._observe("vllm:time_to_first_token_seconds", seconds)

    def tokens_after(self, seconds: float, num_tokens: int) -> None:
        self._observe("vllm:inter_token_latency_seconds", seconds, num_tokens)

    def plan_sent(self, num_bytes: int) -> None:
        self._observe("pagewire:plan_bytes", num_bytes)

    def invariant_failed(self) -> None:
        self.num_invariant_failures += 1

    def sequence_ended(self, request: Request, end: SequenceEnd, now: float) -> None:
        self.num_ended[end.reason] += 1
        if end.reason not in NON_FAILURES:
            return
        self._observe("vllm:e2e_request_latency_seconds", now - end.arrived_at)
        self._observe("vllm:request_prompt_tokens", end.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", end.num_output_tokens)
        if end.first_scheduled_at is None or end.first_token_at is None:
            return
        self._observe("vllm:request_queue_time_seconds", end.first_scheduled_at - end.arrived_at)
        self._observe("vllm:request_prefill_time_seconds", end.first_token_at - end.first_scheduled_at)
        self._observe("vllm:request_decode_time_seconds", now - end.first_token_at)
        self._observe("vllm:request_inference_time_seconds", now - end.first_scheduled_at)
        if end.num_output_tokens > 1:
            seconds = (now - end.first_token_at) / (end.num_output_tokens - 1)
            self._observe("vllm:request_time_per_output_token_seconds", seconds)

    def _observe(self, name: str, value: float, count: int = 1) -> None:
        self.histograms[name].observe(value, count)


class Labelled:
    """A base class of Prometheus collectors. Its methods create metrics with the labels of this process, such as the
    model's name."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}

    def _number(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float, **labels: str
    ) -> Metric:
        family = kind(name, text, labels=[*self._labels, *labels])
        family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def _metrics_of_table(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        table: Mapping[str, tuple[str, str]],
        source: object,
    ) -> Iterator[Metric]:
        """Yield one metric for each entry of a table. A key of the table is the metric's name. Its value is a pair: the
        help text, and the attribute of `source` that contains the metric's value."""
        for name, (text, field_name) in table.items():
            yield self._number(kind, name, text, getattr(source, field_name))

    def _certificates(self, lives: Mapping[str, Life]) -> Iterator[Metric]:
        now = time.time()
        for unit, text, left in (
            ("days", "Days until a certificate in use expires; negative after its expiry.", Life.days_left),
            ("share", "Remaining share of the validity period of a certificate in use.", Life.share_left),
        ):
            values = {flag: left(life, now) for flag, life in lives.items()}
            yield self._series(GaugeMetricFamily, f"pagewire:certificate_{unit}_left", text, "flag", values)

    def _series(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(name, text, labels=[*self._labels, label])
        for label_value, value in values.items():
            family.add_metric([*self._labels.values(), label_value], value)
        return family


class FrontEndCollector(Labelled, Collector):
    """A Prometheus collector for a front end process. At each scrape, it converts the front end's statistics to
    metrics."""

    def __init__(self, read_stats: Callable[[], FrontEndStats]) -> None:
        """Create the Prometheus collector of a front end. `read_stats` returns the front end's statistics. It must be
        thread-safe, because it is called on the threads of the metrics server and not on the event loop's thread."""
        super().__init__("")
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        self._labels["model_name"] = stats.model_name  # known once the front end is connected to its scheduler
        yield from self._metrics_of_table(GaugeMetricFamily, _FRONT_END_GAUGES, stats)
        yield from self._metrics_of_table(CounterMetricFamily, _FRONT_END_COUNTERS, stats)
        ended = {reason.value: stats.num_ended.get(reason, 0) for reason in NON_FAILURES}
        text = "Samples of the front end's clients that ended, by reason."
        yield self._series(CounterMetricFamily, "pagewire:frontend_ended_samples", text, "finished_reason", ended)
        yield from self._certificates(stats.certificate_validity)


class MetricsCollector(Labelled, Collector):
    """A Prometheus collector for a scheduler process. At each scrape, it converts the scheduler's statistics to
    metrics."""

    def __init__(
        self,
        metrics: Metrics,
        read_stats: Callable[[], SchedulerStats],
        model_name: str,
        read_service_stats: Callable[[], ServiceStats],
    ) -> None:
        """Create the Prometheus collector of a scheduler. `read_stats` and `read_service_stats` return the current
        statistics. They must be thread-safe, because they are called on the threads of the metrics server and not on
        the event loop's thread."""
        super().__init__(model_name)
        self._metrics = metrics
        self._read_stats = read_stats
        self._read_service_stats = read_service_stats

    def collect(self) -> Iterator[Metric]:
        stats, metrics, service = self._read_stats(), self._metrics, self._read_service_stats()
        yield from self._gauges(stats, service.capacity)
        yield from self._metrics_of_table(GaugeMetricFamily, _SERVICE_GAUGES, service)
        yield from self._metrics_of_table(CounterMetricFamily, _COUNTERS, stats)
        yield from self._metrics_of_table(CounterMetricFamily, _TOKEN_COUNTERS, service.tokens)
        for name, values in self._labelled(stats, service.num_kv_events).items():
            yield self._series(CounterMetricFamily, name, *_LABELLED_COUNTERS[name], values)
        yield from self._metrics_of_table(CounterMetricFamily, _METRICS_COUNTERS, metrics)
        yield from self._metrics_of_table(CounterMetricFamily, _SERVICE_COUNTERS, service)
        yield from self._certificates(service.certificate_validity)
        for name, histogram in metrics.histograms.items():
            family = HistogramMetricFamily(name, _HISTOGRAMS[name][0], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
            yield family

    def _gauges(self, stats: SchedulerStats, capacity: WorkerCapacity | None) -> Iterator[Metric]:
        yield from self._metrics_of_table(GaugeMetricFamily, _GAUGES, stats)
        for name, (text, held, whole) in _USAGES.items():
            yield self._number(GaugeMetricFamily, name, text, share(getattr(stats, held), getattr(stats, whole)))
        if capacity is not None:
            sizes = {
                "block_size": str(capacity.block_size),
                "num_gpu_blocks": str(capacity.num_device_blocks),
                "num_cpu_blocks": str(capacity.num_host_blocks),
            }
            yield self._number(
                GaugeMetricFamily,
                "vllm:cache_config_info",
                "Block size and numbers of blocks of the KV cache, as labels.",
                1,
                **sizes,
            )

    def _labelled(self, stats: SchedulerStats, num_kv_events: KvEventCounts) -> dict[str, Mapping[str, float]]:
        """Return the values of all counters that have a label of their own (`_LABELLED_COUNTERS`). The result maps the
        name of each counter to its counts, by label value."""
        metrics = self._metrics
        num_from_device = stats.num_cached_prompt_tokens - stats.num_host_cached_prompt_tokens
        num_recomputed = stats.num_preemptions - stats.num_swap_preemptions
        num_ended = {reason.value: metrics.num_ended[reason] for reason in NON_FAILURES}
        num_failed = sum(metrics.num_ended.values()) - sum(num_ended.values())
        return {
            "pagewire:cached_prompt_tokens": {"device": num_from_device, "host": stats.num_host_cached_prompt_tokens},
            "pagewire:kept_session_tokens": _by_age(stats.num_kept_session_tokens),
            "pagewire:lost_session_tokens": _by_age(stats.num_lost_session_tokens),
            "pagewire:preemptions": {"swap": stats.num_swap_preemptions, "recompute": num_recomputed},
            "pagewire:moved_blocks": {"out": stats.num_moved_blocks_out, "in": stats.num_moved_blocks_in},
            "vllm:request_success": {**num_ended, "error": num_failed},
            "pagewire:kv_events": {
                "stored": num_kv_events[BlockStored],
                "removed": num_kv_events[BlockRemoved],
                "cleared": num_kv_events[CacheCleared],
            },
            "pagewire:grammar_requests": metrics.num_grammar_requests,
            "pagewire:grammar_checks": metrics.num_grammar_checks,
            "pagewire:step_part_seconds": {name.removesuffix("_us"): us / 1e6 for name, us in metrics.parts_us.items()},
        }


def _by_age(values: tuple[int, ...]) -> dict[str, int]:
    """Return the token counts of sessions that returned, grouped by how long the session was idle. A key is the upper
    bound of the idle time in seconds, as text."""
    return dict(zip([*(f"{age:g}" for age in SESSION_AGES_S), "+Inf"], values, strict=True))
