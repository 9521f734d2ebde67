"""Small tensors of signals that are the same in every step, uploaded when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from vtoken.policies.signals import Signal
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.worker.heads import RankHeads
from vtoken.vllm.worker.probe import divisor_of


class Constants:
    """Tensors on `device`, by what they are for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[Hashable, torch.Tensor] = {}

    def _get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def heads(self, own: Sequence[int] | None, num_heads: int) -> torch.Tensor:
        """The query heads `own` [c] int32; None: all of `num_heads`."""
        chosen = tuple(range(num_heads) if own is None else own)
        return self._get(chosen, lambda: upload(np.array(chosen, dtype=np.int32), self._device))

    def sinks(self, number: int, layer: AttentionLayer) -> torch.Tensor:
        """The sinks [Hq] float32 of layer `number`, -inf where there are none."""
        return self._get(number, lambda: layer.sink_logits)

    def weights(self, signal: Signal, heads: RankHeads, layer: AttentionLayer) -> torch.Tensor:
        """The share [Hkv] float32 of each KV head of `layer` in `signal`; 0: it is not read.

        A KV head is weighted by the number of query heads that read it.
        """

        def make() -> torch.Tensor:
            num_kv_heads = layer.key.shape[2]
            own = heads.own(signal, layer.num_heads)
            readers = np.array(range(layer.num_heads) if own is None else own, dtype=np.int64)
            counts = np.bincount(readers * num_kv_heads // layer.num_heads, minlength=num_kv_heads)
            shares = counts / divisor_of(signal, heads, layer.num_heads)
            return upload(shares.astype(np.float32), self._device)

        return self._get((signal, layer.key.shape[2]), make)
