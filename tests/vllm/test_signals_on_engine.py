"""The signals that the worker reports during eviction, against Hugging Face attentions and keys.

The reference computes every signal again, query by query, in plain Python over the model's own
attention maps, under a mask with the tokens that each query saw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support import reference
from tests.support.drafting import NGRAM, SCRIPTS, use_drafts
from tests.support.engines import engine_args
from tests.support.live_sets import LiveSets, own_name
from tests.support.observe import Observer, scheduler_of
from tests.support.packages import install_example, installer
from tests.support.plain_signals import Forward, Plain
from tests.vllm.test_policies_exact import generate_under
from vtoken.policies import make_policy

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
    "every third step, and tokens come back": {"every_steps": 3},
    "some heads": {"heads": [0, 3]},
    "every second step, with drafts, and tokens come back": {"every_steps": 2},
}
PARKS = {"park_bytes": 1 << 26, "restore_after_ms": 0, "headroom_blocks": 4}
# By step: a wide budget brings back what a narrow one takes away.
BUDGETS = {30: {"budget_tokens": 100}, 34: {"budget_tokens": 48}, 40: {"budget_tokens": 100}}

Reports = dict[str, dict[int, npt.NDArray[np.float32]]]  # request -> tokens computed -> numbers


class Recorder(Observer):
    """Also records the reports, and the lengths after which a request's queries were probed.

    Both once it is known which drafts of their step were rejected: when the next step begins.
    `patches`: what is changed, by step.
    """

    def __init__(self, llm: Any, patches: dict[int, dict[str, Any]]) -> None:
        super().__init__(llm)
        self._control, self._patches = scheduler_of(llm).vtoken_controller, patches
        self._first_step = self.runtime.step
        self.reports: Reports = defaultdict(dict)
        self.probed: dict[str, list[int]] = defaultdict(list)
        self.outputs: list[list[int]] = []
        self._live_sets = LiveSets(scheduler_of(llm))
        self._lengths: dict[str, int] = {}  # before the newest step, of the requests it probed
        self._scores: dict[Any, Any] = {}  # of that step
        self._finish = self.runtime.finish_step
        self.runtime.finish_step = self._finish_step

    def changes(self, request: str) -> list[reference.Change]:
        """Of its live tokens."""
        (stretch,) = self._live_sets.stretches[own_name(request)]
        return stretch.changes

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
        if patch := self._patches.get(step - self._first_step):
            self._control.patch_config(patch)


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
    if how.endswith("come back"):
        config |= PARKS
    if "with drafts" in how:
        options["speculative_config"] = NGRAM
    with engine(enable_prefix_caching=False, **options, **engine_args(config)) as llm:
        if "speculative_config" in options:  # what was answered without drafts is drafted next
            prompts, cases = PROMPTS * len(CASES), [*CASES.values()]
            use_drafts(llm, prompts, [[]] * len(prompts), SCRIPTS["none"])
            answers = generate_under(llm, cases, PROMPTS, NUM_NEW)
            use_drafts(llm, prompts, answers, SCRIPTS["mixed"])
        recorder = Recorder(llm, BUDGETS if how.endswith("come back") else {})
        recorder.outputs = generate_under(llm, [*CASES.values()], PROMPTS, NUM_NEW)
    return recorder


@pytest.fixture(scope="module")
def forwards(recorder: Recorder, hf_model: Any) -> Callable[[str], list[Forward]]:
    """The forwards of a request, its victims replayed."""
    requests = recorder.in_order()

    @cache
    def of(request: str) -> list[Forward]:
        number = requests.index(request)
        prompt = PROMPTS[number % len(PROMPTS)]
        tokens, changes = prompt + recorder.outputs[number][:-1], recorder.changes(request)
        assert len(changes) > 3
        seen = reference.visible(len(tokens), changes)
        model = hf_model
        output = reference.run(
            model, tokens, 0, reference.new_cache(model), seen, num_rows=1, attentions=True
        )
        layers = range(LAYERS[0], LAYERS[-1] + 2)  # with the control's
        attentions = {n: output.attentions[n][0].double().numpy() for n in layers}
        keys = {n: output.past_key_values.layers[n].keys[0].double().numpy() for n in layers}
        first, found = 0, []
        for end in range(len(prompt), len(tokens) + 1):
            live = seen[end - 1].nonzero()[:, 0].tolist()
            rows = {n: each[:, first:end, live] for n, each in attentions.items()}
            found.append(Forward(live, end - first, rows, {n: k[:, live] for n, k in keys.items()}))
            first = end
        return found

    return of


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
            num_checked += plain.check(scores, probed, length)
    assert num_checked > 500


def test_tokens_came_back_where_they_should(how: str, recorder: Recorder) -> None:
    back = [sum(len(c.restored) for c in recorder.changes(r)) for r in recorder.in_order()]
    assert min(back) > 20 if how.endswith("come back") else sum(back) == 0


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
