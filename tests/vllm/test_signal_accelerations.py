"""Every way in which a worker computes signals, against the definitions of their kinds.

The reference keeps every query's attention of every request in float64 and applies a kind's methods
to numpy arrays. `tests/support/shuffled.py` and `tests/gpu/` compare Triton's rows with those of
the probe in plain torch, which is compared here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.torch_kernels import signals_in_torch
from tests.support.two_workers import (
    DIM,
    HEADS,
    KV_HEADS,
    DeviceWorker,
    Life,
    S,
    Worker,
)
from vtoken.core.protocol.step import StepPlan
from vtoken.policies.signals import AttentionKind, Signal, pooled, redundancy
from vtoken.policies.signals.kind import BUILT_IN
from vtoken.vllm.cpu.compiled_probe import StepProbe
from vtoken.vllm.cpu.layout import KVLayout, Placement
from vtoken.vllm.cuda.copies.streams import Streams
from vtoken.vllm.cuda.layout import slot_rows
from vtoken.vllm.worker.executor import Batch, PhysicalStep
from vtoken.vllm.worker.probe import ProbedRequest

pytestmark = pytest.mark.vllm

SCALE, SOFT_CAP, STEPS = 0.3, 5.0, 30


@pytest.fixture(scope="module", autouse=True)
def _signals_in_torch() -> Iterator[None]:
    with signals_in_torch():
        yield


class NumbaWorker(Worker):
    """The worker on a CPU: rows of single queries from Numba's kernels."""

    def forward(self, step: PhysicalStep, batch: Batch, query: torch.Tensor) -> None:  # noqa: ARG002
        ProbedRequest.read(step.probed)
        probe = StepProbe(step.probed, len(self.life.caches[0]), S)
        layout = KVLayout(Placement(0, 2 * DIM, 1), Placement(DIM, 2 * DIM, 1))
        for layer, cache in enumerate(self.life.caches):
            probe.add(layer, query, cache.contiguous(), layout, scale=SCALE, soft_cap=SOFT_CAP)


WORKERS: dict[str, Any] = {
    "torch, on the host": Worker,
    "Numba, on the host": NumbaWorker,
    "torch, on a device": lambda life: DeviceWorker(life, Streams()),
}


