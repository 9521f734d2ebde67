"""Settings: policies with the share of the prompt that they keep; keys of model and dtype."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from vtoken.policies import Policy, make_policy, policy_names
from vtoken_bench.grounds.model_files import fingerprint
from vtoken_bench.target import Target

INTERVAL_TOKENS = 8
# The paper's parameters where a default differs.
PAPER_PARAMS: dict[str, dict[str, Any]] = {
    "fastgen": {"queries": 512},
    "h2o": {"recent_ratio": 0.5, "sinks": 0, "pool_radius": 0},
    "keydiff": {"recent": 1, "heads": "mean", "pool_radius": 0, "anchor": "live"},
    "knorm": {"recent": 1, "pool_radius": 0},
    "r_kv": {"window": 8, "mix_lambda": 0.1, "pool": "max", "pool_radius": 3},
    "scissorhands": {"history_queries": 400},
    "snapkv": {"window": 64, "pool_radius": 2},
    "tova": {"heads": "mean", "pool_radius": 0},
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


Tools = Literal["", "protected", "unprotected", "unprotected, as many tokens"]
ARMS: tuple[Tools, ...] = get_args(Tools)[1:]


@dataclass(frozen=True)
class Setting:
    """`policy` keeps the share `keep` of the prompt; the policy `none` keeps all of it.

    `tools`, of prompts that offer some: protected as shipped, or not, with the budget of that share
    or with as many tokens as protected ones keep.
    """

    label: str
    policy: Policy
    keep: float
    tools: Tools = ""

    @property
    def full(self) -> bool:
        return self.policy.name == "none"

    @property
    def protects_tools(self) -> bool:
        return self.tools in ("", "protected")

    def budget_tokens(self, num_prompt: int, num_tools: int = 0) -> int:
        """What a prompt of `num_prompt` tokens keeps beside protected tools; `num_tools`: how many
        of its tokens are such.
        """
        rest = num_prompt if self.tools == "unprotected" else num_prompt - num_tools
        budget = max(1, round(self.keep * rest))
        return budget + num_tools if self.tools == "unprotected, as many tokens" else budget

    def fits(self, num_prompt: int) -> bool:
        """Whether the budget reaches the policy's minimum."""
        return self.full or self.budget_tokens(num_prompt) >= self.policy.min_budget_tokens()

    def arguments(self, num_prompt: int, num_tools: int = 0) -> dict[str, Any]:
        """`vllm_xargs` of a request whose prompt has `num_prompt` tokens, `num_tools` of them of
        tools.
        """
        if self.full:
            return {"vtoken_policy": "none"}
        return {
            "vtoken_policy": self.policy.name,
            "vtoken_policy_params": json.dumps(self.policy.choice.params),
            "vtoken_budget_tokens": self.budget_tokens(num_prompt, num_tools),
            "vtoken_interval_tokens": INTERVAL_TOKENS,
            "vtoken_evict_when": "always",
        }

    def key(self) -> dict[str, Any]:
        """What an answer depends on besides its prompt."""
        if self.full:
            return {"policy": "none"}
        tools = {"tools": self.tools} if self.tools else {}
        return tools | {
            "policy": self.policy.name,
            "params": self.policy.choice.params,
            "keep": self.keep,
            "interval": INTERVAL_TOKENS,
        }


FULL = Setting("full cache", make_policy("none", {}), 1.0)


def parsed(text: str) -> tuple[str, Policy]:
    """Label and policy of `NAME` or `NAME:PARAM=VALUE,…`. Raises RefusedError."""
    name, _, rest = text.partition(":")
    params: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        param, _, value = pair.partition("=")
        try:
            params[param] = json.loads(value)
        except ValueError:
            params[param] = value
    shown = " ".join(f"{param}={value}" for param, value in params.items())
    return f"{name} {shown}".strip(), make_policy(name, params)


def every_policy() -> list[tuple[str, Policy]]:
    """All policies with their defaults, and with the papers' parameters where they differ."""
    found = [(name, make_policy(name, {})) for name in policy_names() if name != "none"]
    found += [
        (f"{name}, paper", make_policy(name, params))
        for name, params in PAPER_PARAMS.items()
        if name in policy_names()
    ]
    return found


def settings(policies: list[tuple[str, Policy]], keeps: list[float]) -> list[Setting]:
    return [Setting(label, policy, keep) for label, policy in policies for keep in keeps]


def with_tools(found: Sequence[Setting]) -> list[Setting]:
    """Each of `found` with tools protected and without."""
    return [replace(setting, tools=tools) for setting in found for tools in ARMS]


def model_key(model: Path) -> dict[str, str]:
    """The parts of a model that answers depend on: weights, tokenizer, template.

    Raises ValueError if the folder has no model.
    """
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = model / name
        digest.update(path.read_bytes() if path.is_file() else b"none")
    return {"model": fingerprint(model), "tokenizer": digest.hexdigest()[:16]}


def numbers_key(target: Target) -> dict[str, str]:
    """Device, dtype and graphs, on which answers depend; empty for float32 on CPU, the default."""
    if (target.device, target.dtype) == ("cpu", "float32"):
        return {}
    graphs = ", graphs" if target.graphs else ""
    return {"numbers": f"{target.device}, {target.dtype}{graphs}"}
