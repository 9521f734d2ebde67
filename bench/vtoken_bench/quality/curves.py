"""The chart: quality against the share of the cache kept, one line per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vtoken_bench.charts import Chart, Line, Panel
from vtoken_bench.quality.tables import ALL_TASKS, FULL_CACHE, QUESTIONS, Row

CAPTION = "Quality against the share of the prompt kept, with 95% confidence intervals"


def charts(rows: Sequence[Row]) -> list[Chart]:
    """One chart of a result's rows; none if no evicting setting was measured."""
    found: dict[tuple[str, str], dict[str, list[tuple[float, dict[str, float]]]]] = {}
    for row in rows:
        if row["what"] == "task" and row["task"] == ALL_TASKS:
            panel = (
                f"{row['length']} tokens, {QUESTIONS[row['question']]}",
                "gold strings found [%]",
            )
            y = _scaled(row["score"], 100.0)
        elif row["what"] in ("prose", "chat") and row["policy"] != FULL_CACHE:
            panel = f"{row['what']}, {row['length']} tokens", "KL to the full cache [nats]"
            y = _scaled(row["figures"]["kl"], 1.0)
        else:
            continue
        found.setdefault(panel, {}).setdefault(row["policy"], []).append((row["keep"], y))
    panels = [
        _panel(*panel, policies)
        for panel, policies in found.items()
        if any(policy != FULL_CACHE for policy in policies)
    ]
    return [Chart(CAPTION, panels)] if panels else []


def _scaled(found: dict[str, Any], scale: float) -> dict[str, float]:
    return {name: found[name] * scale for name in ("value", "low", "high")}


def _panel(
    title: str, y_label: str, policies: dict[str, list[tuple[float, dict[str, float]]]]
) -> Panel:
    panel = Panel(title, "share of the prompt kept", y_label)
    for policy, points in policies.items():
        points.sort(key=lambda point: point[0])
        x = [keep for keep, _ in points]
        value, low, high = ([y[name] for _, y in points] for name in ("value", "low", "high"))
        if policy == FULL_CACHE:
            panel.lines.append(Line(policy, x[:1], value[:1], reference=True))
        else:
            panel.lines.append(Line(policy, x, value, low, high))
    return panel
