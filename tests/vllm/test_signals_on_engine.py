"""The signals that the worker reports during eviction, against Hugging Face attentions and keys.

The reference replays the logged victims and computes every signal again, query by query, in plain
Python over the model's own attention maps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support import reference
from tests.support.drafting import NGRAM, SCRIPTS, use_drafts
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
    "keydiff, all tokens seen": ("keydiff", {"heads": "mean", "anchor": "seen"}),
    "a signal of another package": ("least_attention", {}),
}
PROBES: dict[str, dict[str, Any]] = {
    "every step": {"every_steps": 1},
    "every third step": {"every_steps": 3},
    "some heads": {"heads": [0, 3]},
    "every second step, with drafts": {"every_steps": 2},
}

Reports = dict[str, dict[int, npt.NDArray[np.float32]]]  # request -> tokens computed -> numbers


class Recorder(Observer):
    """Also records the reports, and the lengths after which a request's queries were probed.

    Both once it is known which drafts of their step were rejected: when the next step begins.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.reports: Reports = defaultdict(dict)
        self.probed: dict[str, list[int]] = defaultdict(list)
        self._lengths: dict[str, int] = {}  # before the newest step, of the requests it probed
        self._scores: dict[Any, Any] = {}  # of that step
        self._finish = self.runtime.finish_step
        self.runtime.finish_step = self._finish_step

    def in_order(self) -> list[str]:
        """The requests in the order in which they were asked."""
        return sorted(self.prompt_tokens, key=lambda name: int(name.split("-")[0]))

    def _commit_step(self, grown: Any) -> Any:
        lengths = {t.request_id: t.num_tokens for t in self.runtime.tables}
        for request, length in self._lengths.items():
            self.probed[request] += range(length + 1, lengths.get(request, 0) + 1)
        for (request, _), scores in self._scores.items():
            if request in lengths:
                self.reports[request][lengths[request]] = scores
        plan = super()._commit_step(grown)
        self._lengths = {request: lengths.get(request, 0) for request in plan.probed}
        self._scores = {}
        return plan

    def _finish_step(self, report: Any, step: int) -> None:
        self._scores = report.scores
        self._finish(report, step)


@pytest.fixture(scope="module", autouse=True)
def _other_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installer(tmp_path_factory.mktemp("package")) as install:
        install_example(install, "signal")
        yield


@pytest.fixture(scope="module", params=PROBES)
def how(request: Any) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def probe(how: str) -> dict[str, Any]:
    return {"layers": LAYERS, **PROBES[how]}


@pytest.fixture(scope="module")
def recorder(how: str, probe: dict[str, Any], engine: Any) -> Recorder:
    """Every case and prompt in one batch; prompts are computed in chunks of 200 tokens a step."""
    config = {"budget_tokens": 48, "interval_tokens": 4, "evict_when": "always", "probe": probe}
    options: dict[str, Any] = {"max_num_batched_tokens": 200, "enable_chunked_prefill": True}
    if how.endswith("with drafts"):
        options["speculative_config"] = NGRAM
    with engine(enable_prefix_caching=False, **options, **engine_args(config)) as llm:
        if "speculative_config" in options:  # what was answered without drafts is drafted next
            prompts, cases = PROMPTS * len(CASES), [*CASES.values()]
            use_drafts(llm, prompts, [[]] * len(prompts), SCRIPTS["none"])
            answers = generate_under(llm, cases, PROMPTS, NUM_NEW)
            use_drafts(llm, prompts, answers, SCRIPTS["mixed"])
        recorder = Recorder(llm)
        generate_under(llm, [*CASES.values()], PROMPTS, NUM_NEW)
    return recorder


@dataclass(frozen=True)
class Forward:
    """What the reference's model computed in one forward: `live` tokens, the last `appended` of
    them new.
    """

    live: list[int]
    appended: int
    attentions: dict[int, torch.Tensor]  # layer -> [head, query, token]
    keys: dict[int, torch.Tensor]  # layer -> [KV head, token, D]


