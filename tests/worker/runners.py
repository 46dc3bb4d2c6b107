"""Runners over a model, on the host and on a device."""

from pathlib import Path
from typing import Any

from torch import Tensor

from worker_service.attention import AttentionBackend
from worker_service.cache.cache_engine import CacheEngine
from worker_service.config import WorkerConfig
from worker_service.device.computation import DeviceComputation
from worker_service.device.kernels import Sampler
from worker_service.engine import LoadedWorker
from worker_service.epoch_grammars import EpochGrammars
from worker_service.host.computation import HostComputation
from worker_service.models.communicator import SingleRank
from worker_service.models.decoder import Decoder
from worker_service.rows.pooling import Pooler
from worker_service.rows.table import SequenceTable, TableLimits
from worker_service.runner import ModelRunner
from worker_service.startup.cpu_kernels import load_cpu_kernels
from worker_service.startup.loader import load_worker
from worker_service.streams import Device


def host_runner(
    model: Decoder,
    cache: CacheEngine,
    backend: AttentionBackend,
    limits: TableLimits,
    *,
    splits_steps: bool = True,
    grammars: EpochGrammars | None = None,
    gates_grammars: bool = False,
) -> ModelRunner:
    table = SequenceTable(limits, gates_grammars=gates_grammars)
    computation = HostComputation(model, cache.layers, backend, table, load_cpu_kernels(), Pooler(), _states(cache))
    return ModelRunner(computation, cache, SingleRank(), splits_steps, grammars)


def device_runner(
    model: Decoder,
    cache: CacheEngine,
    backend: AttentionBackend,
    sampler: Sampler,
    limits: TableLimits,
    device: Device,
    *,
    max_graph_batch_size: int = 0,
    max_graph_tokens: int = 0,
    splits_steps: bool = True,
    grammars: EpochGrammars | None = None,
) -> ModelRunner:
    table = SequenceTable(limits, gates_grammars=True)
    graphs = (max_graph_batch_size, max_graph_tokens)
    of_host = (sampler, table, device, Pooler(), *graphs, _states(cache))
    computation = DeviceComputation(model, cache.layers, backend, *of_host)
    return ModelRunner(computation, cache, SingleRank(), splits_steps, grammars)


def _states(cache: CacheEngine) -> Tensor | None:
    return cache.states if cache.num_device_states else None


def load(path: Path, **options: Any) -> LoadedWorker:
    return load_worker(WorkerConfig(model=str(path), device="cpu", **{"num_device_blocks": 200, **options}), "worker")
