"""The rules of one request: its own policy, budget, interval and spans, over the configuration.

The arguments come from the OpenAI API's `vllm_xargs`. A rule that a request does not set follows
the live configuration. A budget below what the current policy needs beside the protected tokens is
raised to that minimum, so that a live policy change never leaves a request without a valid budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import structs

from vtoken.base.errors import RefusedError, refused
from vtoken.core.config.prompt_parts import NO_PARTS, PromptParts
from vtoken.core.config.protection import NOTHING, PROTECT, Protection, protection
from vtoken.core.config.spans import check_apart, check_inside, merged, num_tokens, read_spans
from vtoken.core.config.token_sequences import Spans
from vtoken.core.config.values import VTokenConfig
from vtoken.policies import Policy, make_policy
from vtoken.wire import BudgetRatio, BudgetTokens, EvictWhen, IntervalTokens
from vtoken.wire.bounds import fault, read_json

PREFIX = "vtoken_"
FORGET = "vtoken_forget"
NO_POLICY = make_policy("none", {})


class Arguments(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename=lambda name: PREFIX + name,
):
    """The arguments of a request. Their names on the wire start with `vtoken_`."""

    policy: str | None = None
    policy_params: Any = None  # a JSON object, as text or parsed
    budget_tokens: BudgetTokens | None = None
    budget_ratio: BudgetRatio | None = None
    interval_tokens: IntervalTokens | None = None
    evict_when: EvictWhen | None = None
    protect: list[Any] | str | None = None  # spans of prompt tokens, see `read_spans`
    forget: list[Any] | str | None = None  # likewise
    report: Literal[0, 1] | bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt, as far as the rules need it.

    `find_parts` is called when a part may be protected. `is_embedded`: the prompt came as
    embeddings, so it has no token ids. `is_scored`: its log-probabilities are asked for, so nothing
    is evicted while it is computed.
    """

    num_tokens: int = 0
    find_parts: Callable[[], PromptParts] = lambda: NO_PARTS
    is_embedded: bool = False
    is_scored: bool = False


@dataclass(slots=True)
class RequestRules:
    """The rules of one request; None where it follows the live configuration.

    `forget`: tokens that die before all others, see `vtoken.core.runtime.ranking`. `report`:
    the answer says what the request kept. `session`: it is a streaming-input session.
    """

    policy: Policy | None = None
    budget_tokens: int | None = None
    interval_tokens: int | None = None
    budget_ratio: float | None = None
    evict_when: EvictWhen | None = None
    protect: Spans = ()
    forget: Spans = ()
    report: bool = False
    session: bool = False
    prompt: Prompt = Prompt()
    _merged: tuple[VTokenConfig, VTokenConfig, Protection] | None = field(
        default=None, init=False, repr=False
    )

    def under(self, config: VTokenConfig) -> VTokenConfig:
        """`config` with this request's rules applied; the same object if nothing differs."""
        return self._under(config)[1]

    def protection(self, config: VTokenConfig) -> Protection:
        """Which tokens of the request are never evicted under `config`."""
        return self._under(config)[2]

    def lacks_words(self, config: VTokenConfig) -> Policy | None:
        """The policy that `config` selects but that needs token ids which the prompt lacks."""
        policy = config.policy if self.policy is None else self.policy
        return policy if self.prompt.is_embedded and "token_ids" in policy.needs else None

    def check_prompt(self) -> None:
        """Raises RefusedError if the request's rules do not fit its prompt."""
        check_inside(self.protect, self.prompt.num_tokens, PROTECT)
        check_inside(self.forget, self.prompt.num_tokens, FORGET)
        policy = self.policy
        if policy is not None and self.lacks_words(VTokenConfig(policy=policy)):
            why = "needs token ids, which a prompt that is given as embeddings does not have"
            bound = "a policy that does not need token_ids"
            raise refused("vtoken_policy", policy.name, why, bound)

    def _under(self, config: VTokenConfig) -> tuple[VTokenConfig, VTokenConfig, Protection]:
        if self._merged is None or self._merged[0] is not config:
            self._merged = config, *self._merge(config)
        return self._merged

    def _merge(self, config: VTokenConfig) -> tuple[VTokenConfig, Protection]:
        policy = config.policy if self.policy is None else self.policy
        if self.lacks_words(config):
            policy = NO_POLICY
        interval = config.interval_tokens if self.interval_tokens is None else self.interval_tokens
        when = config.evict_when if self.evict_when is None else self.evict_when
        min_budget, named = policy.min_budget_tokens(), num_tokens(self.protect)
        parts = NO_PARTS
        if policy.name != "none" and any(structs.astuple(config.protect)):
            parts = self.prompt.find_parts()
        whole = merged(self.protect, parts.tools) if config.protect.tools else self.protect
        num_tools = num_tokens(whole) - named
        budget = max(self._budget(config, num_tools), named + min_budget) + num_tools
        protected = NOTHING
        if policy.name != "none":
            others = parts._replace(tools=())
            protected = protection(whole, others, config.protect, budget, min_budget)
        own = {
            "policy": policy,
            "budget_tokens": budget,
            "interval_tokens": interval,
            "evict_when": when,
            "evict_during": "decode" if self.prompt.is_scored else config.evict_during,
        }
        if all(getattr(config, name) == value for name, value in own.items()):
            return config, protected
        return structs.replace(config, **own), protected

    def _budget(self, config: VTokenConfig, num_tools: int) -> int:
        """The request's own budget in tokens, its own as a share, or the configuration's; a share
        is of what the prompt has besides `num_tools` protected tokens.
        """
        ratio = config.budget_ratio if self.budget_ratio is None else self.budget_ratio
        if self.budget_tokens is not None:
            return self.budget_tokens
        if ratio > 0:
            share = int(ratio * (self.prompt.num_tokens - num_tools))
            return max(config.budget_floor_tokens, share)
        return config.budget_tokens


