"""The places in a step's packed upload from which the device reads the sampling parameters of the step's rows."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.sampling import SampledTokens, SamplingColumns, TokenTarget
from worker_service.device.staging import Upload
from worker_service.device.table import DeviceTable
from worker_service.rows import StepSampling


@dataclass(frozen=True, slots=True)
class PackedSampling:
    """The rows of `sampling`, in the upload."""

    sampling: StepSampling
    slots: slice
    num_tokens: slice
    write_slots: slice  # where the tokens go: those of rows that choose none to the scratch slot
    uncounted: slice  # what the sampler counts for tokens that rows do not take
    edits: dict[str, slice]  # as `StepSampling` has them

    @staticmethod
    def pack(sampling: StepSampling, upload: Upload, scratch_slot: int) -> "PackedSampling":
        return PackedSampling(
            sampling=sampling,
            slots=upload.add(sampling.slots),
            num_tokens=upload.add(sampling.num_tokens),
            write_slots=upload.add(np.where(sampling.keeps_no_token, scratch_slot, sampling.slots)),
            uncounted=upload.add(2 * (sampling.keeps_no_token & sampling.is_penalized)),
            edits={name: upload.add(column) for name, column in sampling.edits.items()},
        )

    @property
    def is_penalized(self) -> bool:
        return bool(self.sampling.is_penalized.any())

    def columns(self, packed: Tensor, table: DeviceTable) -> SamplingColumns:
        columns = table.sampling_columns(packed[self.slots], packed[self.num_tokens])
        return columns._replace(**{name: self._edit(name, packed) for name in self.edits})

    def _edit(self, name: str, packed: Tensor) -> Tensor:
        column = self.sampling.edits[name]
        bits = packed[self.edits[name]].view(column.shape)
        return bits.view(torch.float32) if column.dtype == np.float32 else bits

    def target(self, packed: Tensor, table: DeviceTable) -> TokenTarget:
        """Return where the tokens go."""
        slots = packed[self.write_slots]
        return table.target(slots, slots.new_empty(2, len(slots)))

    def uncount(self, sampled: SampledTokens, packed: Tensor, table: DeviceTable) -> None:
        """Take back what was counted for rows that do not take their tokens."""
        if self.is_penalized:
            counted = (packed[self.slots].long(), sampled.token_ids)
            table.token_counts[counted] = table.token_counts[counted] - packed[self.uncounted] * ~sampled.is_nan
