"""Loading of models for tests that need no worker."""

from pathlib import Path
from typing import Any

from worker_service.models.decoder import Decoder
from worker_service.models.loading import prepare_model
from worker_service.models.weights import TensorProgress


def load_model(path: Path, *, progress: TensorProgress | None = None, **options: Any) -> Decoder:
    """Load a model, or one rank's part of it, ready to run.

    Args:
        progress: called after each tensor with (tensors loaded, total tensors).
        options: options of `prepare_model`.
    """
    return prepare_model(path, **options).load(progress)
