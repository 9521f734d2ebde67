"""The signals that the worker reports, against Hugging Face attentions and keys, eviction going on.

The reference replays the logged victims and computes every signal again from the definitions in
`vtoken.policies.signals`, query by query, in plain Python over the model's own attention maps.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support import reference
from tests.support.observe import Observer
from tests.vllm.test_policies_exact import generate_under
from vtoken.vllm import engine_args

pytestmark = pytest.mark.vllm

NUM_NEW = 40
LAYERS = [1, 2]
PROMPTS = [reference.random_prompt(150, 3), reference.random_prompt(70, 4)]
POLICIES: dict[str, dict[str, Any]] = {
    "h2o": {},
    "tova": {},
    "snapkv": {"window": 24},
    "scissorhands": {"history_queries": 40},
    "knorm": {},
    "keydiff": {},
}
EVERY_STEPS = {"every step": 1, "every third step": 3}

Reports = dict[str, dict[int, npt.NDArray[np.float32]]]  # request -> tokens computed -> numbers


class Recorder(Observer):
    """Sees the reports too, and after which lengths a request's queries were probed."""

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


@pytest.fixture(scope="module", params=EVERY_STEPS)
def recorder(request: Any, engine: Any) -> Recorder:
    """Every policy and prompt in one batch; prompts are computed in chunks of 200 tokens a step."""
    config = {
        "budget_tokens": 48,
        "interval_tokens": 4,
        "probe": {"layers": LAYERS, "every_steps": EVERY_STEPS[request.param]},
    }
    chunks = {"max_num_batched_tokens": 200, "enable_chunked_prefill": True}
    with engine(enable_prefix_caching=False, **chunks, **engine_args(config)) as llm:
        recorder = Recorder(llm)
        generate_under(llm, POLICIES, PROMPTS, NUM_NEW)
    return recorder


class Plain:
    """Rows as dictionaries, and key signals after every forward."""

    layers = LAYERS

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, float]] = {}  # query position -> token -> r[q, t]
        self.keys: dict[str, dict[int, dict[int, float]]] = {"knorm": {}, "keydiff": {}}
        self.live: dict[int, list[int]] = {}

    def watch(self, live: list[int], appended: int, output: Any) -> None:
        total = sum(output.attentions[layer][0].double().mean(dim=0) for layer in self.layers)
        for row, query in zip(total.tolist(), live[-appended:], strict=True):
            seen = [token for token in live if token <= query]
            self.rows[query] = dict(zip(seen, row, strict=False))
        length = live[-1] + 1
        self.live[length] = list(live)
        keys = [output.past_key_values.layers[layer].keys[0].double() for layer in self.layers]
        norm = -sum(k.norm(dim=-1).mean(dim=0) for k in keys)
        cosine = 0
        for k in keys:
            mean = torch.stack([head / head.norm(dim=-1)[:, None] for head in k]).mean(dim=1)
            for head, direction in zip(k, mean, strict=True):
                dots = head @ direction / (head.norm(dim=-1) * direction.norm())
                cosine = cosine - dots / len(k)
        self.keys["knorm"][length] = dict(zip(live, norm.tolist(), strict=True))
        self.keys["keydiff"][length] = dict(zip(live, cosine.tolist(), strict=True))

    def attention(self, policy: str, probed: list[int], token: int) -> tuple[float, float]:
        """The signal's least and greatest value that rounding allows."""
        if policy == "h2o":
            value = sum(self.rows[q].get(token, 0.0) for q in probed)
        elif policy == "tova":
            value = self.rows[probed[-1]].get(token, 0.0)
        elif policy == "snapkv":
            window = probed[-24:]
            value = sum(self.rows[q].get(token, 0.0) for q in window) / len(window)
        else:
            shares = [
                self.rows[q].get(token, 0.0) / len(LAYERS) * len(self.rows[q]) for q in probed[-40:]
            ]
            return sum(s >= 1.0001 for s in shares), sum(s >= 0.9999 for s in shares)
        return value, value


@pytest.mark.parametrize("policy", POLICIES)
def test_reported_signal_equals_its_definition(
    policy: str, recorder: Recorder, hf_model: Any
) -> None:
    requests = sorted(recorder.prompt_tokens, key=lambda name: int(name.split("-")[0]))
    first = list(POLICIES).index(policy) * len(PROMPTS)
    num_checked = 0
    for request, prompt in zip(requests[first:], PROMPTS, strict=False):
        log = recorder.log_of(request)
        assert len(log) > 3
        plain = Plain()
        trace = reference.replay(log)
        reference.trace(hf_model, prompt, NUM_NEW, trace, watch=plain.watch)
        for length, scores in recorder.reports[request].items():
            if length < len(prompt):
                continue  # the reference computes the prompt at once
            live = plain.live[length]
            if policy in plain.keys:
                expected = [plain.keys[policy][length][t] for t in live]
                np.testing.assert_allclose(scores[live], expected, rtol=0, atol=2e-5)
            else:
                decode = [t - 1 for t in recorder.probed[request] if len(prompt) < t <= length]
                probed = [*range(len(prompt)), *decode]
                assert len(scores) == probed[-1] + 1
                known = [t for t in live if t < len(scores)]
                bounds = [plain.attention(policy, probed, t) for t in known]
                low, high = np.array(bounds).T
                assert (scores[known] >= low - 2e-5 * np.maximum(1, abs(low))).all()
                assert (scores[known] <= high + 2e-5 * np.maximum(1, abs(high))).all()
                assert scores[known].max() > 0
            num_checked += len(live)
    assert num_checked > 500


@pytest.mark.parametrize("policy", POLICIES)
def test_control_the_signal_of_another_layer_is_told_apart(
    policy: str, recorder: Recorder, hf_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plain, "layers", [LAYERS[0], LAYERS[1] + 1])
    with pytest.raises(AssertionError):
        test_reported_signal_equals_its_definition(policy, recorder, hf_model)
