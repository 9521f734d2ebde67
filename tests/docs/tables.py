"""The tables of docs/ that are made from code.

Each is between `<!-- table: NAME, made by make tables -->` and `<!-- end of table -->`. The tables
of faults need engines, and have markers and a command of their own (`python -m tests.faults`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_kit import run
from vtoken.core.config.request_rules import Arguments
from vtoken.core.config.values import bounds, default_config
from vtoken.policies import describe_policies, make_policy
from vtoken.policies.base import BUILT_IN
from vtoken.policies.signals.kind import BUILT_IN as BUILT_IN_KINDS
from vtoken.vllm.serve import displayed, flag_of, plain_settings
from vtoken.wire import Bound, Experiment, pool_limits
from vtoken.wire.bounds import bounds_of, span
from vtoken.wire.guards import BY_NAME
from vtoken_api.metrics import METRICS, full_name
from vtoken_console.frame.keys import KEYS, MOVES

DOCS = Path(__file__).parents[2] / "docs"
NUM_BLOCKS, NUM_LAYERS, NUM_HEADS = (
    1024,
    32,
    32,
)  # of the pool and the model that docs/settings.md is written for
Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """`rows()` of cells under `columns`, on one page of docs/."""

    name: str
    page: str
    columns: Cells
    rows: Callable[[], Iterable[Cells]]

    def markdown(self) -> str:
        head, *rows = (_line(cells) for cells in (self.columns, *self.rows()))
        return "".join([head, "|---" * len(self.columns) + "|\n", *rows])

    def filled_in(self, text: str) -> str:
        """`text` with this table between its markers."""
        begin, end = f"<!-- table: {self.name}, made by make tables -->\n", "<!-- end of table -->"
        pattern = f"({re.escape(begin)}).*?({re.escape(end)})"
        found, number = re.subn(
            pattern, lambda m: f"{m[1]}{self.markdown()}{m[2]}", text, flags=re.DOTALL
        )
        if number != 1:
            raise ValueError(f"docs/{self.page} has {number} places for the table {self.name!r}")
        return found


def _line(cells: Cells) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _metrics() -> Iterator[Cells]:
    for metric in METRICS:
        labels = ", ".join(
            f"`{name}`: {', '.join(values)}" for name, values in metric.labels.items()
        )
        guard = f"`{metric.name}`" if metric.name in BY_NAME else ""
        yield f"`{full_name(metric)}`", metric.kind, labels, guard, metric.help


def _policies() -> Iterator[Cells]:
    """Policies without scores first; policies of other packages are excluded."""
    made = [make_policy(name, {}) for name in BUILT_IN]
    for policy in sorted(made, key=lambda p: (p.reads is not None, p.name != "none", p.name)):
        reads = "" if policy.reads is None else f"`{policy.reads.kind}`"
        if "token_ids" in policy.needs:
            reads += ", kinds of tokens"
        source = "" if policy.source == "-" else policy.source
        yield f"`{policy.name}`", policy.summary, reads, source


def _signals() -> Iterator[Cells]:
    """The built-in kinds of signals, those of attention first."""
    for name, kind in sorted(BUILT_IN_KINDS.items(), key=lambda pair: pair[1].source):
        yield f"`{name}`", kind.summary, f"{kind.depth_percent / 100:g}"


def _parameters() -> Iterator[Cells]:
    """Parameters of the built-in policies, as in `vtoken policy list`."""
    for policy in describe_policies():
        if policy.name not in BUILT_IN:
            continue
        for name, field in policy.params_schema["properties"].items():
            bound = (
                "" if "minimum" not in field else f"{field['minimum']:g} to {field['maximum']:g}"
            )
            default = str(field["default"]).lower()
            yield f"`{policy.name}`", f"`{name}`", default, bound, field["description"]


def _keys() -> Iterator[Cells]:
    for key in KEYS:
        changes = "yes" if key.control else ""
        yield f"`{key.shown}`", key.group, key.help, f"`{key.id}`", changes
    for keys, what in MOVES:
        yield keys, "Move", what, "", ""


def _settings() -> Iterator[Cells]:
    defaults = default_config(NUM_BLOCKS)
    flags = {name: flag_of(name) for name in plain_settings()} | {"policy": flag_of("policy")}
    for name, bound in bounds(NUM_BLOCKS, NUM_LAYERS, NUM_HEADS).items():
        flag = f"`{flags[name]}`" if name in flags else ""
        default = "" if bound.type == "object" else displayed(getattr(defaults, name))
        of_pool = "*" if name in pool_limits(NUM_BLOCKS) else ""
        yield f"`{name}`", _values(bound) + of_pool, default + of_pool, flag, bound.summary


def _experiment() -> Iterator[Cells]:
    for name, bound in bounds_of(Experiment).items():
        default = displayed(getattr(Experiment(), name))
        yield f"`experiment.{name}`", _values(bound), default, f"`{flag_of(name)}`", bound.summary


def _arguments() -> Iterator[Cells]:
    for name, bound in bounds_of(Arguments).items():
        yield f"`{name}`", _values(bound)


def _values(bound: Bound) -> str:
    if bound.choices and bound.type == "enum":
        return ", ".join(f"`{choice}`" for choice in bound.choices)
    names = {"bool": "`true`, `false`", "str": "text", "object": "an object", "list": "a list"}
    return names.get(bound.type) or span(bound)


def _steps() -> Iterator[Cells]:
    for step in run.WITH_VLLM:
        yield f"`{step.name}`", step.shows, f"{step.limit_s:.0f} s"


TABLES = (
    Table("metrics", "metrics.md", ("name", "type", "labels", "guard", "meaning"), _metrics),
    Table("policies", "policies.md", ("policy", "what it does", "reads", "source"), _policies),
    Table(
        "signals",
        "policies.md",
        ("signal", "the number", "default depth"),
        _signals,
    ),
    Table(
        "parameters",
        "policies.md",
        ("policy", "parameter", "default", "bounds", "meaning"),
        _parameters,
    ),
    Table(
        "settings", "settings.md", ("setting", "values", "default", "flag", "meaning"), _settings
    ),
    Table(
        "experiment",
        "settings.md",
        ("setting", "values", "default", "flag", "meaning"),
        _experiment,
    ),
    Table("arguments", "settings.md", ("argument", "values"), _arguments),
    Table("steps of the kit", "gpu.md", ("step", "shows", "limit"), _steps),
    Table("keys", "console.md", ("key", "group", "does", "name", "changes the server"), _keys),
)
