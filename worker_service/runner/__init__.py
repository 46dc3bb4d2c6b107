"""A step from plan to result. `profile.py` puts a runner that also writes a trace of its steps around another."""

from worker_service.runner.model_runner import Computation, ModelRunner

__all__ = [
    "Computation",
    "ModelRunner",
]
