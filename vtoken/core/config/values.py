"""The runtime configuration: one frozen value, its bounds, and the all-or-nothing merge patch.

`vtoken.wire.Configuration` declares the fields. A patch yields a complete, valid configuration or
raises `RefusedError` naming field, value and bound.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
from msgspec import structs

from vtoken.base.errors import RefusedError, refused
from vtoken.policies import Policy, make_policy, policy_names
from vtoken.wire import (
    Bound,
    Configuration,
    ConfigValues,
    PolicyChoice,
    pool_limits,
)
from vtoken.wire.bounds import bounds_of, fault, takes
from vtoken.wire.objectives import Objectives, parse_objectives

# Settings that decide whether a budget is large enough for the policies.
OF_BUDGET = {"policy", "shadow", "budget_tokens", "budget_ratio", "budget_floor_tokens"}


class VTokenConfig(Configuration[Policy], frozen=True, kw_only=True, dict=True):
    """The configuration as the engine holds it, with `Policy` objects."""

    policy: Policy = msgspec.field(default_factory=lambda: make_policy("none", {}))

    def values(self) -> ConfigValues:
        """The configuration on the wire, made once: do not write to it."""
        return self._values

    @cached_property
    def _values(self) -> ConfigValues:
        shadow = None if self.shadow is None else self.shadow.choice
        fields = structs.asdict(self) | {"policy": self.policy.choice, "shadow": shadow}
        return ConfigValues(**fields)

    @cached_property
    def objectives(self) -> Objectives:
        """The objectives of latency."""
        return parse_objectives(self.slo)

    @property
    def evicts(self) -> bool:
        return self.policy.name != "none"

    @property
    def evicts_under_pressure(self) -> bool:
        """Whether a request of these rules loses tokens only for blocks that are short."""
        return self.evicts and self.evict_when == "pressure"

    @property
    def gives(self) -> bool:
        """Whether it may lose them now: without reclamation, what died would free too little."""
        return self.evicts_under_pressure and self.reclamation == "auto"

    @property
    def recycles(self) -> bool:
        """Whether a new token may be written to a dead slot of its request."""
        return self.recycle and self.reclamation != "off"


# What docs/choose.md recommends for traffic that is not known.
AUTO_PATCH: dict[str, Any] = {
    "policy": {"name": "keydiff", "params": {}},
    "budget_ratio": 0.5,
    "evict_when": "pressure",
}


def default_config(num_blocks: int) -> VTokenConfig:
    """Evict nothing, reclaim when the pool runs low."""
    limits = pool_limits(num_blocks)
    return structs.replace(VTokenConfig(), **{name: x.default for name, x in limits.items()})


def bounds(num_blocks: int, num_layers: int, num_heads: int | None = None) -> dict[str, Bound]:
    """The bounds of every field; `merge_patch` enforces the same ones.

    `num_heads`: query heads of the model; None if unknown, and then any head number is accepted.
    """
    found = bounds_of(ConfigValues)
    for name, limits in pool_limits(num_blocks).items():
        found[name].maximum = limits.maximum
    found["policy"].choices = found["shadow"].choices = policy_names()
    probe = found["probe"]
    probe.summary = probe.summary.replace("L-1", f"{num_layers - 1}")
    if num_heads is not None:
        probe.summary = probe.summary.replace("H-1", f"{num_heads - 1}")
    return found


def merge_patch(
    config: VTokenConfig,
    patch: Any,
    *,
    num_blocks: int,
    num_layers: int,
    num_heads: int | None = None,
) -> VTokenConfig:
    """`config` with the complete JSON merge patch applied; raises RefusedError."""
    if not isinstance(patch, dict):
        raise _refuse("body", patch, "a JSON object")
    before = config.values()
    document = _merged(_target(before, patch), patch)
    values = _converted(document, num_blocks, num_layers, num_heads)
    probe = structs.replace(
        values.probe,
        layers=sorted({*values.probe.layers}),
        heads=sorted({*values.probe.heads}),
    )
    slo = parse_objectives(values.slo).text
    policy, shadow = config.policy, config.shadow
    if values.policy != before.policy:
        policy = make_policy(values.policy.name, values.policy.params)
    if values.shadow != before.shadow:
        shadow = _shadow(values.shadow)
    fields = {name: getattr(values, name) for name in Configuration.__struct_fields__}
    own = {"policy": policy, "shadow": shadow, "probe": probe, "slo": slo}
    merged = VTokenConfig(**fields | own)
    if not OF_BUDGET.isdisjoint(patch):
        _require_budget(merged)
    return merged


def _require_budget(config: VTokenConfig) -> None:
    """Raises RefusedError for a budget that is too small for the policy or the shadow."""
    budget = "budget_floor_tokens" if config.budget_ratio > 0 else "budget_tokens"
    for role, chosen in (("policy", config.policy), ("shadow", config.shadow)):
        min_budget = 1 if chosen is None else chosen.min_budget_tokens()
        if chosen is not None and getattr(config, budget) < min_budget:
            raise _refuse(
                budget,
                getattr(config, budget),
                f"at least {min_budget}, which {role} {chosen.name} needs with these parameters",
            )


def _converted(
    document: dict[str, Any], num_blocks: int, num_layers: int, num_heads: int | None
) -> ConfigValues:
    """`document` as a struct, checked against the bounds of fields, pool and model."""
    numbers = {"layers": num_layers, "heads": num_heads}
    try:
        values = msgspec.convert(document, ConfigValues)
    except msgspec.ValidationError as error:
        found = fault(error, document, ConfigValues)
        field = found.field or ""
        for name, count in numbers.items():
            if field == f"probe.{name}":
                raise _refuse_numbers(name, found.value, count) from None
        limits = bounds(num_blocks, num_layers)
        if field in limits:
            raise _refuse(field, found.value, takes(limits[field])) from None
        raise found from None
    for name, of_pool in pool_limits(num_blocks).items():
        value = getattr(values, name)
        if value > of_pool.maximum:
            raise _refuse(name, value, takes(bounds(num_blocks, num_layers)[name]))
    for name, count in numbers.items():
        chosen: list[int] = getattr(values.probe, name)
        if count is not None and any(number >= count for number in chosen):
            raise _refuse_numbers(name, chosen, count)
    return values


def _target(values: ConfigValues, patch: dict[str, Any]) -> dict[str, Any]:
    """The document that `patch` is merged into: a new policy starts from its own defaults."""
    document = {
        name: msgspec.to_builtins(getattr(values, name)) for name in Configuration.__struct_fields__
    }
    for role in ("policy", "shadow"):
        change = patch.get(role)
        if isinstance(change, dict):
            current = document[role] or {"name": "none", "params": {}}
            name = change.get("name", current["name"])
            document[role] = current if name == current["name"] else {"name": name, "params": {}}
    return document


def _merged(target: dict[str, Any], patch: dict[str, Any], path: str = "") -> dict[str, Any]:
    """RFC 7396 over a document that has every field: unknown names are refused, null is a value.

    Only a policy's parameters follow the RFC fully: null removes one, so that it has its default.
    """
    merged = dict(target)
    for name, value in patch.items():
        if path.endswith("params."):
            merged.pop(name, None)
            if value is not None:
                merged[name] = value
            continue
        if name not in target:
            raise _refuse(f"{path}{name}", value, "a known field: " + ", ".join(target))
        both = isinstance(value, dict) and isinstance(target[name], dict)
        merged[name] = _merged(target[name], value, f"{path}{name}.") if both else value
    return merged


def _shadow(choice: PolicyChoice | None) -> Policy | None:
    """The shadow policy; None for null and for `none`, which evicts nothing."""
    if choice is None:
        return None
    try:
        shadow = make_policy(choice.name, choice.params)
    except RefusedError as error:
        error.field = (error.field or "policy").replace("policy", "shadow", 1)
        raise
    return None if shadow.name == "none" else shadow


def _refuse(name: str, value: Any, bound: str) -> RefusedError:
    return refused(name, value, f"is not {bound}", bound)


def _refuse_numbers(name: str, value: Any, count: int | None) -> RefusedError:
    within = "of at least 0" if count is None else f"in 0..{count - 1}"
    return _refuse(f"probe.{name}", value, f"a list of {name} {within}")
