"""The verbs that run services: serve, scheduler, frontend, worker. A service is imported only when its verb runs."""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire import installation, options
from pagewire.cli.command import VERBS
from pagewire.common.process import garbage_collection
from pagewire.common.process.child_process import (
    EXIT_REFUSED,
    announce_ready,
    announce_refusal,
    exit_with_parent,
    is_child,
    python_command,
)
from pagewire.common.process.event_loop import few_events_loop
from pagewire.common.process.shutdown import run_to_completion, stops
from pagewire.common.wire.transport.addresses import UNIX_SCHEME, join
from pagewire.common.wire.transport.listening import check_port
from pagewire.hosting import freed_memory, logs
from pagewire.hosting.model_source import (
    MISSING,
    DownloadError,
    LocatedModel,
    ModelSourceConfig,
    ModelSourceError,
    locate,
)
from pagewire.hosting.runtime_directory import RuntimeDirectory
from pagewire.hosting.supervisor import Supervisor, child_environ

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# The interval in seconds after which threads that process clients' texts release the interpreter lock to the event
# loop. A loop that makes system calls waits for the lock after each call.
_SWITCH_INTERVAL_S = 0.0005
# The groups of options in `--help`, in order of importance. tests/contract/test_options.py verifies that every option
# belongs to exactly one group.
MOST_USED = "most used"

GROUPS: dict[str, tuple[str, ...]] = {
    MOST_USED: (
        "worker",
        "scheduler",
        "host",
        "port",
        "socket",
        "http_port",
        "device",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_memory",
        "swap_space",
    ),
    "model": ("model", "revision", "served_model_name", "chat_template", "load_format", "quantization", "calibrate"),
    "memory and KV cache": (
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "block_size",
        "num_device_blocks",
        "num_host_blocks",
        "enable_prefix_caching",
        "max_retention_seconds",
        "preemption",
        "watermark",
    ),
    "scheduling": (
        "policy",
        "max_wait",
        "retention",
        "max_num_batched_tokens",
        "max_decode_slowdown",
        "max_lease_ms",
        "pipeline_depth",
    ),
    "computing": (
        "num_threads",
        "cpu_products",
        "attention_backend",
        "max_graph_batch_size",
        "max_graph_tokens",
        "tensor_parallel_size",
        "tensor_parallel_rank",
        "tensor_parallel_address",
    ),
    "queues and timeouts": (
        "max_waiting_requests",
        "max_waiting_tokens",
        "max_tenant_waiting_requests",
        "max_prompt_bytes",
        "max_waiting_text_bytes",
        "worker_timeout",
        "worker_grace",
        "drain_timeout",
        "detached_retention",
        "max_detached_bytes",
        "max_kv_event_bytes",
    ),
    "OpenAI API": (
        "http_host",
        "allowed_origins",
        "allowed_hosts",
        "any_model_name",
        "lenient",
        "strict_tools",
        "tool_call_parser",
        "reasoning_parser",
    ),
    "tenants and TLS": (
        "api_key",
        "tenants",
        "scheduler_api_key_file",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "tls_client_names",
        "link_secret_file",
        "worker_tls_ca",
        "worker_tls_cert",
        "worker_tls_key",
        "worker_tls_name",
        "worker_http_proxy",
        "scheduler_tls_ca",
        "scheduler_tls_cert",
        "scheduler_tls_key",
        "scheduler_tls_name",
        "scheduler_http_proxy",
    ),
    "logs, metrics, traces and health": (
        "log_level",
        "log_format",
        "log_requests",
        "termination_log",
        "metrics_host",
        "metrics_port",
        "otlp_traces_endpoint",
        "health_host",
        "health_port",
        "record",
        "profile",
        "profile_dir",
    ),
}
# The groups for a local server that serves only the process that started it. `pagewire run` renders the chat itself.
OWN_GROUPS = {
    title: tuple(name for name in GROUPS[title] if name not in ("host", "port", "http_port", "chat_template"))
    for title in (MOST_USED, "model", "memory and KV cache", "scheduling", "computing")
}
# The starting process sends no credentials, so a local server must not require any.
API_OPTIONS = GROUPS["tenants and TLS"]
# `serve` connects the scheduler and the worker over private sockets, so these options do not apply there.
LINK_OPTIONS = (
    "worker",
    "socket",
    "tensor_parallel_rank",
    "tensor_parallel_address",
    "link_secret_file",
    "worker_tls_ca",
    "worker_tls_cert",
    "worker_tls_key",
    "worker_tls_name",
    "worker_http_proxy",
    "tls_client_names",
)
# Flags of earlier releases, which started a separate server for the OpenAI API.
GATEWAY_FLAGS = ("--gateway", "--gateway-host", "--gateway-port", "--gateway-metrics-port")


