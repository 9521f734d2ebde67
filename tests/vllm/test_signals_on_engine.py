"""The signals that the worker reports during eviction, against Hugging Face attentions and keys.

The reference replays the logged victims and computes every signal again, query by query, in plain
Python over the model's own attention maps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support import reference
from tests.support.engines import engine_args
from tests.support.observe import Observer
from tests.support.packages import install_example, installer
from tests.support.plain_signals import of_keys, of_queries, redundancy
from tests.vllm.test_policies_exact import generate_under
from vtoken.policies import make_policy
from vtoken.policies.signals import Signal

pytestmark = pytest.mark.vllm

NUM_NEW = 40
LAYERS = [1, 2]
PROMPTS = [reference.random_prompt(150, 3), reference.random_prompt(70, 4)]
MAXIMA = {"heads": "max", "layers": "max", "pool": "max", "pool_radius": 3}
R_KV = {"window": 8, "mix_lambda": 0.1, "pool_radius": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "h2o": ("h2o", {"pool_radius": 0}),
    "h2o, pooled": ("h2o", {"pool": "max", "pool_radius": 2}),
    "tova": ("tova", {"heads": "mean", "pool_radius": 3}),
    "tova, maxima": ("tova", MAXIMA),
    "tova, maximum over heads": ("tova", {"heads": "max", "pool_radius": 5}),
    "tova, maximum over layers": ("tova", {"heads": "mean", "layers": "max", "pool_radius": 1}),
    "snapkv": ("snapkv", {"window": 24, "pool_radius": 2}),
    "snapkv, maxima": ("snapkv", {"window": 8, "queries": "max", **MAXIMA}),
    "scissorhands": ("scissorhands", {"history_queries": 40}),
    "scissorhands, maximum over heads": (
        "scissorhands",
        {"history_queries": 40, "heads": "max"},
    ),
    "r_kv": ("r_kv", R_KV),
    "r_kv, maximum over neighbours": ("r_kv", {**R_KV, "mix_lambda": 0.4, "pool": "max"}),
    "knorm": ("knorm", {"pool_radius": 3}),
    "knorm, maxima": ("knorm", MAXIMA),
    "keydiff": ("keydiff", {"heads": "mean", "pool_radius": 0}),
    "keydiff, maximum over heads": ("keydiff", {"heads": "max", "pool_radius": 1}),
    "a signal of another package": ("least_attention", {}),
}
PROBES: dict[str, dict[str, Any]] = {
    "every step": {"every_steps": 1},
    "every third step": {"every_steps": 3},
    "some heads": {"heads": [0, 3]},
}

Reports = dict[str, dict[int, npt.NDArray[np.float32]]]  # request -> tokens computed -> numbers


class Recorder(Observer):
    """Also records the reports, and the lengths after which a request's queries were probed."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.reports: Reports = defaultdict(dict)
        self.probed: dict[str, list[int]] = defaultdict(list)
        self._plans: dict[int, dict[str, int]] = {}
        self._finish = self.runtime.finish_step
        self.runtime.finish_step = self._finish_step

    def _commit_step(self, grown: Any) -> Any:
        plan = super()._commit_step(grown)
        lengths = {t.request_id: t.num_tokens for t in self.runtime.tables}
        self._plans[plan.step] = lengths
        for request in plan.probed:
            self.probed[request].append(lengths[request])
        return plan

    def _finish_step(self, report: Any, step: int) -> None:
        for (request, _), scores in report.scores.items():
            self.reports[request][self._plans[step][request]] = scores
        self._finish(report, step)


@pytest.fixture(scope="module", autouse=True)
def _other_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installer(tmp_path_factory.mktemp("package")) as install:
        install_example(install, "signal")
        yield


@pytest.fixture(scope="module", params=PROBES)
def probe(request: Any) -> dict[str, Any]:
    return {"layers": LAYERS, **PROBES[request.param]}


@pytest.fixture(scope="module")
def recorder(probe: dict[str, Any], engine: Any) -> Recorder:
    """Every case and prompt in one batch; prompts are computed in chunks of 200 tokens a step."""
    config = {"budget_tokens": 48, "interval_tokens": 4, "probe": probe}
    chunks = {"max_num_batched_tokens": 200, "enable_chunked_prefill": True}
    with engine(enable_prefix_caching=False, **chunks, **engine_args(config)) as llm:
        recorder = Recorder(llm)
        generate_under(llm, [*CASES.values()], PROMPTS, NUM_NEW)
    return recorder


def over(values: list[torch.Tensor], how: str) -> torch.Tensor:
    stacked = torch.stack(values)
    return stacked.max(dim=0).values if how == "max" else stacked.mean(dim=0)


