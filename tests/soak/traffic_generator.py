"""All random choices of a soak: requests, changes and their times. One seed gives one sequence.

Patches follow the bounds of the configuration document, so a new field with a bound is covered
automatically.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vtoken.policies import make_policy
from vtoken.wire import Bound, ConfigDocument, Experiment, PolicyInfo, Protect
from vtoken.wire.bounds import bounds_of

BOS = 256
PRINTABLE = range(0x20, 0x7F)
FIXED = {"verify_ratio"}  # stays 1: every relocation is checked
# May be refused because their values do not fit each other.
NEEDS_BUDGET = {"policy", "shadow", "budget_tokens", "budget_ratio", "budget_floor_tokens"}
NUM_PREFIXES = 3
ALTERS = {
    "stop",
    "repetition_penalty",
    "structured_outputs",
}  # not the likeliest tokens
STOPS = {"stop", "stop_token_ids", "structured_outputs"}
GRAMMAR = "[a-z ]{1,60}"


@dataclass(frozen=True, slots=True)
class RequestDraw:
    """`sampling`: keyword arguments of vLLM's SamplingParams. The oracle checks greedy requests."""

    prompt: list[int]
    sampling: dict[str, Any]

    @property
    def greedy(self) -> bool:
        return self.sampling["temperature"] == 0.0 and not ALTERS & self.sampling.keys()

    def may_end(self, reason: str, num_tokens: int, max_model_len: int) -> bool:
        """Whether an answer may finish after `num_tokens` tokens for `reason`."""
        may_stop = bool(STOPS & self.sampling.keys()) or not self.sampling["ignore_eos"]
        if reason == "stop" and may_stop:
            return True
        expected: int = min(self.sampling["max_tokens"], max_model_len - len(self.prompt))
        return num_tokens == expected


