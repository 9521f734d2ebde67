"""The self-test at start-up: known K/V through the entire data path, against plain torch.

It runs before the first request, on a scratch cache shaped like the engine's: write K/V with the
backend's store operation, evict, relocate with the copy engine, pack holes both ways, read with the
real attention kernel, and compare with a softmax in plain torch. Likewise with tokens that were
parked in memory of the host, unless that is refused. Then it compares the signals of the probe and
the accumulators with the same softmax and keys. A difference raises an error that names the case,
and the engine does not start. Uses one attention layer and no scheduler.

1. A case reads exactly its live tokens: a missing token would shift the result, and so would any
   dead or free slot, because all of them hold random values.
2. All cases run at the engine's own block size, data type, numbers of heads and head size.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vtoken.base.arrays import Ints
from vtoken.base.compiled import describe_kernels
from vtoken.base.errors import SelfTestError
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import AnchoredKeyKind, Signal, redundancy
from vtoken.policies.signals.kind import kinds
from vtoken.vllm.worker.data_path import NUM_BLOCKS, DataPath, Read

log = init_logger("vllm.vtoken")
SIGNAL_TOLERANCE = 1e-3  # of the largest |score|; sums are float32 in caches of every type
MIX_LAMBDA = 0.5  # weights attention and redundancy equally, so that an error in either shows
# Largest |difference| from the oracle, of the largest |output|. One missing token exceeds it.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Of attention in `dtype` on `device`, of the largest |output|.

    Triton multiplies float32 on CUDA in TF32, whose fraction has the 10 bits of float16's.
    """
    is_tf32 = device.type == "cuda" and dtype == torch.float32
    return TOLERANCE[torch.float16 if is_tf32 else dtype]


