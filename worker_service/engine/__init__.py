"""The thread that computes: plans go in by a queue and results come back by callbacks. Importing this loads no torch.

`tracing.py` hears of each step from it, and needs the extra `tracing`.
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
