"""The policies by name: the built-in ones and those of other packages.

A package adds policies through the entry point group `vtoken.policies`; each entry names a `Policy`
subclass. Entries are loaded at the first use of the registry. An entry that fails to load is
reported by `describe_broken` and does not affect the others, and so is one of `vtoken.signals`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec

from vtoken.base.errors import RefusedError, refused
from vtoken.policies.base import BUILT_IN, Policy, check_declared, needs_of, validate
from vtoken.policies.packages import load_group
from vtoken.policies.signals import broken_kinds
from vtoken.wire import FactsFound, PolicyInfo
from vtoken.wire.bounds import fault

GROUP = "vtoken.policies"


@cache
def _load_all() -> tuple[dict[str, type[Policy]], dict[str, str]]:
    """Policies by name, and the error of each entry point that failed to load."""
    found, broken = load_group(GROUP, Policy, BUILT_IN, _check)
    return BUILT_IN | found, broken


def _check(cls: type[Policy]) -> None:
    validate(cls)
    _describe(cls)


def policy_names() -> list[str]:
    return list(_load_all()[0])


def make_policy(name: Any, params: Any) -> Policy:
    """The policy `name` with `params`, a JSON object; raises RefusedError naming the field."""
    known, broken = _load_all()
    if not isinstance(name, str) or name not in known:
        reasons = [
            f"{origin}: {why}" for origin, why in broken.items() if origin.split(" ")[0] == name
        ]
        raise RefusedError(
            "; ".join([f"unknown policy {name!r}", *reasons]),
            field="policy.name",
            value=name,
            bound="one of " + ", ".join(known),
        )
    cls = known[name]
    if not isinstance(params, dict):
        raise refused("policy.params", params, "is not an object", "object")
    try:
        policy = cls(msgspec.convert(params, cls.Params, strict=True))
        check_declared(policy)
        return policy
    except msgspec.ValidationError as error:
        found = fault(error, params, cls.Params)
        is_field = found.field != "body"  # else the class itself refuses
        raise RefusedError(
            f"policy {name}: {found.detail if is_field else error}",
            field=f"policy.params.{found.field}" if is_field else "policy.params",
            value=found.value,
            bound=found.bound if is_field else str(error),
        ) from None
    except Exception as error:  # policies of other packages may raise anything
        raise RefusedError(
            f"policy {name} does not accept these parameters: {error!r}",
            field="policy.params",
            value=params,
            bound="parameters that the policy accepts",
        ) from None


def describe_policies() -> list[PolicyInfo]:
    """Name, summary, source, needs and parameter schema of every available policy."""
    return [_describe(cls) for cls in _load_all()[0].values()]


def describe_broken() -> list[PolicyInfo]:
    """The policies and signals of other packages that failed to load, each with its `error`."""
    return [
        PolicyInfo(
            name=name, summary="cannot be loaded", source="-", needs=[], params_schema={}, error=why
        )
        for name, why in (_load_all()[1] | broken_kinds()).items()
    ]


def _describe(cls: type[Policy]) -> PolicyInfo:
    schema, components = msgspec.json.schema_components([cls.Params])
    return PolicyInfo(
        name=cls.name,
        summary=cls.summary,
        source=cls.source,
        needs=[*needs_of(cls())],
        params_schema=components[schema[0]["$ref"].rsplit("/", 1)[-1]],
        facts=_facts().get(cls.name, []) if BUILT_IN.get(cls.name) is cls else [],
    )


@cache
def _facts() -> dict[str, list[FactsFound]]:
    """What answers under the built-in policies contained in the project's evaluation."""
    text = resources.files("vtoken.policies").joinpath("facts.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, list[FactsFound]])