def serve(arguments: Sequence[str]) -> int:
    """Run the command `pagewire serve`, and return its exit code. The scheduler runs in this process. Each
    tensor-parallel rank of the worker runs as a child process."""
    exit_with_parent()
    from scheduler_service.config import FrontEndConfig, SchedulerConfig
    from worker_service.config import WorkerConfig

    description = "Serve a model: a scheduler and its worker on this machine."
    known = serve_options()
    own = "`pagewire serve` connects the scheduler and the worker that it starts by itself"
    explained = {"--" + name.replace("_", "-"): own for name in LINK_OPTIONS}
    instead = "use the OpenAI API of `serve` (--http-port), or a router in front of several schedulers"
    explained |= dict.fromkeys(GATEWAY_FLAGS, f"{instead} (docs/openai.md)")
    parser = _parser("serve", description, known, explained)
    resolved = _resolve(parser, known, arguments)
    inner = {"health_port": 0, "host": LOOPBACK, "port": 0}
    link = {"tls_cert": None, "tls_key": None, "tls_client_ca": None, **inner}
    directory = RuntimeDirectory(os.environ)
    ranks = [_build(parser, resolved, WorkerConfig, **link, **rank) for rank in _ranks(resolved, directory.path)]
    addresses = ",".join(UNIX_SCHEME + rank.socket for rank in ranks)
    socket = str(directory.path / "scheduler")
    front_config = _build(parser, resolved, FrontEndConfig, scheduler=UNIX_SCHEME + socket, metrics_port=0, **inner)
    http = front_config.http
    own_socket = socket if http.http_port else None
    scheduler_config = _build(parser, resolved, SchedulerConfig, worker=addresses, socket=own_socket)
    if http.http_port:
        _check_http(parser, http, scheduler_config)
    log_config = _start_logging(known, resolved)
    with _errors_to_exit_codes():
        if http.http_port:
            check_port(http.http_host, http.http_port, "--http-port")
    found = _locate("serve", resolved, with_weights=True)
    scheduler_config = _with_directory(scheduler_config, found)
    ranks = [_with_directory(rank, found) for rank in ranks]
    from worker_service.startup.preflight import check_worker

    with _errors_to_exit_codes():
        check_worker(ranks[0], num_local_ranks=len(ranks))
    inherited = options.options_of(WorkerConfig, FrontEndConfig, ModelSourceConfig, logs.LogConfig)
    variables = [option.variable for option in inherited.values()]
    environ = child_environ(os.environ, [*variables, options.CONFIG_VARIABLE])
    children = []  # the worker's ranks come first
    for rank, config in enumerate(ranks):
        name = "worker" if len(ranks) == 1 else f"worker's rank {rank}"
        children.append(Supervisor(_command("worker", config, log_config), environ, name=name))
    if http.http_port:
        children.append(_front_end(_with_directory(front_config, found), log_config, environ))
    return asyncio.run(run_to_completion(_run(scheduler_config, children, directory)))


def _front_end(config: Any, log_config: logs.LogConfig, environ: Mapping[str, str]) -> Supervisor:
    scheme = "http" if config.tls_cert is None else "https"
    http_url = f"{scheme}://{join(config.http.http_host, config.http.http_port)}"
    command = _command("frontend", config, log_config)
    secrets = options.to_secret_variables(config)
    return Supervisor(command, {**environ, **secrets}, name="front end", on_ready=lambda _: announce_ready(http_url))