@pytest.fixture(scope="module")
def forwards(recorder: Recorder, hf_model: Any) -> Callable[[str], list[Forward]]:
    """The forwards of a request, its victims replayed."""
    requests = recorder.in_order()

    @cache
    def of(request: str) -> list[Forward]:
        found = []

        def watch(live: list[int], appended: int, output: Any) -> None:
            layers = range(LAYERS[0], LAYERS[-1] + 2)  # with the control's
            attentions = {n: output.attentions[n][0].double() for n in layers}
            keys = {n: output.past_key_values.layers[n].keys[0].double() for n in layers}
            found.append(Forward(list(live), appended, attentions, keys))

        log, prompt = recorder.log_of(request), PROMPTS[requests.index(request) % len(PROMPTS)]
        assert len(log) > 3
        reference.trace(hf_model, prompt, NUM_NEW, reference.replay(log), watch=watch)
        return found

    return of


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
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)  # layer, KV head

    def add(self, forward: Forward) -> None:
        signal, live = self.signal, forward.live
        num_heads = len(forward.attentions[signal.layers[0]])
        heads = signal.heads or range(num_heads)

        def keys_of(layer: int) -> list[torch.Tensor]:
            keys = forward.keys[layer]
            return [keys[head * len(keys) // num_heads] for head in heads]

        def seen_of(layer: int) -> list[Any]:
            if signal.anchor == "live":
                return [None] * len(heads)
            num_kv_heads = len(forward.keys[layer])
            return [np.array(self.seen[layer, h * num_kv_heads // num_heads]) for h in heads]

        for layer, keys in forward.keys.items():
            for head, key in enumerate(keys):
                self.seen[layer, head] += [*key[len(key) - forward.appended :]]

        self.live[live[-1] + 1] = live
        of_layers = []
        for layer in signal.layers:
            if signal.of_keys:
                read = zip(keys_of(layer), seen_of(layer), strict=True)
                found = [of_keys(signal.kind, key.numpy(), seen) for key, seen in read]
                values = [torch.from_numpy(each) for each in found]
            else:
                values = [forward.attentions[layer][head] for head in heads]
            of_layers.append(over(values, signal.over_heads))
        if signal.is_mixed:
            keys_read = [key for layer in signal.layers for key in keys_of(layer)]
            repeated = np.mean([redundancy(key.numpy()) for key in keys_read], axis=0).tolist()
            self.redundancy[live[-1] + 1] = dict(zip(live, repeated, strict=True))
        numbers = over(of_layers, signal.over_layers).tolist()
        if signal.of_keys:
            self.keys[live[-1] + 1] = dict(zip(live, numbers, strict=True))
            return
        for row, query in zip(numbers, live[-forward.appended :], strict=True):
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
    case: str, recorder: Recorder, probe: dict[str, Any], forwards: Callable[[str], list[Forward]]
) -> None:
    requests = recorder.in_order()
    first = list(CASES).index(case) * len(PROMPTS)
    reads = make_policy(*CASES[case]).reads
    assert reads is not None
    signal = replace(reads, layers=tuple(probe["layers"]), heads=tuple(probe.get("heads", ())))
    num_checked = 0
    for request, prompt in zip(requests[first:], PROMPTS, strict=False):
        plain = Plain(signal)
        for forward in forwards(request):
            plain.add(forward)
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
    case: str, recorder: Recorder, probe: dict[str, Any], forwards: Callable[[str], list[Forward]]
) -> None:
    other = {**probe, "layers": [LAYERS[0], LAYERS[1] + 1]}
    with pytest.raises(AssertionError):
        test_reported_signal_equals_its_definition(case, recorder, other, forwards)


@pytest.mark.parametrize("case", ["tova, maxima", "knorm", "r_kv"])
def test_control_the_signal_of_other_heads_is_distinguished(
    case: str, recorder: Recorder, probe: dict[str, Any], forwards: Callable[[str], list[Forward]]
) -> None:
    other = {**probe, "heads": [0, 1]}
    with pytest.raises(AssertionError):
        test_reported_signal_equals_its_definition(case, recorder, other, forwards)
