"""Every number that a worker reports in random steps equals its definition, also of tokens that
were dead and are live again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plain_signals import Forward, Plain
from tests.support.two_workers import HEADS, LAYERS, SIGNALS, Life, Worker
from vtoken.core.protocol.step import WorkerReport
from vtoken.policies.signals import Accumulator, Change, SeenKeys, Signal
from vtoken.vllm.cuda.layout import keys_of
from vtoken.vllm.worker.executor import Batch, PhysicalStep
from vtoken.vllm.worker.probe import ProbedRequest, probe
from vtoken.vllm.worker.scores import PendingScores
from vtoken.vllm.worker.stages import Shares, Stages

pytestmark = pytest.mark.vllm

SEEDS = range(3)
EACH = [(name, signal) for name, signals in SIGNALS.items() for signal in signals]


def forwards_of(life: Life, batch: Batch, query: torch.Tensor) -> dict[str, Forward]:
    """What the workers of `life` see in its newest step, by request; attention in plain numpy."""
    found = {}
    for name, first, num_new in zip(
        batch.names, batch.first.tolist(), batch.num_new.tolist(), strict=True
    ):
        live = sorted(life.live[name])
        slots = torch.tensor([life.live[name][token] for token in live])
        visible = np.tri(num_new, len(live), len(live) - num_new)
        keys, attentions = {}, {}
        for layer in range(LAYERS):
            of_layer = keys_of(life.caches[layer]).flatten(0, 1)[slots].double().numpy()
            keys[layer] = of_layer.transpose(1, 0, 2)  # [KV head, token, D]
            q = query[first : first + num_new].double().numpy()
            logits = [
                5 * np.tanh(0.3 * q[:, head] @ keys[layer][head * len(keys[layer]) // HEADS].T / 5)
                for head in range(HEADS)
            ]
            weights = np.exp(logits) * visible
            attentions[layer] = weights / weights.sum(axis=2, keepdims=True)
        found[name] = Forward(live, num_new, attentions, keys)
    return found


class Stage(Stages):
    """One of two stages in this process, with some `layers`; `box` takes what the first sends."""

    def __init__(self, layers: range, box: list[Shares]) -> None:
        self.layers, self._box = layers, box
        self.is_last = layers.stop == LAYERS

    def own_layers(self, signal: Signal) -> dict[int, int]:
        return {i: layer for i, layer in enumerate(signal.layers) if layer in self.layers}

    def own(self, signals: Sequence[Signal]) -> Sequence[Signal]:
        return [signal for signal in signals if self.own_layers(signal)]

    def shares(self, report: WorkerReport) -> Shares:
        return self._box.pop() if self.is_last else Shares(report.step)

    def hand_on(self, shares: Shares, report: WorkerReport) -> None:  # noqa: ARG002
        if not self.is_last:
            self._box.append(shares)


class StageWorker(Worker):
    def __init__(self, life: Life, stage: Stage) -> None:
        super().__init__(life)
        self.executor.stages = self.stage = stage

    def forward(self, step: PhysicalStep, batch: Batch, query: torch.Tensor) -> None:  # noqa: ARG002
        ProbedRequest.read(step.probed)
        for layer in self.stage.layers:
            keys = keys_of(self.life.caches[layer])
            probe(step.probed, layer, query, keys, scale=0.3, soft_cap=5.0)


class TwoStages:
    """The second has the last layer."""

    def __init__(self, life: Life) -> None:
        box: list[Shares] = []
        parts = range(LAYERS - 1), range(LAYERS - 1, LAYERS)
        self.workers = [StageWorker(life, Stage(layers, box)) for layers in parts]

    def step(self, *given: Any) -> PendingScores:
        return [worker.step(*given) for worker in self.workers][-1]


def check(seed: int, each: list[tuple[str, Signal]] = EACH, make: Any = Worker) -> int:
    """Assert the reported numbers of `each` over the steps of one life; how many were compared."""
    life = Life(seed, returns=True)
    worker = make(life)
    plain = {key: Plain(key[1]) for key in each}
    probed: dict[str, list[int]] = {name: [] for name in SIGNALS}
    num_checked = num_back = 0
    for _ in range(30):
        plan, batch, query = life.next()
        scores = worker.step(plan, batch, query)()
        num_back += len(plan.requests.restored_ids.values)
        for name, forward in forwards_of(life, batch, query).items():
            length = forward.live[-1] + 1
            if name in plan.probed:
                probed[name] += forward.live[-forward.appended :]
            for key in each:
                if key[0] == name:
                    plain[key].add(forward, reads=key in plan.want_scores)
                    if key in scores:
                        num_checked += plain[key].check(scores[key], probed[name], length)
    assert num_back > 50
    return num_checked


@pytest.mark.parametrize("seed", SEEDS)
def test_reported_signals_equal_their_definitions_while_tokens_die_and_come_back(seed: int) -> None:
    assert check(seed) > 3000


def test_two_stages_report_the_definitions_of_signals_whose_layers_they_share() -> None:
    assert check(0, make=TwoStages) > 3000


def only_look_up(self: Accumulator, ids: Any) -> Change | None:
    known = ids[: np.searchsorted(ids, self.num_tokens)]
    none = known[:0]
    return Change(np.searchsorted(self.ids, known), none, none, none, none)


def keep_no_sums(self: Accumulator) -> None:
    self._of_dead = np.zeros((1, self.num_tokens), np.float32)


def count_again(self: SeenKeys, ids: Any, num_tokens: int) -> int:
    """Whatever is more than there was."""
    before, self.num_tokens = getattr(self, "num_tokens", 0), len(ids)
    del num_tokens
    return max(0, len(ids) - before)


@pytest.mark.parametrize(
    ("owner", "method", "mistake", "signal"),
    [
        (Accumulator, "_change_to", only_look_up, Signal("attention_sum", layers=(0, 2))),
        (Accumulator, "_change_to", only_look_up, Signal("attention_window", 6, layers=(0, 2))),
        (Accumulator, "_reserve_sums", keep_no_sums, Signal("attention_sum", layers=(0, 2))),
        (
            SeenKeys,
            "advance",
            count_again,
            Signal("key_difference", 0, "max", layers=(0, 2), anchor="seen"),
        ),
    ],
    ids=["columns looked up: sum", "columns looked up: window", "sums lost", "keys counted twice"],
)
def test_control_a_worker_that_takes_no_account_of_it_is_noticed(
    owner: type, method: str, mistake: Any, signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = [key for key in EACH if key[1] == signal]
    assert each
    monkeypatch.setattr(owner, method, mistake)
    with pytest.raises(AssertionError):
        check(0, each)
