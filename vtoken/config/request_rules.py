"""One request's own policy, budget and interval, from the arguments that came with it.

Knows the configuration, not where the arguments travelled (the OpenAI API's `vllm_xargs`). What a
request does not set follows the live configuration. A budget that is smaller than what the policy
in force needs counts as that least budget, so that a live switch never strands a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs

from vtoken.bounds import fault, read_json
from vtoken.config.values import VTokenConfig
from vtoken.errors import RefusedError
from vtoken.policies import Policy, make_policy
from vtoken.wire import BudgetTokens, IntervalTokens

PREFIX = "vtoken_"


class Arguments(msgspec.Struct, frozen=True, kw_only=True, rename=lambda name: PREFIX + name):
    """What a request may bring along; it travels under these names, with `vtoken_` before them."""

    policy: str | None = None
    policy_params: Any = None  # a JSON object, as text or as it is
    budget_tokens: BudgetTokens | None = None
    interval_tokens: IntervalTokens | None = None


ARGUMENTS = tuple(item.encode_name for item in structs.fields(Arguments))


@dataclass(slots=True)
class RequestRules:
    """What one request asked for; None where it follows the live configuration."""

    policy: Policy | None = None
    budget_tokens: int | None = None
    interval_tokens: int | None = None
    _merged: tuple[VTokenConfig, VTokenConfig] | None = field(default=None, repr=False)

    def under(self, config: VTokenConfig) -> VTokenConfig:
        """`config` with this request's own choices in it."""
        if self._merged is None or self._merged[0] is not config:
            policy = config.policy if self.policy is None else self.policy
            budget = config.budget_tokens if self.budget_tokens is None else self.budget_tokens
            interval = self.interval_tokens
            merged = structs.replace(
                config,
                policy=policy,
                budget_tokens=max(budget, policy.min_budget_tokens()),
                interval_tokens=config.interval_tokens if interval is None else interval,
            )
            self._merged = config, merged
        return self._merged[1]


def request_rules(arguments: Mapping[str, Any] | None) -> RequestRules | None:
    """The rules in `arguments`, None when it names none of ours.

    `vtoken_policy`: name. `vtoken_policy_params`: its parameters, a JSON object as text.
    `vtoken_budget_tokens`, `vtoken_interval_tokens`: integers. Raises RefusedError naming the
    argument, its value and the bound.
    """
    ours = {key: value for key, value in (arguments or {}).items() if key.startswith(PREFIX)}
    if not ours:
        return None
    for key, value in ours.items():
        if key not in ARGUMENTS:
            raise RefusedError(
                f"unknown argument {key}", field=key, value=value, bound=", ".join(ARGUMENTS)
            )
    try:
        asked = msgspec.convert(ours, Arguments)
    except msgspec.ValidationError as error:
        raise fault(error, ours, Arguments) from None
    policy, budget = _policy(asked), asked.budget_tokens
    if policy is not None and budget is not None and budget < policy.min_budget_tokens():
        raise RefusedError(
            f"vtoken_budget_tokens = {budget} is too small for policy {policy.name}",
            field="vtoken_budget_tokens",
            value=budget,
            bound=f"at least {policy.min_budget_tokens()} with these parameters",
        )
    return RequestRules(policy, budget, asked.interval_tokens)


def _policy(asked: Arguments) -> Policy | None:
    text = asked.policy_params
    if asked.policy is None:
        if text is not None:
            raise RefusedError(
                "vtoken_policy_params needs vtoken_policy",
                field="vtoken_policy_params",
                value=text,
                bound="only together with vtoken_policy",
            )
        return None
    try:
        params = read_json(text) if isinstance(text, str) else text or {}
    except ValueError as error:
        raise RefusedError(
            f"vtoken_policy_params is not JSON: {error}",
            field="vtoken_policy_params",
            value=text,
            bound="a JSON object as text",
        ) from None
    try:
        return make_policy(asked.policy, params)
    except RefusedError as error:
        of_params = str(error.field).removeprefix("policy.params")
        error.field = (
            "vtoken_policy" if error.field == "policy.name" else f"vtoken_policy_params{of_params}"
        )
        raise