def _command(verb: str, config: Any, log_config: logs.LogConfig) -> list[str]:
    """Return the command line that starts a service as a child process. The command line has the subcommand `verb` and
    the settings of `config` as flags. The child ends together with this process."""
    flags = [*options.to_flags(config), *options.to_flags(replace(log_config, termination_log=""))]
    return python_command("pagewire", verb, *flags)


def serve_options() -> dict[str, options.Option]:
    """Return the command line options of `pagewire serve`, as a dict from option names to options."""
    from scheduler_service.config import HttpOptions, SchedulerConfig
    from worker_service.config import WorkerConfig

    configs = (SchedulerConfig, WorkerConfig, HttpOptions, ModelSourceConfig, logs.LogConfig)
    return options.options_of(*configs, without=LINK_OPTIONS)


def _check_http(parser: options.Parser, http: Any, scheduler_config: Any) -> None:
    """End `pagewire serve` with an error if the scheduler and the HTTP front end are configured to use the same
    port."""
    for flag, port in (("--port", scheduler_config.port), ("--metrics-port", scheduler_config.metrics_port)):
        if port == http.http_port:
            parser.error(f"{flag} and --http-port are both {port}; choose another for one of them")


def _ranks(resolved: options.Resolved, directory: Path) -> list[dict[str, Any]]:
    """Return a dict of options for each tensor-parallel rank of the worker, to start the rank as a child process.

    Each rank gets its own Unix socket in `directory`. If there are several ranks, a rank also gets its number, the
    address at which the ranks connect to each other, and its number of threads. By default, the ranks share the CPUs
    equally.
    """
    size = max(1, resolved.values["tensor_parallel_size"])
    sockets = [str(directory / f"rank-{rank}") for rank in range(size)]
    if size == 1:
        return [{"socket": sockets[0]}]
    from worker_service.startup.resources import num_usable_cpus

    num_threads = resolved.values["num_threads"] or max(1, num_usable_cpus() // size)
    shared = {"tensor_parallel_address": f"file:{directory}", "num_threads": num_threads}
    return [{"socket": path, "tensor_parallel_rank": rank, **shared} for rank, path in enumerate(sockets)]


def scheduler(arguments: Sequence[str]) -> int:
    """Run the command `pagewire scheduler`, and return its exit code. The scheduler connects to a worker that was
    started separately."""
    from scheduler_service.config import SchedulerConfig

    config = _service_config(
        "scheduler", "Run a scheduler for a worker that runs elsewhere.", SchedulerConfig, arguments
    )
    from scheduler_service import server

    return asyncio.run(run_to_completion(_serve(server.run, config)))


def frontend(arguments: Sequence[str]) -> int:
    """Run the command `pagewire frontend`, and return its exit code.

    The front end tokenizes and detokenizes for a scheduler that was started separately. As a child process of `pagewire
    serve`, the front end ends with that process.
    """
    exit_with_parent()
    from scheduler_service.config import FrontEndConfig

    config = _service_config(
        "frontend",
        "Run a front end: it tokenizes prompts and detokenizes outputs for a scheduler that runs elsewhere.",
        FrontEndConfig,
        arguments,
    )
    from scheduler_service import front_end

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=few_events_loop) as runner:
        return runner.run(run_to_completion(_serve(front_end.run, config)))


async def _serve(run: Callable[..., Coroutine[Any, Any, int]], config: Any) -> int:
    """Run a service until the process receives the first signal to stop. The service then finishes its running requests
    and ends. A second signal ends the service immediately. Return the exit code."""
    _configure_memory()
    stop, stop_now = stops()
    return await run(
        config, stop=stop, stop_now=stop_now, ready=announce_ready, num_log_lines_dropped=logs.num_dropped_lines
    )


