"""The grammars that outputs of an epoch must match: what plans add and release, and the thread that prepares them."""

from worker_service.grammars.compile_thread import Compile, CompileThread
from worker_service.grammars.epoch_grammars import EpochGrammars

__all__ = ["Compile", "CompileThread", "EpochGrammars"]
