"""The same search for every policy: parameters and layer, on the prompts of the tuning ground.

One forward pass of each prompt in transformers gives the attention and the keys of every layer.
Every policy ranks with every set of its grid at every layer, and evicts once with its own code. A
set holds a fact at a share kept if every token of its gold strings stays. Sets are ordered by the
share of facts held, over all shares kept. `vtoken bench grounds --ground tuning` then compares
the answers that the best sets give. `fastgen` needs the engine's vocabulary and is tuned only so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.base.arrays import Bools, Floats
from vtoken.policies import Policy, View, make_policy
from vtoken.policies.signals import Signal, pooled, redundancy
from vtoken_bench.grounds.prompts import GROUNDS, Prompt, PromptMaker
from vtoken_bench.output import Table

KEEPS = (1 / 3, 1 / 6, 1 / 12)
WINDOWS = (4, 8, 16, 32, 64)
_POOL: dict[str, list[Any]] = {"pool": ["mean", "max"], "pool_radius": [0, 1, 2, 3, 5]}
GRIDS: dict[str, dict[str, list[Any]]] = {
    "tova": {"heads": ["mean", "max"], **_POOL},
    "snapkv": {"window": [*WINDOWS], "queries": ["mean", "max"], "heads": ["mean", "max"], **_POOL},
    "peak_attention": {"window": [*WINDOWS], "heads": ["mean", "max"], **_POOL},
    "r_kv": {"window": [*WINDOWS], "mix_lambda": [0.1, 0.5, 0.9], **_POOL},
    "scissorhands": {"history_queries": [8, 16, 32, 64, 400], "heads": ["mean", "max"]},
    "h2o": {"normalize": [False, True], "recent_ratio": [0.1, 0.25, 0.5], **_POOL},
    "knorm": {"heads": ["mean", "max"], **_POOL},
    "keydiff": {"heads": ["mean", "max"], **_POOL},
}
Held = dict[tuple[str, int], Bools]


@dataclass(frozen=True)
class Found:
    """A set of parameters at one layer. `held`: the share of facts, over all of KEEPS."""

    policy: str
    params: dict[str, Any]
    layer: int
    held: float
    by_keep: list[float]


def sets(name: str) -> Iterator[dict[str, Any]]:
    """Every set of the policy's grid. Radius 0 is tried once, since it pools nothing."""
    grid = GRIDS[name]
    for values in product(*grid.values()):
        params = dict(zip(grid, values, strict=True))
        if params.get("pool_radius") != 0 or params["pool"] == "mean":
            yield params


def search(model: Path, *, samples: int, num_tokens: int, seed: int, processes: int) -> list[Found]:
    """All sets of all policies, the best of each policy first. Raises ProfileError.

    `num_tokens`: of the text in a prompt.
    """
    numbers = [range(samples)[i::processes] for i in range(processes)]
    arguments = [(model, [*part], num_tokens, seed) for part in numbers]
    with ProcessPoolExecutor(processes) as pool:
        parts = list(pool.map(_held_by_sets, *zip(*arguments, strict=True)))
    found = []
    for name in GRIDS:
        own = []
        for params in sets(name):
            for layer in sorted({layer for key, layer in parts[0] if key == _name(name, params)}):
                held = np.concatenate([part[_name(name, params), layer] for part in parts])
                by_keep = held.mean(axis=0).tolist()
                own.append(Found(name, params, layer, float(held.mean()), by_keep))
        found += sorted(own, key=lambda found: -found.held)
    return found


def _name(policy: str, params: dict[str, Any]) -> str:
    pairs = ",".join(f"{name}={value}" for name, value in params.items())
    return f"{policy}:{pairs}"


def _held_by_sets(model: Path, numbers: Sequence[int], num_tokens: int, seed: int) -> Held:
    """Set and layer -> which of the prompts `numbers` it holds at KEEPS, [prompts, keeps]."""
    import torch
    from transformers import AutoTokenizer

    from vtoken.calibration.observe import Observer

    torch.set_num_threads(1)
    tuning = GROUNDS["tuning"]
    maker = PromptMaker(
        AutoTokenizer.from_pretrained(model), tuning, seed=seed, num_tokens=num_tokens
    )
    observer = Observer(model)
    policies = {
        _name(name, params): make_policy(name, params) for name in GRIDS for params in sets(name)
    }
    plain = {_plain(policy.reads) for policy in policies.values() if policy.reads is not None}
    held: dict[tuple[str, int], list[list[bool]]] = {}
    for number in numbers:
        prompt = maker.prompt("chat", number)
        layers = observer.observe(prompt.ids, lambda _, *seen: _Layer(plain, *seen))
        for layer, read in enumerate(layers):
            for name, policy in policies.items():
                held.setdefault((name, layer), []).append(_holds(policy, read, prompt))
    return {key: np.array(found) for key, found in held.items()}


class _Layer:
    """The numbers of one layer's tokens, by signal. `plain`: signals without neighbours."""

    def __init__(self, plain: Collection[Signal], weights: Any, keys: Any) -> None:
        over_heads = {"mean": weights.mean(dim=0), "max": weights.amax(dim=0)}
        self._numbers: dict[Signal, Floats] = {}
        for signal in plain:
            if signal.of_keys:
                of_heads = signal.definition.numbers(keys.float())
                found = of_heads.amax(dim=0) if signal.over_heads == "max" else of_heads.mean(dim=0)
            else:
                found = signal.from_rows(over_heads[signal.over_heads])
            self._numbers[signal] = found.float().numpy()
        self._redundancy = redundancy(keys.numpy()).mean(axis=0)

    def scores(self, signal: Signal) -> Floats:
        """The numbers [n] of `signal`, after its neighbours and redundancy."""
        found = self._numbers.get(signal)
        if found is None:
            found = pooled(signal, self._numbers[_plain(signal)])
            if signal.is_mixed:
                found = signal.mixed(found, self._redundancy)
            self._numbers[signal] = found
        return found


def _plain(signal: Signal) -> Signal:
    return replace(signal, pool="mean", pool_radius=0, mix_lambda=1.0)


def _holds(policy: Policy, layer: _Layer, prompt: Prompt) -> list[bool]:
    """Whether the fact stays complete, for each of KEEPS."""
    num_tokens = len(prompt.ids)
    assert policy.reads is not None
    scores, found = layer.scores(policy.reads), []
    for keep in KEEPS:
        budget = max(round(keep * num_tokens), policy.min_budget_tokens())
        view = View(np.arange(num_tokens), num_tokens, num_tokens, budget, scores=scores)
        victims = policy.select_victims(view)
        found.append(not np.isin(prompt.answer, victims).any())
    return found


def table(found: Sequence[Found], *, rows: int) -> Table:
    """The best `rows` sets of each policy."""
    shown = Table(
        "Facts held by the best sets of each policy [%]",
        ["policy", "layer", "all", *(f"keep {keep:.3g}" for keep in KEEPS)],
        [],
    )
    for name in GRIDS:
        for row in [each for each in found if each.policy == name][:rows]:
            shares = [100 * row.held, *(100 * share for share in row.by_keep)]
            shown.rows.append([_name(name, row.params), row.layer, *(f"{s:.0f}" for s in shares)])
    return shown