class SelfTest:
    """Runs all cases on one data path."""

    def __init__(self, path: DataPath) -> None:
        self._path = path
        self._random = torch.Generator().manual_seed(0)
        self._fill()

    def run(self) -> None:
        """Raises SelfTestError that names the first case that differs, and the difference."""
        started = time.perf_counter()
        self._run()
        seconds = time.perf_counter() - started
        log.info("vToken: self-test of the data path: %.1f s, %s", seconds, describe_kernels())

    def _run(self) -> None:
        s = self._path.block_size
        rng = np.random.default_rng(0)
        places = np.arange(2 * s + s // 2 + 1)  # three blocks, the last a little more than half
        live = np.sort(rng.choice(places, size=s + s // 2, replace=False))

        def at(blocks: list[int], index: Any) -> Ints:
            slots: Ints = np.asarray(blocks, dtype=np.int64)[index // s] * s + index % s
            return slots

        dense = Read([2, 1, 3], at([2, 1, 3], places), "positional")
        self._compare("a request that has evicted nothing", [dense])
        slots = at([5, 4, 6], live)
        dead = len(places) - len(live)
        borrowed, buffered = (Read([5, 4, 6], slots, how, dead) for how in ("borrowed", "buffered"))
        self._compare("holes packed into borrowed blocks", [dense, borrowed])
        self._compare("holes packed into the side buffer", [dense, buffered])
        self._compare("both ways in one batch", [buffered, dense, borrowed])
        front = rng.permutation(len(live))
        moved = Read([7, 8], at([7, 8], front), "dense", s - s // 2)
        self._relocate(at([5, 4, 6], live), moved.slots)
        self._compare("a relocated request", [moved, dense])
        chain = at([7, 8], front)
        self._relocate(chain, np.roll(chain, 1))  # every destination is another token's source
        self._compare("tokens that change places", [moved])
        if self._park(chain, np.roll(chain, 1)):
            self._compare("parked tokens that came back", [moved])
        self._compare_signals([dense, buffered, moved])

    def _fill(self) -> None:
        """Write random K and V to every slot of the cache."""
        slots = np.arange(NUM_BLOCKS * self._path.block_size, dtype=np.int64)
        shape = (len(slots), self._path.num_kv_heads, self._path.head_size)
        self._key, self._value = torch.zeros(shape), torch.zeros(shape)
        self._write(slots)

    def _write(self, slots: Ints) -> None:
        """Write random K and V to `slots`, in the cache and in the oracle's copy."""
        p = self._path
        shape = (len(slots), p.num_kv_heads, p.head_size)
        key, value = (
            torch.randn(shape, generator=self._random).to(p.device, p.dtype) for _ in range(2)
        )
        value *= 4.0
        p.store(key, value, slots)
        self._key[slots], self._value[slots] = key.float().cpu(), value.float().cpu()

    def _relocate(self, source: Ints, destination: Ints) -> None:
        self._path.copy(StepPlan(0, source, destination))
        self._key[destination], self._value[destination] = self._key[source], self._value[source]

    def _park(self, slots: Ints, back: Ints) -> bool:
        """Park the tokens in `slots`, overwrite these and restore the tokens to `back`; whether the
        host has the memory. A refusal is for the step that parks, which reports it.
        """
        hosts = np.arange(len(slots))[::-1]
        plan = StepPlan(0, park_slots=slots, park_hosts=hosts, park_capacity=len(slots))
        if fault := self._path.copy(plan):
            log.warning("vToken: tokens cannot be parked on this machine: %s", fault)
            return False
        key, value = self._key[slots].clone(), self._value[slots].clone()
        self._write(slots)
        plan = StepPlan(0, restore_hosts=hosts, restore_slots=back, park_capacity=len(slots))
        self._path.copy(plan)
        self._key[back], self._value[back] = key, value
        return True

    def _compare(self, case: str, reads: list[Read]) -> None:
        p = self._path
        query = torch.randn((len(reads), p.num_heads, p.head_size), generator=self._random)
        query = query.to(p.device, p.dtype)
        self._write(np.unique([read.slots[-1] for read in reads]))  # this step's tokens
        found, _ = p.attend(query, reads, borrowed=[9, 10, 11])
        for number, read in enumerate(reads):
            expected = self._oracle(query[number].float().cpu(), read.slots)
            error = float((found[number].float().cpu() - expected).abs().max())
            allowed = tolerance(p.dtype, p.device) * float(expected.abs().max())
            self._require(
                error <= allowed,
                f"attention over {len(read.slots)} live tokens ({case}, request {number + 1} of "
                f"{len(reads)}, {read.how}) differs from plain torch by {error:.3g}, more than the "
                f"allowed {allowed:.3g}",
                "vToken would serve wrong tokens",
            )

    def _require(self, holds: bool, difference: str, consequence: str) -> None:
        """Raises SelfTestError with the facts of the data path, unless `holds`, as no NaN does."""
        if not holds:
            p = self._path
            raise SelfTestError(
                f"{difference}: block size {p.block_size}, {p.dtype}, {p.num_heads} query heads of "
                f"size {p.head_size}, {p.num_kv_heads} KV heads. {consequence}, so the engine does "
                "not start. Start without vToken, and report this"
            )

    def _oracle(self, query: torch.Tensor, slots: Ints) -> torch.Tensor:
        """softmax(q k / sqrt(d)) v of one query [Hq, D] over the tokens in `slots`."""
        p = self._path
        value = self._value[slots].repeat_interleave(p.num_heads // p.num_kv_heads, dim=1)
        return torch.einsum("hn,nhd->hd", self._weights(query, slots), value)

    def _weights(self, query: torch.Tensor, slots: Ints) -> torch.Tensor:
        """The attention [Hq, n] of one query [Hq, D] over the tokens in `slots` [n]."""
        logits, sinks = self._logits(query, slots), self._path.sinks
        if sinks is not None:
            logits = torch.cat([logits, sinks.float().cpu()[:, None]], dim=1)
        return torch.softmax(logits, dim=1)[:, : len(slots)]

    def _logits(self, query: torch.Tensor, slots: Ints) -> torch.Tensor:
        """q k / sqrt(d) [Hq, n] of one query [Hq, D] over the tokens in `slots` [n]."""
        p = self._path
        key = self._key[slots].repeat_interleave(p.num_heads // p.num_kv_heads, dim=1)
        logits = torch.einsum("hd,nhd->hn", query, key) * p.scale
        return p.soft_cap * torch.tanh(logits / p.soft_cap) if p.soft_cap else logits

    def _compare_signals(self, reads: list[Read]) -> None:
        """Run one step that probes a query of each of `reads`, and compare the reported scores.

        All kinds of signals run that report after one query. A kind that counts is not compared,
        because the rounding of a row may change a count.
        """
        p = self._path
        query = torch.randn((len(reads), p.num_heads, p.head_size), generator=self._random)
        query = query.to(p.device, p.dtype)
        layers = (p.layer_number,)
        mixed = Signal("attention_last", layers=layers, mix_lambda=MIX_LAMBDA)
        signals = [*_one_query_signals(layers), mixed]
        _, report = p.attend(query, reads, [9, 10, 11], signals)
        for row, read in enumerate(reads):
            attention = self._weights(query[row].float().cpu(), read.slots)
            weights = attention.mean(dim=0, keepdim=True).numpy()
            keys = self._key[read.slots].transpose(0, 1).numpy()
            for signal in signals:
                if signal.definition.counts:
                    continue
                if signal.of_keys:
                    expected = signal.definition.numbers(keys).mean(axis=0)
                else:
                    expected = signal.from_rows(weights)
                if signal.is_mixed:
                    expected = signal.mixed(expected, redundancy(keys).mean(axis=0))
                error = float(
                    np.abs(report.scores[str(row), signal][read.num_dead :] - expected).max()
                )
                allowed = SIGNAL_TOLERANCE * float(np.abs(expected).max())
                self._require(
                    error <= allowed,
                    f"{signal} of {len(read.slots)} live tokens (request {row + 1} of "
                    f"{len(reads)}) differs from plain torch by {error:.3g}, more than the allowed "
                    f"{allowed:.3g}",
                    "Policies that read this signal would evict wrong tokens",
                )


def _one_query_signals(layers: tuple[int, ...]) -> list[Signal]:
    """A signal of every kind that needs no more than one probed query."""
    windows = {name: int(kind.queries == "window") for name, kind in kinds().items()}
    signals = [Signal(name, window, layers=layers) for name, window in windows.items()]
    signals += [
        replace(signal, anchor="seen")
        for signal in signals
        if isinstance(signal.definition, AnchoredKeyKind)
    ]
    return [signal for signal in signals if signal.warm_queries <= 1]