class Definition:
    """The scores of one signal by its kind's definition; nothing is forgotten or approximated."""

    def __init__(self, life: Life, signal: Signal) -> None:
        self.life, self.signal = life, signal
        self.given: dict[str, list[dict[int, Any]]] = {}  # of each probed query, by token
        self.live: dict[str, list[int]] = {}  # at the newest probe
        self.num_tokens: dict[str, int] = {}

    def step(
        self, plan: StepPlan, batch: Batch, query: torch.Tensor
    ) -> dict[str, dict[int, float]]:
        """Request -> token -> score, of the requests whose scores `plan` requests."""
        kind = self.signal.definition
        columns = zip(batch.names, batch.first.tolist(), batch.num_new.tolist(), strict=True)
        for name, first, num_new in columns:
            self.num_tokens[name] = max(self.life.live[name]) + 1
            if name in plan.probed and isinstance(kind, AttentionKind):
                live = sorted(self.life.live[name])
                rows = self._rows(name, live, query[first : first + num_new].double().numpy())
                kept = self.given.setdefault(name, [])
                kept += [dict(zip(live, one, strict=True)) for one in kind.of_query(rows)]
                self.live[name] = live
        wanted = [name for name, _ in plan.want_scores]
        return {name: found for name in wanted if (found := self._scores(name)) is not None}

    def _heads(self) -> list[int]:
        return [*(self.signal.heads or range(HEADS))]

    def _keys(self, layer: int, tokens: list[int], name: str) -> Any:
        """The keys [Hq, n, D] that the signal's query heads read."""
        slots = [self.life.live[name][token] for token in tokens]
        content = slot_rows(self.life.caches[layer])[slots].view(len(slots), KV_HEADS, 2 * DIM)
        keys = content[..., :DIM].double().numpy()
        return np.stack([keys[:, head * KV_HEADS // HEADS] for head in self._heads()])

    def _rows(self, name: str, live: list[int], query: Any) -> Any:
        """r [k, n] of the queries [k, Hq, D] of the newest tokens."""
        of_layers = []
        hidden = ~np.tri(len(query), len(live), len(live) - len(query), dtype=bool)
        for layer in self.signal.layers:
            keys = self._keys(layer, live, name)
            logits = np.einsum("khd,hnd->hkn", query[:, self._heads()], keys) * SCALE
            logits = np.where(hidden, -np.inf, SOFT_CAP * np.tanh(logits / SOFT_CAP))
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            of_layers.append(getattr(weights, self.signal.over_heads)(axis=0))
        return getattr(np.stack(of_layers), self.signal.over_layers)(axis=0)

    def _scores(self, name: str) -> dict[int, float] | None:
        signal, kind = self.signal, self.signal.definition
        now = sorted(self.life.live[name])
        if not isinstance(kind, AttentionKind):
            of_layers = [
                getattr(kind.numbers(self._keys(layer, now, name)), signal.over_heads)(axis=0)
                for layer in signal.layers
            ]
            values = getattr(np.stack(of_layers), signal.over_layers)(axis=0)
            return dict(zip(now, pooled(signal, values), strict=True))
        given = self.given.get(name, [])
        complete = bool(given) and len(given) == self.live[name][-1] + 1
        if not given or not (complete or len(given) >= signal.warm_queries):
            return None
        live = self.live[name]
        rested = given[-signal.num_rows(len(given)) :]
        over = np.array([[row.get(token, 0) for token in live] for row in rested])
        values = pooled(signal, kind.over_queries(over))
        found = dict(zip(live, values, strict=True))
        if signal.is_mixed:
            keys = np.stack([self._keys(layer, now, name) for layer in signal.layers])
            repeated = redundancy(keys).mean(axis=(0, 1))
            share = dict(zip(now, repeated, strict=True))
            found = {t: signal.mixed(found[t], share[t]) for t in found if t in share}
        return found


def signals_of(name: str) -> list[Signal]:
    """Signals of one kind: aggregates, neighbours, some heads, redundancy."""
    kind = BUILT_IN[name]
    window = 6 if kind.queries == "window" else 0
    plain = Signal(name, window, layers=(0, 2))
    found = [plain, Signal(name, window, pool_radius=2, layers=(1,), heads=(0, 3))]
    if not plain.sums_rows:
        found += [
            Signal(name, window, "max", "max", "max", 3, layers=(0, 2)),
            Signal(name, window, "max", "mean", "mean", 1, layers=(0, 2), heads=(1, 2)),
        ]
    if not plain.of_keys:
        found.append(Signal(name, window, layers=(0, 2), heads=(0, 3), mix_lambda=0.3))
    if kind.queries == "window":
        found += [Signal(name, 1, layers=(1,)), Signal(name, 13, pool_radius=1, layers=(1,))]
    return found


def compare(worker_name: str, signal: Signal, defined: Signal) -> int:
    """Compare requests that grow, lose tokens and move; returns the number of scores."""
    life = Life(0, dict.fromkeys("ab", (signal,)))
    worker, definition = WORKERS[worker_name](life), Definition(life, defined)
    num_scores = 0
    for _ in range(STEPS):
        plan, batch, query = life.next()
        found = worker.step(plan, batch, query)()
        expected = definition.step(plan, batch, query)
        assert {name for name, _ in found} == expected.keys()
        for name, of_tokens in expected.items():
            tokens = [t for t in of_tokens if t in life.live[name]]
            want = [of_tokens[token] for token in tokens]
            np.testing.assert_allclose(found[name, signal][tokens], want, rtol=2e-5, atol=2e-6)
            num_scores += len(tokens)
    return num_scores


CASES = [*product(WORKERS, [signal for name in BUILT_IN for signal in signals_of(name)])]


@pytest.mark.parametrize(("worker", "signal"), CASES, ids=str)
def test_a_worker_reports_what_the_definition_says(worker: str, signal: Signal) -> None:
    assert compare(worker, signal, signal) > 200


@pytest.mark.parametrize("worker", WORKERS)
def test_control_a_window_of_one_query_less_is_noticed(worker: str) -> None:
    signals = (Signal("attention_hits", window, layers=(0, 2)) for window in (6, 5))
    with pytest.raises(AssertionError):
        compare(worker, *signals)
