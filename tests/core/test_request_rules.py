"""A request's own policy, budget and interval over the live configuration."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.core.live import make_quiet
from vtoken.base.errors import RefusedError
from vtoken.core.config.request_rules import RequestRules, request_rules
from vtoken.core.config.values import default_config
from vtoken.policies import make_policy


def test_arguments_without_the_prefix_make_no_rules() -> None:
    assert request_rules(None) is None
    assert request_rules({}) is None
    assert request_rules({"kv_transfer_params": {}, "top_p_decay": 1}) is None


def test_what_a_request_does_not_set_follows_the_configuration() -> None:
    rules = request_rules({"vtoken_budget_tokens": 64})
    assert rules is not None
    config = replace(
        default_config(64), evict_when="always", policy=make_policy("streaming_llm", {})
    )
    assert rules.under(config).budget_tokens == 64
    assert rules.under(config).policy is config.policy
    later = replace(config, theta_f=0.5, policy=make_policy("random", {}))
    assert rules.under(later).policy.name == "random"
    assert rules.under(later).theta_f == 0.5


def test_a_live_policy_that_needs_more_raises_the_budget_to_its_minimum() -> None:
    rules = RequestRules(budget_tokens=3)
    config = replace(
        default_config(64),
        evict_when="always",
        policy=make_policy("random", {"sinks": 4, "recent": 16}),
    )
    assert rules.under(config).budget_tokens == 20


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"vtoken_policy": "h3o"}, "vtoken_policy"),
        ({"vtoken_policy": 7}, "vtoken_policy"),
        ({"vtoken_polizy": "h2o"}, "vtoken_polizy"),
        ({"vtoken_policy_params": "{}"}, "vtoken_policy_params"),
        (
            {"vtoken_policy": "streaming_llm", "vtoken_policy_params": "{"},
            "vtoken_policy_params",
        ),
        (
            {"vtoken_policy": "streaming_llm", "vtoken_policy_params": "[1]"},
            "vtoken_policy_params",
        ),
        (
            {"vtoken_policy": "streaming_llm", "vtoken_policy_params": '{"sinks": -1}'},
            "vtoken_policy_params.sinks",
        ),
        (
            {"vtoken_policy": "streaming_llm", "vtoken_policy_params": "\ud800"},
            "vtoken_policy_params",
        ),
        *(
            (
                {"vtoken_policy": "streaming_llm", "vtoken_policy_params": text},
                "vtoken_policy_params",
            )
            for depth in (300, 900, 950, 1000, 100_000)
            for text in ("[" * depth + "]" * depth, '{"sinks":' * depth + "1" + "}" * depth)
        ),
        ({"vtoken_budget_tokens": 0}, "vtoken_budget_tokens"),
        ({"vtoken_budget_tokens": 2.5}, "vtoken_budget_tokens"),
        ({"vtoken_budget_tokens": "64"}, "vtoken_budget_tokens"),
        ({"vtoken_budget_tokens": 1 << 40}, "vtoken_budget_tokens"),
        ({"vtoken_interval_tokens": -1}, "vtoken_interval_tokens"),
        ({"vtoken_evict_when": "sometimes"}, "vtoken_evict_when"),
        ({"vtoken_evict_when": ""}, "vtoken_evict_when"),
        ({"vtoken_evict_after_wait_ms": 5}, "vtoken_evict_after_wait_ms"),
        *(({"vtoken_report": value}, "vtoken_report") for value in (2, -1, "1", [1], 1.0, None)),
        (
            {
                "vtoken_policy": "streaming_llm",
                "vtoken_policy_params": '{"sinks": 8}',
                "vtoken_budget_tokens": 8,
            },
            "vtoken_budget_tokens",
        ),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedError) as caught:
        request_rules(arguments)
    assert caught.value.field is not None
    assert caught.value.field.startswith(field)
    assert caught.value.bound


def test_two_requests_under_different_rules_in_one_step() -> None:
    with make_quiet(num_blocks=64) as engine:
        engine.configure(policy={"name": "none"}, interval_tokens=0, evict_when="always")
        for name, arguments in {
            "small": {"vtoken_policy": "streaming_llm", "vtoken_budget_tokens": 32},
            "large": {"vtoken_policy": "sliding_window", "vtoken_budget_tokens": 64},
            "none": None,
        }.items():
            engine.runtime.announce(name, request_rules(arguments))
            engine.admit(name, 100)
        engine.steps(20)
        live = {table.request_id: table.num_live for table in engine.runtime.tables}
        assert live == {"small": 33, "large": 65, "none": 119}
        rows = {row.id: row for row in engine.reporter.rows()}
        assert rows["small"].policy == "streaming_llm"
        assert rows["large"].budget_tokens == 64
        engine.finish("small")
        engine.runtime.discard("small")
        assert set(engine.runtime.requests.own_policies) == {"large"}