def request_rules(arguments: Mapping[str, Any] | None) -> RequestRules | None:
    """The rules in `arguments`; None if no argument starts with `vtoken_`.

    Raises RefusedError naming the argument, its value and the bound. `RequestRules.check_prompt`
    checks what depends on the prompt.
    """
    ours = {key: value for key, value in (arguments or {}).items() if key.startswith(PREFIX)}
    if not ours:
        return None
    try:
        given = msgspec.convert(ours, Arguments)
    except msgspec.ValidationError as error:
        raise fault(error, ours, Arguments) from None
    policy, budget = _policy(given), given.budget_tokens
    protect = () if given.protect is None else read_spans(given.protect, PROTECT)
    forget = () if given.forget is None else read_spans(given.forget, FORGET)
    check_apart(forget, protect, FORGET)
    if budget is not None:
        _check_budget(budget, policy, given.budget_ratio, num_tokens(protect))
    return RequestRules(
        policy,
        budget,
        given.interval_tokens,
        given.budget_ratio,
        given.evict_when,
        protect,
        forget,
        bool(given.report),
    )


def _check_budget(budget: int, policy: Policy | None, ratio: float | None, protected: int) -> None:
    """Raises RefusedError if a request's own budget contradicts its other arguments."""
    if ratio:
        why = f"together with vtoken_budget_tokens = {budget}"
        raise refused("vtoken_budget_ratio", ratio, why, "one of the two, or 0")
    min_budget = 1 if policy is None else policy.min_budget_tokens()
    if policy is not None and budget < min_budget:
        why, bound = f"is too small for policy {policy.name}", f"at least {min_budget}"
        raise refused("vtoken_budget_tokens", budget, why, f"{bound} with these parameters")
    if budget < protected + min_budget:
        raise RefusedError(
            f"vtoken_budget_tokens = {budget} is too small for the {protected} tokens of "
            "vtoken_protect",
            field="vtoken_protect",
            value=protected,
            bound=f"at most {budget - min_budget} tokens under this budget",
        )


def _policy(given: Arguments) -> Policy | None:
    text = given.policy_params
    if given.policy is None:
        if text is not None:
            bound = "only together with vtoken_policy"
            raise refused("vtoken_policy_params", text, "needs vtoken_policy", bound)
        return None
    try:
        params = read_json(text) if isinstance(text, str) else text or {}
    except ValueError as error:
        why, bound = f"is not JSON: {error}", "a JSON object as text"
        raise refused("vtoken_policy_params", text, why, bound) from None
    try:
        return make_policy(given.policy, params)
    except RefusedError as error:
        path = str(error.field).removeprefix("policy.params")
        error.field = (
            "vtoken_policy" if error.field == "policy.name" else f"vtoken_policy_params{path}"
        )
        raise
