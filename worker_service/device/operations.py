"""Chooses what a model computes with on a GPU."""

import logging

import torch

from worker_service.models.config import ModelConfig
from worker_service.models.operations import Operations

logger = logging.getLogger(__name__)


def create_device_operations(config: ModelConfig, device: torch.device) -> Operations:
    """The Triton kernels where there are any and they can compute the model, else plain torch, which is told."""
    try:
        # Only where it computes: the first import takes long.
        from worker_service.device.triton_operations import TritonOperations
    except ImportError as error:
        logger.warning("the model is computed in plain torch, which is slower: triton cannot be imported (%s)", error)
        return Operations()
    reason = TritonOperations.refusal(config)
    if reason is None:
        return TritonOperations(device)
    logger.warning("the model is computed in plain torch, which is slower: the Triton kernels %s", reason)
    return Operations()
