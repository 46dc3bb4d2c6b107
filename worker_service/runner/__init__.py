"""The execution of a step, from plan to result. `profile.py` writes a trace of some steps."""

from worker_service.runner.model_runner import Computation, ModelRunner

__all__ = [
    "Computation",
    "ModelRunner",
]
