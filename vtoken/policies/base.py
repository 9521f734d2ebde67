"""What an eviction policy is: a pure function from a view of one request to its victims.

A policy knows logical token ids only: no blocks, no slots, no vLLM. One file a policy, one class,
registered by `@register`.

Invariants of every policy's answer, checked by the runtime before a token dies:
1. victims are live tokens of the view, each once
2. len(victims) == len(view.token_ids) - view.budget_tokens
3. the newest token is never a victim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from vtoken.errors import RefusedError
from vtoken.wire import PolicyInfo

TokenIds = npt.NDArray[np.int64]
Need = Literal["attention", "keys", "token_ids"]


@dataclass(frozen=True, slots=True)
class View:
    """One request between two steps, as its last scheduled step left it.

    `token_ids` [n]: ids of the live tokens, ascending; a token's id is its RoPE position.
    `num_tokens`: tokens ever computed, dead ones included; the newest has id `num_tokens - 1`.
    `scores` [n] float32: accumulated attention, higher = keep; None unless the policy needs it.
    `seed`: a number that depends on the prompt alone.
    """

    token_ids: TokenIds
    num_tokens: int
    num_prompt_tokens: int
    budget_tokens: int
    seed: int = 0
    scores: npt.NDArray[np.float32] | None = None

    @property
    def num_victims(self) -> int:
        return max(0, len(self.token_ids) - self.budget_tokens)


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a policy's parameters; bounds stand in the field annotations."""


class Policy:
    """Base of all policies. Subclasses set the class variables and `select_victims`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str] = "-"
    needs: ClassVar[frozenset[Need]] = frozenset()
    Params: ClassVar[type[Params]] = Params
    params: Any

    def __init__(self, params: Any = None) -> None:
        self.params = self.Params() if params is None else params

    def select_victims(self, view: View) -> TokenIds:
        """The ids [view.num_victims] that die. Called only when that number is positive."""
        raise NotImplementedError

    def min_budget_tokens(self) -> int:
        """The smallest budget under which the parameters make sense."""
        return 1


def lowest(view: View, scores: npt.NDArray[Any], sinks: int, recent: int) -> TokenIds:
    """The `num_victims` lowest-scored ids, sparing the first `sinks` and the `recent` newest.

    `scores` [n], higher = keep; NaN is highest; ties fall on the older token.
    """
    first = int(np.searchsorted(view.token_ids, sinks))
    last = max(first, len(view.token_ids) - max(recent, 1))
    ids: TokenIds = view.token_ids[first:last]
    window = scores[first:last]
    if view.num_victims >= len(ids):
        return ids
    bar = np.partition(window, view.num_victims)[view.num_victims]  # the lowest score that stays
    if np.isnan(bar):  # NaN sorts last
        chosen, tied = ~np.isnan(window), np.isnan(window)
    else:
        chosen, tied = window < bar, window == bar
    missing = view.num_victims - int(np.count_nonzero(chosen))
    chosen[np.flatnonzero(tied)[:missing]] = True
    victims: TokenIds = ids[chosen]
    return victims


def oldest(view: View, sinks: int) -> TokenIds:
    """The `num_victims` oldest ids, sparing the first `sinks`."""
    first = int(np.searchsorted(view.token_ids, sinks))
    return view.token_ids[first : first + view.num_victims]


_REGISTRY: dict[str, type[Policy]] = {}


def register(cls: type[Policy]) -> type[Policy]:
    """Class decorator: makes the policy known by its name."""
    if cls.name in _REGISTRY:
        raise ValueError(f"two policies are named {cls.name!r}")
    _REGISTRY[cls.name] = cls
    return cls


def policy_names() -> list[str]:
    return list(_REGISTRY)


def make_policy(name: Any, params: Any) -> Policy:
    """The policy `name` with `params` (a JSON object); raises RefusedError naming the culprit."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise RefusedError(
            f"unknown policy {name!r}",
            field="policy.name",
            value=name,
            bound="one of " + ", ".join(_REGISTRY),
        )
    cls = _REGISTRY[name]
    if not isinstance(params, dict):
        raise RefusedError(
            "policy.params must be an object", field="policy.params", value=params, bound="object"
        )
    try:
        return cls(msgspec.convert(params, cls.Params, strict=True))
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


def _fields(cls: type[Policy]) -> list[str]:
    return [f.name for f in msgspec.structs.fields(cls.Params)]


def describe_policies() -> list[PolicyInfo]:
    """Name, summary, source, needs and parameter schema of every registered policy."""
    infos = []
    for cls in _REGISTRY.values():
        schema, components = msgspec.json.schema_components([cls.Params])
        infos.append(
            PolicyInfo(
                name=cls.name,
                summary=cls.summary,
                source=cls.source,
                needs=sorted(cls.needs),
                params_schema=components[schema[0]["$ref"].rsplit("/", 1)[-1]],
            )
        )
    return infos


def params_dict(policy: Policy) -> dict[str, Any]:
    return msgspec.structs.asdict(policy.params)
