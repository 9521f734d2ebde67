"""Relocation of token slots on CUDA: one launch for all layers.

Works on slots and tensors, not on requests; `staged_copy` decides when copies run. There are two
implementations:

- *kernel*: one Triton launch over layers and tokens copies source slots to destination slots
  directly. Needs Triton and a device. Used only if no destination is a source, which is checked
  every time. Plans always satisfy this: a destination is dead or free, a source is live.
- *torch*: gathers and then scatters, layer by layer. The same code runs on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vtoken.base.arrays import Ints
from vtoken.base.errors import InvariantViolation
from vtoken.vllm.cuda.copies.staged_copy import StagedCopies
from vtoken.vllm.cuda.copies.streams import Streams
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.layout import slot_rows

if TYPE_CHECKING:  # the checks of a GPU without vLLM need this module, and not the core
    from vtoken.core.protocol.integrity import LayerBytes

Move = Callable[[torch.Tensor, torch.Tensor], None]
MAX_GATHERED_BYTES = 256 << 20  # of one chunk of the torch implementation


class TorchSlotCopy:
    """Moves slots with torch's index operations, on any device; `layers`: one [N * S, row] each."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = layers
        row = layers[0]
        self.chunk = max(1, MAX_GATHERED_BYTES // (row.shape[1] * row.element_size()))

    def __call__(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` [k] to `destination` [k] int64 in every layer.

        Within a chunk of `chunk` copies, all sources are read before a destination is written.
        """
        for start in range(0, len(source), self.chunk):
            end = start + self.chunk
            src, dst = source[start:end], destination[start:end]
            for rows in self._layers:
                rows.index_copy_(0, dst, rows.index_select(0, src))


class CUDACopyEngine:
    """Relocates token slots in stage order; `staged_copy` has the order and its proof.

    `caches`: one [N, H, S, C] a layer, in layout LBNHC (else UnsupportedError). `sync`: the host
    waits for every relocation; only for the ablation.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        streams: Streams,
        *,
        use_triton: bool,
        sync: bool = False,
    ) -> None:
        self._layers = [slot_rows(cache) for cache in caches]
        self._device, self._heads = caches[0].device, caches[0].shape[1]
        self._gathering = TorchSlotCopy(self._layers)
        self._direct: Move = self._gathering
        if use_triton:
            from vtoken.vllm.cuda.kernels import TritonSlotCopy

            self._direct = TritonSlotCopy(self._layers)
        self.stages = StagedCopies(streams, sync=sync)

    def copy(self, source: Ints, destination: Ints) -> int:
        """Launch the copies of `source` [k] to `destination` [k] in every layer.

        Returns the host's time for the launch in µs, not the device's. Raises InvariantViolation
        when destinations are sources too and there are more copies than one chunk gathers.
        """
        started = time.perf_counter_ns()
        self.stages.launch(partial(self._copy, source, destination))
        return (time.perf_counter_ns() - started) // 1000

    def contents(self, slots: Ints) -> Iterator[LayerBytes]:
        """The bytes of K and of V of the tokens in `slots` [n], in that order, layer by layer.

        Reads after copies that were launched; the host waits for both.
        """
        self.stages.guard()
        at = upload(slots, self._device)
        for rows in self._layers:
            kept = rows.index_select(0, at).view(len(slots), self._heads, 2, -1)
            yield _bytes(kept[:, :, 0]), _bytes(kept[:, :, 1])

    def _copy(self, source: Ints, destination: Ints) -> None:
        move = self._direct
        if not set(source.tolist()).isdisjoint(destination.tolist()):
            move = self._gathering
            if len(source) > self._gathering.chunk:
                raise InvariantViolation(
                    "I4", f"{len(source)} moves overwrite one another's sources"
                )
        move(*upload(np.stack([source, destination]), self._device))  # one transfer for both


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    out: npt.NDArray[np.uint8] = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return out
