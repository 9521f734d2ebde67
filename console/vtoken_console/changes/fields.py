"""Settings as rows of a form, built from the server's bounds and the policies' JSON schemas.

Edits map path -> value. The server validates it, not the form: text that cannot be parsed is
sent as typed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from vtoken import wire
from vtoken.wire.bounds import bounds_of

Path = tuple[str, ...]
POLICY: Path = ("policy", "name")
LEADING = (  # the first rows
    "theta_f",
    "batch_size",
    "budget_tokens",
    "interval_tokens",
    "evict_when",
    "evict_after_wait_ms",
)
# Settings of several values: a row for each value.
PARTS: dict[str, type[msgspec.Struct]] = {
    "protect": wire.Protect,
    "probe": wire.Probe,
    "canary": wire.Canary,
    "experiment": wire.Experiment,
}
SUMMARIES: dict[Path, str] = {  # that say more here than the server's
    ("protect", "template"): (
        "never evict the chat template's first tokens and the answer's header"
    ),
    ("protect", "system"): "never evict the system prompt",
    ("protect", "last_user"): "never evict the last user turn",
    ("probe", "layers"): "probed layers, comma separated; empty: calibrated, or 0.7 deep",
    ("probe", "heads"): "probed query heads, comma separated; empty: calibrated, or all",
}


@dataclass(frozen=True, slots=True)
class Field:
    """`kind`: int, float, bool, enum, list or text. `desired`, `effective`: the server's values."""

    path: Path
    label: str
    kind: str
    summary: str
    desired: Any
    effective: Any
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def bound_text(self) -> str:
        if self.choices:
            return " | ".join(self.choices)
        if self.kind == "bool":
            return "on | off"
        if self.minimum is not None and self.maximum is not None:
            return f"{_number(self.minimum)}..{_number(self.maximum)}"
        if self.minimum is not None:
            return f"{_number(self.minimum)} or more"
        return ""


def make_fields(
    config: wire.ConfigDocument, policies: list[wire.PolicyInfo], chosen_policy: str
) -> list[Field]:
    """All settings; the parameters are those of `chosen_policy`, whether or not it is in effect."""
    desired = msgspec.to_builtins(config.desired)
    effective = msgspec.to_builtins(config.effective)
    infos = {info.name: info for info in policies}
    info = infos.get(chosen_policy)
    bounds = config.bounds
    policy = wire.Bound(
        type="enum",
        summary=f"{info.summary} ({info.source})" if info else "",
        choices=list(infos) or (bounds["policy"].choices if "policy" in bounds else None),
    )
    now = (desired["policy"]["name"], effective["policy"]["name"])
    fields = [_field(POLICY, "policy", policy, *now)]
    if info is not None:
        fields += _params(info, desired["policy"], effective["policy"])
    names = [n for n in LEADING if n in bounds]
    others = (*LEADING, "policy", "shadow", *PARTS)
    names += [n for n in bounds if n not in others]
    fields += [
        _field((name,), name, bounds[name], desired.get(name), effective.get(name))
        for name in names
    ]
    if "shadow" in bounds:
        new, old = ((v.get("shadow") or {}).get("name", "none") for v in (desired, effective))
        bound = structs.replace(bounds["shadow"], type="enum")
        fields.append(_field(("shadow", "name"), "shadow", bound, new, old))
    for part, kind in PARTS.items():
        if part in bounds:
            fields += [
                _field(
                    (part, name),
                    f"{part} {name}",
                    bound,
                    desired[part][name],
                    effective[part][name],
                )
                for name, bound in bounds_of(kind).items()
            ]
    return fields


def _field(path: Path, label: str, bound: wire.Bound, desired: Any, effective: Any) -> Field:
    return Field(
        path,
        label,
        bound.type,
        SUMMARIES.get(path, bound.summary),
        desired,
        effective,
        bound.minimum,
        bound.maximum,
        tuple(bound.choices or ()),
    )


def _params(
    info: wire.PolicyInfo, desired: dict[str, Any], effective: dict[str, Any]
) -> list[Field]:
    out = []
    for name, schema in info.params_schema.get("properties", {}).items():
        now = {
            key: choice["params"].get(name, schema.get("default"))
            if choice["name"] == info.name
            else schema.get("default")
            for key, choice in (("desired", desired), ("effective", effective))
        }
        kind = {"integer": "int", "number": "float", "boolean": "bool", "array": "list"}.get(
            schema.get("type", ""), "text"
        )
        choices = tuple(str(c) for c in schema.get("enum", ()))
        out.append(
            Field(
                ("policy", "params", name),
                f"  {name}",
                "enum" if choices else kind,
                schema.get("description", ""),
                now["desired"],
                now["effective"],
                schema.get("minimum"),
                schema.get("maximum"),
                choices,
            )
        )
    return out


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def show_value(value: Any) -> str:
    """A value as text that the form accepts."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.2f}" if value == round(value, 2) else f"{value:g}"
    if isinstance(value, list):
        return ",".join(str(v) for v in value)
    return "" if value is None else str(value)


def parse_value(field: Field, text: str) -> Any:
    """`text` as the field's type; unparsable text is returned, for the server to refuse."""
    text = text.strip()
    try:
        if field.kind == "int":
            return int(text.replace(",", "").replace("_", ""))
        if field.kind == "float":
            return float(text)
        if field.kind == "list":
            return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        return text
    if field.kind == "bool":
        return {"on": True, "true": True, "off": False, "false": False}.get(text.lower(), text)
    return text


def step_value(field: Field, value: Any, by: int, *, coarse: bool) -> Any:
    """The next value in direction `by`, within bounds; `coarse`: tenfold, or by powers of two."""
    if field.kind == "bool":
        return not value if isinstance(value, bool) else True
    if field.kind == "enum" and field.choices:
        at = field.choices.index(value) if value in field.choices else 0
        return field.choices[(at + by) % len(field.choices)]
    if field.kind not in ("int", "float") or isinstance(value, (str, bool)) or value is None:
        return value
    if field.kind == "float":
        low, high = field.minimum, field.maximum
        width = (high - low) if low is not None and high is not None else 1.0
        stepped: float = round(value + by * width / (10 if coarse else 100), 6)
    elif coarse:
        stepped = max(1, value * 2) if by > 0 else value // 2
    else:
        stepped = value + by
    if field.minimum is not None:
        stepped = max(stepped, field.minimum)
    if field.maximum is not None:
        stepped = min(stepped, field.maximum)
    return int(stepped) if field.kind == "int" else float(stepped)


def make_patch(fields: Sequence[Field], edits: Mapping[Path, Any]) -> dict[str, Any]:
    """The merge patch of the edits; empty if they change nothing."""
    patch: dict[str, Any] = {}
    for field in fields:
        if field.path not in edits or edits[field.path] == field.desired:
            continue
        parent = patch
        for part in field.path[:-1]:
            parent = parent.setdefault(part, {})
        parent[field.path[-1]] = edits[field.path]
    if "policy" in patch and "name" not in patch["policy"]:
        # Parameters are always sent with the name of their policy.
        patch["policy"] = {"name": fields[0].desired, **patch["policy"]}
    return patch
