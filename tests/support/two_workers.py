"""Two workers that execute the same random steps: one with the host's probe and accumulators, which
is the oracle, and one with a device's. For tests on the CPU (`vllm/test_cuda_signals.py`,
`vllm/test_cuda_late.py`) and on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.support import filled
from tests.support.core.request_step import RequestStep, steps_of
from vtoken.core.protocol.mirror import BlockTables
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import Signal
from vtoken.vllm.cuda.copies.staging import Staging
from vtoken.vllm.cuda.copies.transfer import upload
from vtoken.vllm.cuda.inputs import Positional, StepInputs
from vtoken.vllm.cuda.layout import keys_of, slot_rows
from vtoken.vllm.cuda.pages import PageTables
from vtoken.vllm.cuda.signals.layers import AttentionLayer
from vtoken.vllm.cuda.signals.scores import DeviceScores
from vtoken.vllm.worker.executor import Batch, PhysicalStep, StepExecutor
from vtoken.vllm.worker.probe import ProbedRequest, probe
from vtoken.vllm.worker.ranks import Ranks
from vtoken.vllm.worker.scores import HostScores, PendingScores

S, BLOCKS, LAYERS, HEADS, KV_HEADS, DIM = 4, 80, 3, 4, 2, 8
MAX_LENGTH = 256
NUM_HOSTS = 256
ONE, TWO = (1,), (0, 2)
SIGNALS = {
    "a": (
        Signal("attention_sum", layers=TWO),
        Signal("attention_sum", pool="max", pool_radius=2, layers=ONE, heads=(0, 3)),
    ),
    "b": (Signal("attention_window", 6, layers=TWO), Signal("attention_last", layers=TWO)),
    "c": (
        Signal("attention_hits", 10, "max", layers=TWO),
        Signal("key_norm", 0, "max", "mean", "max", 1, TWO),
        Signal("attention_max", 6, "mean", "max", "mean", 2, TWO, (1, 2)),
    ),
    "d": (
        Signal("key_difference", layers=TWO),
        Signal("key_difference", 0, "max", layers=TWO, anchor="seen"),
        Signal("attention_last", 0, "max", "max", "max", 3, TWO),
        Signal("key_norm", layers=ONE, heads=(3,)),
        Signal("attention_window", 6, pool="max", pool_radius=1, layers=TWO, mix_lambda=0.1),
        Signal("attention_last", 0, layers=ONE, heads=(0, 1), mix_lambda=0.5),
    ),
}


class Life:
    """Random steps: plans, batches and queries for a worker; `caches` hold K.

    `signals`: those of each of at most four requests. `caches` show the state after the step that
    was made last. Slots of evicted tokens are taken by the next moves, and slots of moved tokens by
    new tokens of the same step, as early as plans permit. `written`: the step's new slots.
    `returns`: tokens are parked as they die, and come back in some steps; the host slots of those
    that did are taken first in the next step.
    """

    def __init__(
        self,
        seed: int,
        signals: Mapping[str, tuple[Signal, ...]] = SIGNALS,
        *,
        returns: bool = False,
    ) -> None:
        self.signals, self.returns = signals, returns
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        memory = torch.randn(LAYERS, BLOCKS, S, KV_HEADS, 2 * DIM)
        self.caches = [layer.permute(0, 2, 1, 3) for layer in memory]
        self.blocks = {name: list(range(5 * i, 5 * i + 5)) for i, name in enumerate(signals)}
        self.free = list(self.rng.permutation(np.arange(20 * S, BLOCKS * S)))
        self.live: dict[str, dict[int, int]] = {name: {} for name in signals}
        self.num_tokens = dict.fromkeys(signals, 0)
        self.dead: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in signals}
        self.hosts = list(range(NUM_HOSTS))  # free host slots
        self.host_of: dict[tuple[str, int], int] = {}  # of parked tokens
        self.parks: tuple[list[int], list[int]] = ([], [])  # of the step: slots, host slots
        self.restores: tuple[list[int], list[int]] = ([], [])  # of the step: host slots, slots
        self.virtual: set[str] = set()
        self.written: list[int] = []
        self.moves: tuple[list[int], list[int]] = ([], [])  # of the step: sources, destinations
        self.number = 0

    def next(self) -> tuple[StepPlan, Batch, torch.Tensor]:
        """The next step's plan, batch and queries [T, Hq, D]; K of its new tokens is written."""
        self.number += 1
        self.moves, self.written, self._vacated = ([], []), [], []
        self.parks, self.restores = ([], []), ([], [])
        rng, plan = self.rng, StepPlan(self.number)
        names: list[str] = []
        starts, computed = [0], []
        parts: dict[str, RequestStep] = {}
        for name in rng.permutation(list(self.signals)).tolist():
            if self.number > 2 and rng.random() < 0.2:
                continue  # not scheduled
            num_new = 9 if self.number == 1 else 4 if rng.random() < 0.2 else 1
            if name not in self.virtual and self.num_tokens[name] + num_new > 5 * S - 4:
                self.virtual.add(name)
            names.append(name)
            starts.append(starts[-1] + num_new)
            computed.append(self.num_tokens[name])
            self._grow(parts, name, num_new)
        self.free += self._vacated
        self.hosts += self.restores[0]
        plan.requests = steps_of(parts)
        plan.park_slots, plan.park_hosts = np.array(self.parks, dtype=np.int64)
        plan.restore_hosts, plan.restore_slots = np.array(self.restores, dtype=np.int64)
        plan.park_capacity = NUM_HOSTS
        plan.source_slots = np.array(self.moves[0], dtype=np.int64)
        plan.destination_slots = np.array(self.moves[1], dtype=np.int64)
        plan.signals = {name: self.signals[name] for name in names}
        plan.probed = frozenset(plan.signals) if rng.random() < 0.8 else frozenset()
        plan.want_scores = tuple(
            (name, signal)
            for name, kept in plan.signals.items()
            for signal in kept
            if rng.random() < 0.7
        )
        batch = Batch.of(
            names,
            starts,
            computed,
            lambda rows: BlockTables.of([self.blocks[names[row]] for row in rows]),
        )
        return plan, batch, torch.randn(starts[-1], HEADS, DIM)

    def _grow(self, parts: dict[str, RequestStep], name: str, num_new: int) -> None:
        live, before, rng = self.live[name], self.num_tokens[name], self.rng
        new = range(before, before + num_new)
        self.num_tokens[name] += num_new
        if name not in self.virtual:
            live |= {t: self.blocks[name][t // S] * S + t % S for t in new}
            return
        part = parts[name] = RequestStep(before, dense=False)
        if rng.random() < 0.5 and len(live) > 8:
            part.evicted = np.sort(rng.choice(sorted(live)[:-1], 3, replace=False))
            for token in part.evicted.tolist():
                if self.returns:
                    self._park(name, token)
                self.free.append(live.pop(token))
        elif self.returns and rng.random() < 0.6:
            self._restore(part, name)
        if rng.random() < 0.4 and not len(part.restored_ids):
            part.moved_ids = np.sort(rng.choice(sorted(live), 3, replace=False))
            part.moved_slots = np.array([self.free.pop() for _ in range(3)])
            for token, slot in zip(part.moved_ids.tolist(), part.moved_slots, strict=True):
                for cache in self.caches:
                    slot_rows(cache)[slot] = slot_rows(cache)[live[token]]
                self.moves[0].append(live[token])
                self.moves[1].append(int(slot))
                self._vacated.append(live[token])
                live[token] = slot
        part.new_slots = np.array([(self._vacated or self.free).pop() for _ in new])
        self.written += part.new_slots.tolist()
        live |= dict(zip(new, part.new_slots.tolist(), strict=True))
        for cache in self.caches:
            slot_rows(cache)[torch.from_numpy(part.new_slots)] = torch.randn(
                num_new, KV_HEADS * 2 * DIM
            )
        part.num_live = len(live)

    def _park(self, name: str, token: int) -> None:
        slot, host = self.live[name][token], self.hosts.pop()
        self.dead[name][token] = [slot_rows(cache)[slot].clone() for cache in self.caches]
        self.host_of[name, token] = host
        self.parks[0].append(slot)
        self.parks[1].append(host)

    def _restore(self, part: RequestStep, name: str) -> None:
        """Let up to three dead tokens of a request come back."""
        live, dead = self.live[name], self.dead[name]
        part.restored_ids = np.sort(self.rng.permutation(sorted(dead))[:3])
        slots = [(self._vacated or self.free).pop() for _ in part.restored_ids]
        part.restored_slots = np.array(slots, dtype=np.int64)
        for token, slot in zip(part.restored_ids.tolist(), part.restored_slots, strict=True):
            for cache, rows in zip(self.caches, dead.pop(token), strict=True):
                slot_rows(cache)[slot] = rows
            live[token] = slot
            self.restores[0].append(self.host_of.pop((name, token)))
            self.restores[1].append(int(slot))

    def blocks_of(self, name: str) -> list[int]:
        return self.blocks[name]


class Worker:
    """The worker with its signals on the host."""

    def __init__(self, life: Life, scores: Any = None, ranks: Ranks | None = None) -> None:
        self.life = life
        scores = scores or HostScores(lambda layer: keys_of(life.caches[layer]), HEADS)
        self.executor = StepExecutor(S, lambda _: iter(()), scores, ranks or Ranks())

    def step(self, plan: StepPlan, batch: Batch, query: torch.Tensor) -> PendingScores:
        """Run one step with `query` on the caches' device; return its pending scores."""
        executor = self.executor
        executor.begin(plan, ())
        executor.prepare(self.life.blocks_of)
        executor.apply()
        step = executor.physical(batch)
        assert step is not None
        self.forward(step, batch, query)
        executor.forward_ended()
        assert executor._pending_scores is not None
        return executor._pending_scores

    def forward(self, step: PhysicalStep, batch: Batch, query: torch.Tensor) -> None:  # noqa: ARG002
        ProbedRequest.read(step.probed)
        for layer, cache in enumerate(self.life.caches):
            probe(step.probed, layer, query, keys_of(cache), scale=0.3, soft_cap=5.0)


class DeviceWorker(Worker):
    """The worker with its signals on a device; `follow` copies the caches to a device that is not
    the CPU. One of several `ranks` has the KV head of its number.
    """

    def __init__(
        self, life: Life, streams: Any, device: str = "cpu", ranks: Ranks | None = None
    ) -> None:
        ranks = ranks or Ranks()
        self.device = torch.device(device)
        num_heads = HEADS // ranks.heads.num_ranks
        own = KV_HEADS // ranks.heads.num_ranks
        first = ranks.heads.rank * own
        self.caches = [cache[:, first : first + own] for cache in life.caches]
        if device != "cpu":
            self.caches = [torch.empty_like(cache, device=device) for cache in self.caches]
        self.layers = [AttentionLayer(keys_of(cache), num_heads, 0.3, 5.0) for cache in self.caches]
        self.layers[0].hold(len(life.signals), torch.float32)
        self.tables = PageTables(len(life.signals), MAX_LENGTH, self.device)
        self.staging = Staging(self.device)
        self.scores = DeviceScores(self.layers, self.tables, self.staging, streams)
        super().__init__(life, self.scores, ranks)
        self.inputs = StepInputs(self.tables, S, self.staging)

    def follow(self) -> None:
        for source, target in zip(self.life.caches, self.caches, strict=True):
            target.copy_(source)

    def forward(self, step: PhysicalStep, batch: Batch, query: torch.Tensor) -> None:
        if not batch.names:
            return  # vLLM prepares no attention
        given, executor = positional(self.life, batch, self.device), self.executor
        self.inputs.put(step, batch, given.max_lens)
        assert executor.plan is not None
        rows = {name: row for row, name in enumerate(batch.names)}
        self.scores.put(step.probed, executor.plan, executor.mirrors, rows, executor.ranks)
        self.staging.send()
        kernel = {"cpu": filled.fill_tables, "meta": lambda *_, **__: None}.get(self.device.type)
        if kernel is None:
            self.inputs.fill(given)
        else:
            with patch("vtoken.vllm.cuda.kernels.fill_tables", kernel):
                self.inputs.fill(given)
        for number, layer in enumerate(self.layers):
            layer.save(query)
            if self.scores.probe is not None:
                self.scores.probe.add_layer(number, query)


def positional(life: Life, batch: Batch, device: torch.device) -> Positional:
    """vLLM's inputs of `batch`; those of requests that have evicted are wrong."""
    lengths = (batch.num_computed + batch.num_new).astype(np.int32)
    blocks = np.array([life.blocks[name] for name in batch.names], dtype=np.int32)
    slots = [
        own[np.arange(computed, length) // S % len(own)] * S + np.arange(computed, length) % S
        for own, computed, length in zip(
            blocks, batch.num_computed.tolist(), lengths.tolist(), strict=True
        )
    ]
    mapping = np.concatenate(slots).astype(np.int64)
    return Positional(
        upload(blocks, device), upload(lengths, device), upload(mapping, device), lengths.copy()
    )
