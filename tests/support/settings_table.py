"""The tables of docs/settings.md, made from the declaration of the settings.

`python -m tests.support.settings_table` rewrites them; `tests/cli/test_docs.py` fails when they are
stale.
"""

from __future__ import annotations

import re
from pathlib import Path

from vtoken.bounds import bounds_of, span
from vtoken.config.request_rules import Arguments
from vtoken.config.values import bounds, default_config
from vtoken.vllm.startup.serve import flag_of, plain_settings, told
from vtoken.wire import Bound, pool_limits

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
NUM_BLOCKS, NUM_LAYERS = 1024, 32


def settings_table() -> str:
    """A line for each setting."""
    defaults = default_config(NUM_BLOCKS)
    flags = {name: flag_of(name) for name in plain_settings()} | {"policy": flag_of("policy")}
    rows = ["| setting | values | default | flag | meaning |", "|---|---|---|---|---|"]
    for name, bound in bounds(NUM_BLOCKS, NUM_LAYERS).items():
        flag = f"`{flags[name]}`" if name in flags else ""
        default = "" if bound.type == "object" else told(getattr(defaults, name))
        of_pool = "*" if name in pool_limits(NUM_BLOCKS) else ""
        cells = [f"`{name}`", _values(bound) + of_pool, default + of_pool, flag, bound.summary]
        rows.append(f"| {' | '.join(cells)} |")
    about = (
        f"\\* of a pool of {NUM_BLOCKS:,} blocks. `probe.layers` is shown for {NUM_LAYERS} layers."
    )
    return "\n".join([*rows, "", about])


def arguments_table() -> str:
    """A line for each argument that a request may bring."""
    rows = ["| argument | values |", "|---|---|"]
    for name, bound in bounds_of(Arguments).items():
        rows.append(f"| `{name}` | {_values(bound)} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """`text` with both tables as they are now."""
    for name, table in (("settings", settings_table()), ("arguments", arguments_table())):
        text = re.sub(
            rf"(<!-- {name}: .* -->\n).*?(<!-- /{name} -->)",
            lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def _values(bound: Bound) -> str:
    if bound.choices and bound.type == "enum":
        return ", ".join(f"`{choice}`" for choice in bound.choices)
    names = {"bool": "`true`, `false`", "str": "a name", "object": "an object"}
    return names.get(bound.type) or span(bound)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
