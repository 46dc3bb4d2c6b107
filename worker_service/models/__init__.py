"""Models: checkpoints to hidden states to logits. They know nothing of paging."""

from worker_service.models.config import ModelConfig
from worker_service.models.loading import load_model
from worker_service.models.model import Attend, Model

__all__ = ["Attend", "Model", "ModelConfig", "load_model"]