class Plain:
    """The signal in plain Python: rows as dictionaries, and key signals after every forward."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.rows: dict[int, dict[int, float]] = {}  # query position -> token -> r[q, t]
        self.keys: dict[int, dict[int, float]] = {}  # length -> token -> number
        self.live: dict[int, list[int]] = {}
        self.redundancy: dict[int, dict[int, float]] = {}  # length -> token -> redundancy

    def watch(self, live: list[int], appended: int, output: Any) -> None:
        signal, cached = self.signal, output.past_key_values.layers
        num_heads = output.attentions[0].shape[1]
        heads = signal.heads or range(num_heads)
        self.live[live[-1] + 1] = list(live)
        of_layers = []
        for layer in signal.layers:
            if signal.of_keys:
                keys = cached[layer].keys[0].double()
                own = [keys[head * len(keys) // num_heads] for head in heads]
                values = [torch.from_numpy(of_keys(signal.kind, key.numpy())) for key in own]
            else:
                values = [output.attentions[layer][0, head].double() for head in heads]
            of_layers.append(over(values, signal.over_heads))
        if signal.is_mixed:
            keys_read = [
                cached[layer].keys[0].double()[head * cached[layer].keys.shape[1] // num_heads]
                for layer in signal.layers
                for head in heads
            ]
            repeated = np.mean([redundancy(key.numpy()) for key in keys_read], axis=0).tolist()
            self.redundancy[live[-1] + 1] = dict(zip(live, repeated, strict=True))
        found = over(of_layers, signal.over_layers).tolist()
        if signal.of_keys:
            self.keys[live[-1] + 1] = dict(zip(live, found, strict=True))
            return
        for row, query in zip(found, live[-appended:], strict=True):
            seen = [token for token in live if token <= query]
            self.rows[query] = dict(zip(seen, row, strict=False))

    def bounds(self, probed: list[int], length: int) -> dict[int, tuple[float, float]]:
        """Of every token the least and the greatest value that rounding allows."""
        if self.signal.of_keys:
            alone = {token: (value, value) for token, value in self.keys[length].items()}
        else:
            alone = {token: self._alone(probed, token) for token in self.live[probed[-1] + 1]}
        tokens, radius = sorted(alone), self.signal.pool_radius
        pooled = len(tokens) - max(self.signal.window_queries, 1) if radius else 0
        found = dict(alone)
        for place in range(pooled):
            around = tokens[max(0, place - radius) : min(pooled, place + radius + 1)]
            low, high = (
                max(side) if self.signal.pool == "max" else sum(side) / (2 * radius + 1)
                for side in zip(*(alone[t] for t in around), strict=True)
            )
            found[tokens[place]] = low, high
        if self.signal.is_mixed:
            share, repeated = self.signal.mix_lambda, self.redundancy[length]
            for token in repeated.keys() & found.keys():
                low, high = (share * side - (1 - share) * repeated[token] for side in found[token])
                found[token] = low, high
        return found

    def _alone(self, probed: list[int], token: int) -> tuple[float, float]:
        queries = probed[-self.signal.window_queries :]
        kind, got = self.signal.definition, [self.rows[q].get(token, 0.0) for q in queries]
        rounding = 1e-4 if kind.counts else 0.0
        low, high = (
            of_queries(kind.name, [factor * a for a in got], [len(self.rows[q]) for q in queries])
            for factor in (1 - rounding, 1 + rounding)
        )
        return low, high


@pytest.mark.parametrize("case", CASES)
def test_reported_signal_equals_its_definition(
    case: str, recorder: Recorder, probe: dict[str, Any], hf_model: Any
) -> None:
    requests = sorted(recorder.prompt_tokens, key=lambda name: int(name.split("-")[0]))
    first = list(CASES).index(case) * len(PROMPTS)
    reads = make_policy(*CASES[case]).reads
    assert reads is not None
    signal = replace(reads, layers=tuple(probe["layers"]), heads=tuple(probe.get("heads", ())))
    num_checked = 0
    for request, prompt in zip(requests[first:], PROMPTS, strict=False):
        log = recorder.log_of(request)
        assert len(log) > 3
        plain = Plain(signal)
        trace = reference.replay(log)
        reference.trace(hf_model, prompt, NUM_NEW, trace, watch=plain.watch)
        for length, scores in recorder.reports[request].items():
            if length < len(prompt):
                continue  # the reference computes the prompt at once
            decode = [t - 1 for t in recorder.probed[request] if len(prompt) < t <= length]
            probed = [*range(len(prompt)), *decode]
            bounds = plain.bounds(probed, length)
            assert len(scores) == max(bounds) + 1
            known = [token for token in plain.live[length] if token in bounds]
            low, high = np.array([bounds[token] for token in known]).T
            assert (scores[known] >= low - 2e-5 * np.maximum(1, abs(low))).all()
            assert (scores[known] <= high + 2e-5 * np.maximum(1, abs(high))).all()
            assert abs(scores[known]).max() > 0
            num_checked += len(known)
    assert num_checked > 500


def test_the_cost_of_a_probe_is_measured(recorder: Recorder) -> None:
    price = recorder.runtime.prices.document()["probe"]
    assert (price.per, price.source) == ("request", "measured")
    assert price.us > 0


@pytest.mark.parametrize("case", CASES)
def test_control_the_signal_of_another_layer_is_distinguished(
    case: str, recorder: Recorder, probe: dict[str, Any], hf_model: Any
) -> None:
    other = {**probe, "layers": [LAYERS[0], LAYERS[1] + 1]}
    with pytest.raises(AssertionError):
        test_reported_signal_equals_its_definition(case, recorder, other, hf_model)


@pytest.mark.parametrize("case", ["tova, maxima", "knorm", "r_kv"])
def test_control_the_signal_of_other_heads_is_distinguished(
    case: str, recorder: Recorder, probe: dict[str, Any], hf_model: Any
) -> None:
    other = {**probe, "heads": [0, 1]}
    with pytest.raises(AssertionError):
        test_reported_signal_equals_its_definition(case, recorder, other, hf_model)