def worker(arguments: Sequence[str]) -> int:
    """Run the command `pagewire worker`, and return its exit code. The worker waits for a scheduler that connects to
    it."""
    from worker_service.config import WorkerConfig

    description = "Run a worker: it has the weights and the KV cache, and computes the plans of a connected scheduler."
    config = _service_config("worker", description, WorkerConfig, arguments, with_weights=True)
    if config.tensor_parallel_size > 1 and config.tensor_parallel_address is None:
        from pagewire.hosting import worker_ranks

        with _errors_to_exit_codes():
            return worker_ranks.serve(config, arguments, _refuse)
    from worker_service import server

    freed_memory.share_small()
    garbage_collection.keep_short()
    with _errors_to_exit_codes():
        return server.serve(config, _refuse)


def _configure_memory() -> None:
    """Configure the C allocator and the garbage collector of this process for a service that stores many texts and
    tokens."""
    freed_memory.give_back_large()
    freed_memory.share_small()
    garbage_collection.keep_short()


@contextlib.contextmanager
def _errors_to_exit_codes() -> Iterator[None]:
    """Convert errors in the start of a service into exit codes, for the code inside a `with` block.

    A ValueError means that the process can never start, and ends the process with EXIT_REFUSED. An OSError may be
    temporary, and ends the process with exit code 1.
    """
    try:
        yield
    except ValueError as error:
        raise SystemExit(_refuse(str(error))) from error
    except OSError as error:
        log.critical("%s", error)
        raise SystemExit(1) from error


def _refuse(reason: str) -> int:
    """Report why this service can never start, and return the exit code EXIT_REFUSED.

    The reason goes to the supervising process if there is one, otherwise to the log.
    """
    reason = " ".join(reason.split())
    if is_child():
        announce_refusal(reason)
    else:
        log.critical("%s", reason)
    return EXIT_REFUSED


def _service_config(
    verb: str, description: str, config_type: type, arguments: Sequence[str], *, with_weights: bool = False
) -> Any:
    known = options.options_of(config_type, ModelSourceConfig, logs.LogConfig)
    parser = _parser(verb, description, known)
    resolved = _resolve(parser, known, arguments)
    config = _build(parser, resolved, config_type)
    _start_logging(known, resolved)
    return _with_directory(config, _locate(verb, resolved, with_weights=with_weights))


def _locate(verb: str, resolved: options.Resolved, *, with_weights: bool) -> LocatedModel:
    """Find the model checkpoint that the MODEL argument of a command names, and download it if necessary.

    Raise SystemExit for an error that a retry cannot fix. Missing packages are reported before any download starts.
    Raise DownloadError if the download fails.
    """
    reads_weights = with_weights and resolved.values["load_format"] != "dummy"
    try:
        if missing := installation.shortage(VERBS[verb].extra):
            raise ValueError(f"pagewire {verb} cannot run here: {missing}")
        if resolved.values.get("otlp_traces_endpoint") and (missing := installation.shortage("tracing")):
            raise ValueError(f"--otlp-traces-endpoint needs OpenTelemetry, but {missing}")
        return locate(resolved.values["model"], resolved.values["revision"], with_weights=reads_weights)
    except DownloadError:
        raise
    except (ModelSourceError, ValueError) as error:
        raise SystemExit(_refuse(str(error))) from error


def _with_directory(config: Any, found: LocatedModel) -> Any:
    """Return a service's config with the model directory set to the checkpoint that was found. If no served model name
    is configured, a Hugging Face model is served under its hub id."""
    changes = {"model": found.directory}
    if found.hub_id is not None and getattr(config, "served_model_name", "") is None:
        changes["served_model_name"] = found.hub_id
    return dataclasses.replace(config, **changes)


def _parser(
    verb: str,
    description: str,
    known: Mapping[str, options.Option],
    explained: Mapping[str, str] = types.MappingProxyType({}),
) -> options.Parser:
    epilog = (
        "Each flag can also be set as an environment variable (--max-num-seqs: PAGEWIRE_MAX_NUM_SEQS) or in the "
        "--config file. Flags override the environment, which overrides the file."
    )
    usage = f"pagewire {verb} MODEL [flags]"
    parser = options.Parser(
        prog=f"pagewire {verb}", usage=usage, description=description, epilog=epilog, explained=explained
    )
    options.add_flags(parser, known, positional="model", groups=GROUPS)
    options.add_foreign_flags(parser, known)
    return parser


