"""Steps of a worker over a scratch cache, for the self-test.

The layer, its implementation and its metadata builder are the engine's own. Only the cache is
replaced, in the same layout, and the executor over it. The plans are those of a scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vtoken.base.arrays import Ints, Ragged
from vtoken.core.protocol.mirror import BlockTables
from vtoken.core.protocol.step import NO_IDS, RequestSteps, StepPlan, WorkerReport
from vtoken.policies.signals import Signal
from vtoken.vllm.worker.executor import Batch

NUM_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Read:
    """One request of a batch whose newest token is its only query.

    `blocks` [b]: its block table. `slots` [n]: its live tokens, the newest last. `how`: the request
    has evicted nothing ("positional"), its tokens fill the front of its blocks ("dense"), or it has
    holes, and a CPU packs it into borrowed blocks ("borrowed") or the side buffer ("buffered").
    `num_dead`: earlier tokens of the request that it has evicted.
    """

    blocks: list[int]
    slots: Ints
    how: str
    num_dead: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the request, dead ones included."""
        return self.num_dead + len(self.slots)


class DataPath:
    """Attention, store and copies over `cache` [NUM_BLOCKS, H, S, 2D].

    `half`: the device's executor over that cache.
    """

    block_size: int

    def __init__(self, layer: Any, builder: Any, cache: torch.Tensor, half: Any) -> None:
        impl = layer.impl
        _, self.num_kv_heads, self.block_size, two_d = cache.shape
        self.head_size = two_d // 2
        self.num_heads = impl.num_heads
        self.scale = impl.scale
        self.soft_cap = float(impl.logits_soft_cap or 0.0)
        self.sinks: torch.Tensor | None = None if impl.sinks is None else impl.sinks.detach()
        self.dtype, self.device = cache.dtype, cache.device
        self.layer_number = impl.vtoken_layer
        self.half = half
        self._layer, self._builder, self._cache = layer, builder, cache

    def _present(self, batch: Batch, common: CommonAttentionMetadata) -> None:
        """Pass the step to attention; `common`: the batch as vLLM prepares it."""
        raise NotImplementedError

    def copy(self, plan: StepPlan) -> str | None:
        """Make the copies of `plan`, of requests without a mirror. Returns why tokens could not be
        parked, None if they could.
        """
        self.half.executor.begin(plan, ())
        self.half.relocate(plan)
        fault: str | None = self.half.executor.report.park_fault
        return fault

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: Ints) -> None:
        """Write K and V [n, Hkv, D] to `slots` [n] with the backend's own operation."""
        at = self._uploaded(slots)
        self._layer.impl.do_kv_cache_update(self._layer, key, value, self._cache, at)

    def attend(
        self,
        query: torch.Tensor,
        reads: list[Read],
        borrowed: list[int],
        signals: Sequence[Signal] = (),
    ) -> tuple[torch.Tensor, WorkerReport]:
        """Attention [R, Hq, D] of `query` [R, Hq, D], one token a request, and the step's report,
        with the scores of `signals` of all requests.

        `borrowed`: free blocks for packing. A step before it has all tokens but the newest, without
        attention: a worker may keep what it sent to the device.
        """
        executor, output = self.half.executor, torch.empty_like(query)
        unused, common = query[:, : self.num_kv_heads], self._common(reads)
        names = [*map(str, range(len(reads)))]
        for plan in (
            _plan(0, reads, borrowed),
            _plan(1, reads, borrowed, {name: tuple(signals) for name in names if signals}),
        ):
            executor.begin(plan, () if plan.step else [*executor.mirrors])
            executor.prepare(lambda name: reads[int(name)].blocks)
            executor.apply()
            computed = np.array([read.num_tokens - 2 + plan.step for read in reads])
            self._present(
                Batch.of(
                    names,
                    np.arange(len(reads) + 1),
                    computed,
                    lambda rows: BlockTables.of([reads[row].blocks for row in rows]),
                ),
                common,
            )
        try:
            metadata = self._builder.build(0, common)
            self._layer.impl.forward(
                *(self._layer, query, unused, unused, self._cache, metadata, output)
            )
        finally:
            self.half.clear()
        answer: Any = executor.attach(SimpleNamespace())
        return output, answer.vtoken

    def _common(self, reads: list[Read]) -> CommonAttentionMetadata:
        """One new token a request, which attends to all of the request's live tokens."""
        table = np.zeros((len(reads), max(len(r.blocks) for r in reads) + 1), dtype=np.int32)
        for row, read in enumerate(reads):
            table[row, : len(read.blocks)] = read.blocks
        starts = np.arange(len(reads) + 1, dtype=np.int32)
        lengths = np.array([read.num_tokens for read in reads], dtype=np.int32)
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


def _plan(
    step: int,
    reads: list[Read],
    borrowed: list[int],
    signals: dict[str, tuple[Signal, ...]] | None = None,
) -> StepPlan:
    """The plan of the step in which each request gets its last token but one (0) or its last (1).

    In step 0 the dead tokens die, and the earlier live ones move to their slots, from where vLLM
    would have put them.
    """
    virtual = {str(row): read for row, read in enumerate(reads) if read.how != "positional"}
    ends = [len(read.slots) - 2 + step for read in virtual.values()]  # live before the step
    slots = [read.slots for read in virtual.values()]
    num_dead = [read.num_dead for read in virtual.values()]
    evicted = [NO_IDS if step else np.arange(num) for num in num_dead]
    earlier = [NO_IDS if step else np.arange(end) for end in ends]
    signals = signals or {}
    return StepPlan(
        step,
        requests=RequestSteps(
            [*virtual],
            np.array(num_dead, dtype=np.int64) + np.array(ends, dtype=np.int64),
            np.array(ends, dtype=np.int64) + 1,
            np.array([read.how == "dense" for read in virtual.values()], dtype=np.bool_),
            evicted=Ragged.joined(evicted),
            moved_ids=Ragged.joined(num + ids for num, ids in zip(num_dead, earlier, strict=True)),
            moved_slots=Ragged.joined(of[ids] for of, ids in zip(slots, earlier, strict=True)),
            restored_ids=Ragged.empty(len(virtual)),
            restored_slots=Ragged.empty(len(virtual)),
            new_slots=Ragged.joined(of[end : end + 1] for of, end in zip(slots, ends, strict=True)),
            scratch=Ragged.joined(
                borrowed if read.how == "borrowed" else () for read in virtual.values()
            ),
        ),
        want_scores=tuple((name, signal) for name, kept in signals.items() for signal in kept),
        signals=signals,
        probed=frozenset(signals),
    )