class Chance:
    """Random draws for one engine of `max_model_len` tokens."""

    def __init__(self, seed: int, *, max_model_len: int) -> None:
        self.rng = random.Random(seed)
        self._max_model_len = max_model_len
        self._prefixes = [
            [BOS, *self.rng.choices(PRINTABLE, k=max_model_len)] for _ in range(NUM_PREFIXES)
        ]

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def request(self, policies: list[PolicyInfo]) -> RequestDraw:
        rng = self.rng
        longest = self._max_model_len
        most_new = rng.choice((4, 80, 200, longest // 3))
        num_new = rng.randint(1, most_new)
        most_prompt = rng.choice((8, 60, 200, longest))
        num_prompt = rng.randint(1, max(1, min(most_prompt, longest - num_new - 1)))
        prefix = rng.choice(self._prefixes)
        shared = rng.randint(0, num_prompt) if rng.random() < 0.6 else 0
        prompt = prefix[:shared] + rng.choices(PRINTABLE, k=num_prompt - shared)
        sampling: dict[str, Any] = {
            "temperature": 0.0 if rng.random() < 0.75 else 0.8,
            "max_tokens": num_new,
            "ignore_eos": True,
            "detokenize": False,
        }
        # No per-request seed: with chunked prefill it ends vLLM's CPU engine.
        if rng.random() < 0.1:
            sampling |= {"stop": [chr(rng.choice(PRINTABLE))], "detokenize": True}
        elif rng.random() < 0.05:
            sampling["logprobs"] = 2
        if rng.random() < 0.2:
            sampling["extra_args"] = self._own_rules(policies, num_prompt)
        return RequestDraw(prompt, sampling)

    def unusual(self, draw: RequestDraw) -> RequestDraw:
        """`draw` with rare options, some of which not every endpoint accepts."""
        rng, sampling = self.rng, dict(draw.sampling)
        if rng.random() < 0.05:
            sampling["prompt_logprobs"] = 1  # vLLM then skips the prefix cache for its prompt
        if rng.random() < 0.05:
            sampling["max_tokens"] = self._max_model_len  # ends at `max_model_len`
        what = rng.choice(("stop_token_ids", "eos", "penalty", "grammar", "n", *[None] * 20))
        if what == "stop_token_ids":
            sampling["stop_token_ids"] = rng.choices(PRINTABLE, k=3)
        elif what == "eos":
            sampling["ignore_eos"] = False
        elif what == "penalty":
            sampling["repetition_penalty"] = 1.3
        elif what == "grammar":
            sampling["structured_outputs"] = {"regex": GRAMMAR}
        elif what == "n" and sampling["temperature"] > 0.0:
            sampling["n"] = rng.choice((2, 3))
        return RequestDraw(draw.prompt, sampling)

    def _own_rules(self, policies: list[PolicyInfo], num_prompt: int) -> dict[str, Any]:
        """`vllm_xargs` of a request: its own policy, budget, interval and one span."""
        rng = self.rng
        out: dict[str, Any] = {"vtoken_budget_tokens": rng.choice((40, 64, 96))}
        if rng.random() < 0.7:
            name = out["vtoken_policy"] = rng.choice(policies).name
            least = make_policy(name, {}).min_budget_tokens()
            out["vtoken_budget_tokens"] = max(out["vtoken_budget_tokens"], least)
        if rng.random() < 0.3:
            out["vtoken_interval_tokens"] = rng.choice((0, 8))
        if rng.random() < 0.3:
            out["vtoken_evict_when"] = rng.choice(("pressure", "always"))
        if rng.random() < 0.3:
            start = rng.randrange(num_prompt)
            end = min(num_prompt, start + rng.randint(1, 8))
            out["vtoken_protect"] = [start, end]
            out["vtoken_budget_tokens"] += end - start  # the policy's own minimum remains
        elif rng.random() < 0.3:
            start = rng.randrange(num_prompt)
            out["vtoken_forget"] = [start, min(num_prompt, start + rng.randint(1, 40))]
        return out

    def patch(
        self, config: ConfigDocument, policies: list[PolicyInfo], *, keeps: Sequence[str] = ()
    ) -> dict[str, Any]:
        """A merge patch of one to four fields, none of `keeps`."""
        others = (*FIXED, *keeps)
        names = [name for name in config.bounds if name not in others]
        chosen = self.rng.sample(names, k=min(len(names), self.rng.randint(1, 4)))
        return {name: self._value(name, config.bounds[name], policies) for name in chosen}

    def bad_patch(self) -> dict[str, Any]:
        """A patch that every engine must refuse entirely."""
        wrong: dict[str, Any] = self.rng.choice(
            (
                {"theta_f": 1.5},
                {"policy": {"name": "h3o"}},
                {"batch_size": 0, "theta_f": 0.9},
                {"recycle": "perhaps"},
                {"colour": "red"},
                {"budget_tokens": -4},
            )
        )
        return wrong

    def _value(self, name: str, bound: Bound, policies: list[PolicyInfo]) -> Any:
        rng = self.rng
        if name == "policy":
            evicting = [policy for policy in policies if policy.name != "none"]
            policy = rng.choice(policies if rng.random() < 0.3 else evicting)
            return {"name": policy.name, "params": self._params(policy)}
        if name == "shadow":
            policy = rng.choice(policies)
            return rng.choice((None, {"name": policy.name, "params": self._params(policy)}))
        if name == "probe":
            layers = rng.choice(([], [0], [0, 1]))
            heads = rng.choice(([], [], [0]))
            return {"layers": layers, "heads": heads, "every_steps": rng.choice((1, 1, 2, 5))}
        if name == "protect":
            return {part: rng.random() < 0.5 for part in Protect.__struct_fields__}
        if name == "experiment":
            return {part: self._by_bound(bound) for part, bound in bounds_of(Experiment).items()}
        if name == "canary":
            return {"share": rng.choice((0.0, 0.0, 0.5)), "control_share": rng.random()}
        if name == "budget_ratio":
            return rng.choice((0.0, 0.0, 0.3, 0.6))
        if name == "budget_floor_tokens":
            return rng.choice((24, 40, 64))
        if name == "budget_tokens":
            return rng.choice((16, 24, 32, 48, 64, rng.randint(16, 128)))
        if name == "interval_tokens":
            return rng.choice((0, 1, 4, 16, 48))
        if name == "low_watermark_blocks":
            return rng.randint(0, int(bound.maximum or 0))
        if name == "theta_f":
            return rng.choice((0.0, 0.0, 0.0, 0.25, rng.random()))
        if name == "evict_after_wait_ms":
            return rng.choice((0, 0, 50, 1000))
        if name == "evict_per_token_left":
            return rng.choice((1, 4, 8, 8, 64, int(bound.maximum or 1)))
        if name == "park_bytes":
            return rng.choice((0, 1 << 16, 1 << 20, 1 << 26, 1 << 26, int(bound.maximum or 0)))
        if name == "restore_after_ms":
            return rng.choice((0, 0, 0, 50, 500))
        if name == "slo":
            return rng.choice(("", "ttft<2s", "ttft<500 ms, itl<80ms"))
        if name == "recycle":
            return rng.random() < 0.35  # recycling leaves little to relocate
        if name == "reclamation":
            return rng.choice(("auto", "auto", "auto", "paused", "off"))
        return self._by_bound(bound)

    def _by_bound(self, bound: Bound) -> Any:
        rng = self.rng
        if bound.type == "enum":
            return rng.choice(bound.choices or [])
        if bound.type == "bool":
            return rng.random() < 0.5
        low, high = bound.minimum or 0, bound.maximum or 0
        if bound.type == "int":
            return rng.choice((int(low), int(high), rng.randint(int(low), int(high))))
        return rng.uniform(low, high)

    def _params(self, policy: PolicyInfo) -> dict[str, Any]:
        """Some of the policy's parameters, within its schema."""
        rng = self.rng
        params: dict[str, Any] = {}
        for name, schema in policy.params_schema.get("properties", {}).items():
            if rng.random() < 0.5:
                continue
            low, high = schema.get("minimum"), schema.get("maximum")
            if "enum" in schema:
                params[name] = rng.choice(schema["enum"])
            elif schema.get("type") == "boolean":
                params[name] = rng.random() < 0.5
            elif low is not None and schema.get("type") == "integer":
                params[name] = rng.randint(low, min(16, low + 16 if high is None else high))
            elif low is not None and high is not None:
                params[name] = round(rng.uniform(low, high), 3)
        return params
