"""The policies by name: the built-in ones and those that other packages offer.

Knows how a policy is made and described, nothing of what it does. A package offers policies in the
entry point group `vtoken.policies`, each naming a `Policy` subclass; they are loaded when somebody
first asks what there is. One that cannot be loaded is reported and not offered; the others are.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from vtoken.errors import RefusedError
from vtoken.policies.base import BUILT_IN, Policy, check_declared, needs_of, validate
from vtoken.wire import PolicyInfo

GROUP = "vtoken.policies"


@cache
def _known() -> tuple[dict[str, type[Policy]], dict[str, str]]:
    """Policies by name; and, by entry point, why others are not among them."""
    known, broken = dict(BUILT_IN), {}
    for point in entry_points(group=GROUP):
        try:
            cls = _load(point)
            if cls.name in known:
                raise ValueError(f"the name {cls.name!r} is taken")
            known[cls.name] = cls
        except (Exception, SystemExit) as error:  # other people's packages may raise anything
            broken[_origin(point)] = f"{type(error).__name__}: {error}"
    return known, broken


def reload() -> None:
    """Look for other packages' policies again when they are next asked for."""
    _known.cache_clear()


def _origin(point: EntryPoint) -> str:
    package = "unknown package" if point.dist is None else point.dist.name
    return f"{point.name} ({package})"


def _load(point: EntryPoint) -> type[Policy]:
    cls = point.load()
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise TypeError(f"{point.value} is not a subclass of vtoken.policies.Policy")
    if cls.name != point.name:
        raise ValueError(f"{point.value} calls itself {cls.name!r}")
    validate(cls)
    _describe(cls)
    return cls


def policy_names() -> list[str]:
    return list(_known()[0])


def make_policy(name: Any, params: Any) -> Policy:
    """The policy `name` with `params` (a JSON object); raises RefusedError naming the culprit."""
    known, broken = _known()
    if not isinstance(name, str) or name not in known:
        reasons = [f"{who}: {why}" for who, why in broken.items() if who.split(" ")[0] == name]
        raise RefusedError(
            "; ".join([f"unknown policy {name!r}", *reasons]),
            field="policy.name",
            value=name,
            bound="one of " + ", ".join(known),
        )
    cls = known[name]
    if not isinstance(params, dict):
        raise RefusedError(
            "policy.params must be an object", field="policy.params", value=params, bound="object"
        )
    try:
        policy = cls(msgspec.convert(params, cls.Params, strict=True))
        check_declared(policy)
        return policy
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        name_in_path = path.rstrip("`").lstrip(".").split(".")[0]
        if "unknown field" in message:
            name_in_path = message.rsplit("`", 2)[-2]
            message = "parameters of this policy: " + (", ".join(_fields(cls)) or "none")
        raise RefusedError(
            f"policy {name}: parameter {name_in_path!r}: {message}",
            field=f"policy.params.{name_in_path}" if name_in_path else "policy.params",
            value=params.get(name_in_path),
            bound=message,
        ) from None
    except Exception as error:  # other people's policies may raise anything
        raise RefusedError(
            f"policy {name} cannot be made of these parameters: {error!r}",
            field="policy.params",
            value=params,
            bound="parameters that the policy accepts",
        ) from None


def _fields(cls: type[Policy]) -> list[str]:
    return [f.name for f in msgspec.structs.fields(cls.Params)]


def describe_policies() -> list[PolicyInfo]:
    """Name, summary, source, needs and parameter schema of every policy on offer."""
    return [_describe(cls) for cls in _known()[0].values()]


def describe_broken() -> list[PolicyInfo]:
    """What other packages offer and cannot be loaded, each with its `error`."""
    return [
        PolicyInfo(
            name=name, summary="cannot be loaded", source="-", needs=[], params_schema={}, error=why
        )
        for name, why in _known()[1].items()
    ]


def _describe(cls: type[Policy]) -> PolicyInfo:
    schema, components = msgspec.json.schema_components([cls.Params])
    return PolicyInfo(
        name=cls.name,
        summary=cls.summary,
        source=cls.source,
        needs=[*needs_of(cls())],
        params_schema=components[schema[0]["$ref"].rsplit("/", 1)[-1]],
    )


def params_dict(policy: Policy) -> dict[str, Any]:
    return msgspec.structs.asdict(policy.params)
