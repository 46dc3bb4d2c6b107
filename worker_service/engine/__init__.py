"""The compute thread. Plans arrive by a queue, and results are returned by callbacks.

Importing this package does not import torch. `tracing.py` receives each finished step and needs the extra `tracing`.
"""

from worker_service.engine.engine import (
    Engine,
    EngineSession,
    LoadedWorker,
    Outcome,
    Runner,
    end_at_once,
    exit_process,
)

__all__ = [
    "Engine",
    "EngineSession",
    "LoadedWorker",
    "Outcome",
    "Runner",
    "end_at_once",
    "exit_process",
]