def _resolve(parser: options.Parser, known: Mapping[str, options.Option], arguments: Sequence[str]) -> options.Resolved:
    parsed: argparse.Namespace = parser.parse_args(arguments)
    try:
        resolved = options.resolve(known, parsed, os.environ)
    except options.OptionError as error:
        parser.error(str(error))
    if not resolved.values["model"]:
        parser.error(MISSING)
    return _with_http_port(parser, resolved) if "http_port" in known else resolved


def _with_http_port(parser: options.Parser, resolved: options.Resolved) -> options.Resolved:
    """Return the options of `pagewire serve` with the port of the OpenAI API filled in. If the packages that the API
    needs are not installed, the port is 0, which turns the API off."""
    from scheduler_service.config import HTTP_PORT

    missing, port = installation.shortage("http"), resolved.values["http_port"]
    if port and missing:
        parser.error(f"--http-port needs an HTTP server, but {missing}")
    if port is not None:
        return resolved
    told = [f"the OpenAI API is not served: {missing}"] if missing and not installation.shortage("scheduler") else []
    values = {**resolved.values, "http_port": 0 if missing else HTTP_PORT}
    return replace(resolved, values=values, ignored=[*resolved.ignored, *told])


def _build(parser: options.Parser, resolved: options.Resolved, config_type: type, **overrides: Any) -> Any:
    config = resolved.build(config_type, **overrides)
    try:
        config.validate()
    except ValueError as error:
        parser.error(str(error))
    return config


def _start_logging(known: Mapping[str, options.Option], resolved: options.Resolved) -> logs.LogConfig:
    config: logs.LogConfig = resolved.build(logs.LogConfig)
    logs.configure(config)
    for line in [*resolved.ignored, *options.unknown_variables(known, os.environ)]:
        log.warning("%s", line)
    # The parent process has already logged the options of its child processes.
    level = logging.DEBUG if is_child() else logging.INFO
    for line in resolved.describe():
        log.log(level, "%s", line)
    log.debug("%s", resolved.describe_defaults())
    return config


async def _run(config: Any, children: Sequence[Supervisor], directory: RuntimeDirectory) -> int:
    """Run all services of `pagewire serve` until the first signal to stop, and return the exit code. Running requests
    are then finished. A second signal ends the services immediately.

    The runtime directory `directory` exists as long as the services run.
    """
    _configure_memory()
    stop, stop_now = stops()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(directory)
        except OSError as error:
            log.critical("%s", error)
            return 1
        return await _run_services(config, children, stop, stop_now)


async def _run_services(
    config: Any, children: Sequence[Supervisor], stop: asyncio.Event, stop_now: asyncio.Event
) -> int:
    """Run all services of `pagewire serve` until `stop` is set, and return the exit code. Running requests are then
    finished, unless `stop_now` is set.

    The front end ends after the scheduler, and the workers end last.
    """
    from scheduler_service import server

    serving = asyncio.create_task(
        server.run(
            config,
            stop=stop,
            ready=announce_ready,
            stop_now=stop_now,
            restart_worker=lambda rank, reason: children[rank].restart(reason),
            num_log_lines_dropped=logs.num_dropped_lines,
        )
    )
    supervising = [asyncio.create_task(child.run()) for child in children]
    try:
        await asyncio.wait({serving, *supervising}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return serving.result()
        given_up = next(task.result() for task in supervising if task.done())
        if given_up.code == EXIT_REFUSED:
            _refuse(given_up.reason)
        else:
            log.critical("%s", given_up.reason)
        stop.set()
        stop_now.set()
        await serving
        return given_up.code
    finally:
        for task in reversed(supervising):
            task.cancel()
            await asyncio.wait({task})
