"""The self-test at start-up: known K/V through the whole data path, against plain torch.

Before the first request, on scratch caches shaped like the engine's own: write K/V with the
backend's store operation, evict, relocate with the copy engine, pack holes both ways, read with the
real attention kernel, and compare with a softmax written out. Then the signals: what the probe and
the accumulators tell, against the same softmax and the same keys. What differs is named and the engine
does not start. Knows one attention layer; knows no scheduler.

1. A case reads exactly its live tokens: each of them weighs enough to be missed, since every dead
   slot and every free one holds values that would shift the result.
2. All cases run at the engine's own block size, data type, numbers of heads and head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from vtoken.arrays import Ints
from vtoken.errors import SelfTestError
from vtoken.policies.signals import Signal, redundancy
from vtoken.protocol.mirror import Mirrors
from vtoken.protocol.step import StepPlan
from vtoken.vllm.worker.probe import ProbedRequest
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import Scores

NUM_BLOCKS = 12
# Largest |difference| from the oracle, of the largest |output|. One token missing shifts more.
SIGNAL_TOLERANCE = 1e-3  # of the largest |number|; sums are float32 whatever the cache holds
MIX_LAMBDA = 0.5  # attention and redundancy of the same size are both noticed
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@dataclass(frozen=True, slots=True)
class Read:
    """One request of a batch whose newest token is its only query.

    `blocks` [b]: its block table. `slots` [n]: its live tokens, the newest last. `how`: "dense",
    "lent" or "apart", the ways in which attention reads.
    """

    blocks: list[int]
    slots: Ints
    how: str = "dense"


class DataPath(Protocol):
    """What the engine does with its cache, here done with a scratch cache of `NUM_BLOCKS`."""

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    soft_cap: float
    sinks: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    layer_number: int

    @property
    def scores(self) -> Scores:
        """What keeps and tells signals, over the scratch cache."""

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: Ints) -> None:
        """Write K and V [n, Hkv, D] to `slots` [n] with the backend's own operation."""

    def relocate(self, source: Ints, destination: Ints) -> None:
        """Move tokens with the copy engine."""

    def attend(
        self,
        query: torch.Tensor,
        reads: list[Read],
        lent: list[int],
        probed: Sequence[ProbedRequest] = (),
    ) -> torch.Tensor:
        """Attention [R, Hq, D] of `query` [R, Hq, D], one token a request; `lent`: free blocks.

        The layer's probe gives `probed` their rows.
        """


