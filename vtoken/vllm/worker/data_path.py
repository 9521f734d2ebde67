"""The engine's operations on its cache, applied to a scratch cache for the self-test.

The layer, its implementation and its metadata builder are the engine's own. Only the cache is
replaced, in the same layout. A device adds its copy engine, its scores and how attention reads
holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.base.arrays import Ints, Ragged
from vtoken.core.protocol.mirror import Mirrors
from vtoken.core.protocol.step import StepPlan
from vtoken.vllm.worker.executor import PhysicalStep, RowsWithHoles
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.scores import Scores

NUM_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Read:
    """One request of a batch whose newest token is its only query.

    `blocks` [b]: its block table. `slots` [n]: its live tokens, the newest last. `how`: the request
    has evicted nothing ("positional"), its tokens fill the front of its blocks ("dense"), or it has
    holes, and a CPU packs it into borrowed blocks ("borrowed") or the side buffer ("buffered").
    """

    blocks: list[int]
    slots: Ints
    how: str


class DataPath:
    """Attention, store and copies over `cache` [NUM_BLOCKS, H, S, 2D].

    `scores`: the accumulators and signals over that cache.
    """

    scores: Scores
    block_size: int

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor) -> None:
        impl = layer.impl
        _, self.num_kv_heads, self.block_size, two_d = cache.shape
        self.head_size = two_d // 2
        self.num_heads = impl.num_heads
        self.scale = impl.scale
        self.soft_cap = float(impl.logits_soft_cap or 0.0)
        self.sinks: torch.Tensor | None = None if impl.sinks is None else impl.sinks.detach()
        self.dtype, self.device = cache.dtype, cache.device
        self.layer_number = impl.vtoken_layer
        self._layer, self._builder, self._cache = layer, builder, cache

    def relocate(self, source: Ints, destination: Ints) -> None:
        """Move tokens with the copy engine."""
        raise NotImplementedError

    def _present(self, step: PhysicalStep, common: CommonAttentionMetadata, plan: StepPlan) -> None:
        """Pass the step to attention; `common`: the batch as vLLM prepares it."""
        raise NotImplementedError

    def _clear(self) -> None:
        """End the step that was passed to attention."""
        raise NotImplementedError

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: Ints) -> None:
        """Write K and V [n, Hkv, D] to `slots` [n] with the backend's own operation."""
        at = self._uploaded(slots)
        self._layer.impl.do_kv_cache_update(self._layer, key, value, self._cache, at)

    def attend(
        self,
        query: torch.Tensor,
        reads: list[Read],
        borrowed: list[int],
        probed: Sequence[ProbedRequest] = (),
        plan: StepPlan | None = None,
    ) -> torch.Tensor:
        """Attention [R, Hq, D] of `query` [R, Hq, D], one token a request.

        `borrowed`: free blocks for packing. `probed`: the probed requests, whose scores `plan`
        requests.
        """
        common, output = self._common(reads), torch.empty_like(query)
        unused = query[:, : self.num_kv_heads]
        step = self._physical(reads, borrowed, probed)
        self._present(step, common, plan or StepPlan(0))
        try:
            metadata = self._builder.build(0, common)
            self._layer.impl.forward(
                *(self._layer, query, unused, unused, self._cache, metadata, output)
            )
        finally:
            self._clear()
        return output

    def _physical(
        self, reads: list[Read], borrowed: list[int], probed: Sequence[ProbedRequest]
    ) -> PhysicalStep:
        rows = [row for row, read in enumerate(reads) if read.how != "positional"]
        holes = np.flatnonzero([reads[row].how != "dense" for row in rows])
        if probed:
            mirrors = probed[0].mirror.mirrors
        else:
            mirrors = Mirrors.of({str(row): reads[row].slots for row in rows})
        index, of_mirrors = np.array(rows, dtype=np.int64), mirrors.rows_of([*map(str, rows)])
        return PhysicalStep(
            mirrors,
            index,
            of_mirrors,
            np.array([len(reads[row].slots) for row in rows], dtype=np.int64),
            np.stack([index, np.array([reads[row].slots[-1] for row in rows], dtype=np.int64)]),
            RowsWithHoles(
                *(index[holes], of_mirrors[holes], np.ones(len(holes), dtype=np.int64)),
                Ragged.joined(
                    borrowed if reads[row].how == "borrowed" else [] for row in index[holes]
                ),
            ),
            [*probed],
        )

    def _common(self, reads: list[Read]) -> CommonAttentionMetadata:
        """One new token a request, which attends to all of the request's live tokens."""
        table = np.zeros((len(reads), max(len(r.blocks) for r in reads) + 1), dtype=np.int32)
        for row, read in enumerate(reads):
            table[row, : len(read.blocks)] = read.blocks
        starts = np.arange(len(reads) + 1, dtype=np.int32)
        # Logical lengths, as the builder gets them from vLLM; after an eviction they are longer.
        lengths = np.array(
            [
                len(r.slots) if r.how == "positional" else len(r.blocks) * self.block_size
                for r in reads
            ],
            dtype=np.int32,
        )
        last = np.array([int(read.slots[-1]) for read in reads], dtype=np.int64)
        return CommonAttentionMetadata(
            query_start_loc=self._uploaded(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=self._uploaded(lengths),
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            num_reqs=len(reads),
            num_actual_tokens=len(reads),
            max_query_len=1,
            max_seq_len=int(lengths.max()),
            block_table_tensor=self._uploaded(table),
            slot_mapping=self._uploaded(last),
        )

    def _uploaded(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, copy=True)
