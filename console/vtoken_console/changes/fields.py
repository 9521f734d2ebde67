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
MIB = 1 << 20
PARAMETERS = "Policy parameters"
EXPERIMENTS = "Experiments"
# Group -> its settings and the words that the form has for them. Parameters of the policy come
# first in theirs; a setting that is not named here is among the experiments.
GROUPS: dict[str, dict[Path, str]] = {
    "When memory is short": {
        POLICY: "policy",
        ("budget_ratio",): "floor, share of the prompt",
        ("budget_floor_tokens",): "floor, at least, tokens",
        ("budget_tokens",): "floor in tokens",
        ("evict_after_wait_ms",): "patience, then others give",
        ("evict_per_token_left",): "given for a token left",
        ("evict_when",): "when tokens are evicted",
        ("park_bytes",): "park in host memory, bytes",
        ("restore_after_ms",): "wait before they come back",
        ("interval_tokens",): "slack above a budget",
        ("evict_during",): "phase of eviction",
    },
    "Compaction": {
        ("reclamation",): "reclamation",
        ("theta_f",): "compacts at holes of",
        ("batch_size",): "blocks a round",
        ("headroom_blocks",): "reserve, blocks",
        ("low_watermark_blocks",): "start below, blocks free",
        ("recycle",): "new tokens fill holes",
    },
    "Prefixes and checks": {
        ("prefix_sharing",): "blocks that prefixes share",
        ("protect", "template"): "keep the chat template",
        ("protect", "system"): "keep the system prompt",
        ("protect", "tools"): "keep the schemas of tools",
        ("protect", "last_user"): "keep the last user turn",
        ("verify_ratio",): "moves verified, share",
        ("canary", "share"): "answers checked, share",
        ("canary", "control_share"): "control group, share",
        ("slo",): "objectives of latency",
    },
    PARAMETERS: {
        ("probe", "layers"): "layers probed",
        ("probe", "heads"): "heads probed",
        ("probe", "every_steps"): "probe every k-th step",
    },
    EXPERIMENTS: {
        ("shadow", "name"): "shadow policy",
        ("experiment", "planner"): "planner",
        ("experiment", "round_rule"): "rule of rounds",
        ("experiment", "admission"): "rule of admission",
    },
}
WORDS = {path: (group, words) for group, named in GROUPS.items() for path, words in named.items()}
# Settings of several values: a row for each value.
PARTS: dict[str, type[msgspec.Struct]] = {
    "protect": wire.Protect,
    "probe": wire.Probe,
    "canary": wire.Canary,
    "experiment": wire.Experiment,
}
SUMMARIES: dict[Path, str] = {  # that say more here than the server's
    ("probe", "layers"): "probed layers, comma separated; empty: at the default depth",
    ("probe", "heads"): "probed query heads, comma separated; empty: all",
}


@dataclass(frozen=True, slots=True)
class Field:
    """`kind`: int, float, bool, enum, list or text. `desired`, `effective`: the server's values."""

    path: Path
    group: str
    words: str
    kind: str
    summary: str
    desired: Any
    effective: Any
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As it is written in a patch, in the CLI and in docs/settings.md."""
        if self.path[1:] == ("name",):
            return self.path[0]
        return ".".join(path[2:] if (path := self.path)[1:2] == ("params",) else path)

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
    """All settings; the parameters are those of `chosen_policy`, whether or not it is in effect.

    Policies whose answers contained the most facts are the first choices.
    """
    desired = msgspec.to_builtins(config.desired)
    effective = msgspec.to_builtins(config.effective)
    infos = {info.name: info for info in policies}
    info = infos.get(chosen_policy)
    bounds = config.bounds
    found = {info.name: max((f.found for f in info.facts), default=0.0) for info in policies}
    policy = wire.Bound(
        type="enum",
        summary=f"{info.summary} ({info.source})" if info else "",
        choices=sorted(infos, key=lambda name: -found[name]) or bounds["policy"].choices,
    )
    fields = [_field(POLICY, policy, desired["policy"]["name"], effective["policy"]["name"])]
    if info is not None:
        fields += _params(info, desired["policy"], effective["policy"])
    for name, bound in bounds.items():
        if name == "shadow":
            new, old = ((v.get("shadow") or {}).get("name", "none") for v in (desired, effective))
            enum = structs.replace(bound, type="enum", choices=policy.choices)
            fields.append(_field(("shadow", "name"), enum, new, old))
        elif name in PARTS:
            fields += [
                _field((name, part), of_part, desired[name][part], effective[name][part])
                for part, of_part in bounds_of(PARTS[name]).items()
            ]
        elif name != "policy":
            fields.append(_field((name,), bound, desired.get(name), effective.get(name)))
    groups, places = [*GROUPS], {path: place for place, path in enumerate(WORDS)}
    return sorted(fields, key=lambda f: (groups.index(f.group), places.get(f.path, -1)))


def edited_values(config: wire.ConfigValues, patch: Mapping[str, Any]) -> wire.ConfigValues:
    """`config` with the patch applied, or without it if a value is invalid."""
    values = msgspec.to_builtins(config)
    for name, new in patch.items():
        old = values.get(name)
        values[name] = old | new if isinstance(old, dict) and isinstance(new, dict) else new
    try:
        return msgspec.convert(values, wire.ConfigValues)
    except msgspec.ValidationError:
        return config


def _field(path: Path, bound: wire.Bound, desired: Any, effective: Any) -> Field:
    group, words = WORDS.get(path, (EXPERIMENTS, " ".join(path)))
    return Field(
        path,
        group,
        words,
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
                PARAMETERS,
                name,
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
    unit = MIB if field.path[-1].endswith("_bytes") else 1
    if field.kind == "float":
        low, high = field.minimum, field.maximum
        width = (high - low) if low is not None and high is not None else 1.0
        stepped: float = round(value + by * width / (10 if coarse else 100), 6)
    elif coarse:
        stepped = max(unit, value * 2) if by > 0 else value // 2
    else:
        stepped = value + by * unit
    if field.minimum is not None:
        stepped = max(stepped, field.minimum)
    if field.maximum is not None:
        stepped = min(stepped, field.maximum)
    return int(stepped) if field.kind == "int" else float(stepped)


def paths_of(patch: Mapping[str, Any]) -> dict[Path, Any]:
    """Path -> value of everything that the patch sets."""
    found: dict[Path, Any] = {}
    for name, value in patch.items():
        inner = paths_of(value) if isinstance(value, dict) else {(): value}
        found |= {(name, *path): each for path, each in inner.items()}
    return found


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
        policy = next(field.desired for field in fields if field.path == POLICY)
        patch["policy"] = {"name": policy, **patch["policy"]}
    return patch