class SelfTest:
    """Runs all cases on one data path."""

    def __init__(self, path: DataPath) -> None:
        self._path = path
        self._random = torch.Generator().manual_seed(0)
        self._fill()

    def run(self) -> None:
        """Raises SelfTestError naming the first case that differs, and by how much."""
        s = self._path.block_size
        rng = np.random.default_rng(0)
        places = np.arange(2 * s + s // 2 + 1)  # three blocks, the last a little more than half
        live = np.sort(rng.choice(places, size=s + s // 2, replace=False))

        def at(blocks: list[int], index: Any) -> Ints:
            slots: Ints = np.asarray(blocks, dtype=np.int64)[index // s] * s + index % s
            return slots

        dense = Read([2, 1, 3], at([2, 1, 3], places))
        self._compare("a dense request", [dense])
        holey = [Read([5, 4, 6], at([5, 4, 6], live), how) for how in ("lent", "apart")]
        self._compare("holes packed into lent blocks", [dense, holey[0]])
        self._compare("holes packed apart", [dense, holey[1]])
        self._compare("both ways in one batch", [holey[1], dense, *holey[:1]])
        front = rng.permutation(len(live))
        moved = Read([7, 8], at([7, 8], front))
        self._relocate(at([5, 4, 6], live), moved.slots)
        self._compare("a relocated request", [moved, dense])
        chain = at([7, 8], front)
        self._relocate(chain, np.roll(chain, 1))  # every destination is another token's source
        self._compare("tokens that change places", [moved])
        self._compare_signals([dense, holey[1], moved])

    def _fill(self) -> None:
        """Every slot of the cache holds a K and V of its own."""
        slots = np.arange(NUM_BLOCKS * self._path.block_size, dtype=np.int64)
        shape = (len(slots), self._path.num_kv_heads, self._path.head_size)
        self._key, self._value = torch.zeros(shape), torch.zeros(shape)
        self._write(slots)

    def _write(self, slots: Ints) -> None:
        """New tokens with new K and V in `slots`, here and in the cache."""
        p = self._path
        shape = (len(slots), p.num_kv_heads, p.head_size)
        key, value = (
            torch.randn(shape, generator=self._random).to(p.device, p.dtype) for _ in range(2)
        )
        value *= 4.0
        p.store(key, value, slots)
        self._key[slots], self._value[slots] = key.float().cpu(), value.float().cpu()

    def _relocate(self, source: Ints, destination: Ints) -> None:
        self._path.relocate(source, destination)
        self._key[destination], self._value[destination] = self._key[source], self._value[source]

    def _compare(self, case: str, reads: list[Read]) -> None:
        p = self._path
        query = torch.randn((len(reads), p.num_heads, p.head_size), generator=self._random)
        query = query.to(p.device, p.dtype)
        self._write(np.unique([read.slots[-1] for read in reads]))  # this step's tokens
        found = p.attend(query, reads, lent=[9, 10, 11]).float().cpu()
        for number, read in enumerate(reads):
            expected = self._oracle(query[number].float().cpu(), read.slots)
            error = float((found[number] - expected).abs().max())
            allowed = TOLERANCE[p.dtype] * float(expected.abs().max())
            if not error <= allowed:  # NaN fails here too
                raise SelfTestError(
                    f"attention over {len(read.slots)} live tokens ({case}, request {number + 1} "
                    f"of {len(reads)}, {read.how}) differs from plain torch by {error:.3g}, "
                    f"allowed are {allowed:.3g}: block size {p.block_size}, {p.dtype}, "
                    f"{p.num_heads} heads of {p.head_size} over {p.num_kv_heads}. vToken would "
                    "serve wrong tokens here and does not start; report this, and start without it"
                )

    def _oracle(self, query: torch.Tensor, slots: Ints) -> torch.Tensor:
        """softmax(q k / sqrt(d)) v of one query [Hq, D] over the tokens in `slots`."""
        p = self._path
        value = self._value[slots].repeat_interleave(p.num_heads // p.num_kv_heads, dim=1)
        logits = self._logits(query, slots)
        if p.sinks is not None:
            logits = torch.cat([logits, p.sinks.float().cpu()[:, None]], dim=1)
        weights = torch.softmax(logits, dim=1)[:, : len(slots)]
        return torch.einsum("hn,nhd->hd", weights, value)

    def _logits(self, query: torch.Tensor, slots: Ints) -> torch.Tensor:
        """q k / sqrt(d) [Hq, n] of one query [Hq, D] over the tokens in `slots` [n]."""
        p = self._path
        key = self._key[slots].repeat_interleave(p.num_heads // p.num_kv_heads, dim=1)
        logits = torch.einsum("hd,nhd->hn", query, key) * p.scale
        return p.soft_cap * torch.tanh(logits / p.soft_cap) if p.soft_cap else logits

    def _compare_signals(self, reads: list[Read]) -> None:
        """One step that probes a query of each of `reads`, up to the numbers in its report."""
        p = self._path
        query = torch.randn((len(reads), p.num_heads, p.head_size), generator=self._random)
        query = query.to(p.device, p.dtype)
        layers = (p.layer_number,)
        attention, keys = Signal("attention_last", layers=layers), Signal("key_norm", layers=layers)
        mixed = Signal("attention_last", layers=layers, mix_lambda=MIX_LAMBDA)
        signals = attention, keys, mixed
        mirrors = Mirrors.of({str(row): read.slots for row, read in enumerate(reads)})
        probed: list[ProbedRequest] = []
        for row, (name, mirror) in enumerate(mirrors.items()):
            mirror.keep((attention, mixed), p.scores.make_accumulator)
            probed += ProbedRequest.of(name, row, 1, mirror)
        p.attend(query, reads, lent=[9, 10, 11], probed=probed)
        plan = StepPlan(0)
        plan.want_scores = tuple((name, asked) for name in mirrors for asked in signals)
        told = p.scores.finish(probed, plan, mirrors, Ranks())()
        for row, read in enumerate(reads):
            weights = torch.softmax(self._logits(query[row].float().cpu(), read.slots), dim=1)
            key = self._key[read.slots]
            last, norms = weights.mean(dim=0), key.norm(dim=-1)
            of_heads = redundancy(key.transpose(0, 1).numpy())
            repeated = torch.from_numpy(of_heads.mean(axis=0))
            expected_of = last, -norms.mean(dim=1), mixed.mixed(last, repeated)
            for signal, expected in zip(signals, expected_of, strict=True):
                found = torch.from_numpy(told[str(row), signal])
                error = float((found - expected).abs().max())
                allowed = SIGNAL_TOLERANCE * float(expected.abs().max())
                if not error <= allowed:  # NaN fails here too
                    raise SelfTestError(
                        f"{signal} of {len(read.slots)} live tokens (request {row + 1} of "
                        f"{len(reads)}) differs from plain torch by {error:.3g}, allowed are "
                        f"{allowed:.3g}: block size {p.block_size}, {p.dtype}, {p.num_heads} heads "
                        f"of {p.head_size} over {p.num_kv_heads}. Policies that read it would "
                        "evict the wrong tokens here, so vToken does not start; report this"
                    )
