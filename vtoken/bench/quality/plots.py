"""The plot: quality against the share of the cache kept, one line a policy. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vtoken.bench.quality.tables import ALL_TASKS, FULL_CACHE, QUESTIONS, Row

WIDTH, HEIGHT = 5.0, 3.6  # of a panel [inch]


def save(rows: Sequence[Row], path: Path) -> str:
    """Draw the rows of a result into `path` (SVG); what was done, or why nothing was."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is missing (the extra `plots` of vToken)"
    panels = _panels(rows)
    if not panels:
        return "no plot: nothing was measured at a share of the cache"
    figure = Figure(figsize=(WIDTH * len(panels), HEIGHT), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    names = list(dict.fromkeys(row["policy"] for rows in panels.values() for row in rows))
    for axis, (title, found) in zip(axes, panels.items(), strict=True):
        for number, name in enumerate(names):
            _line(axis, [row for row in found if row["policy"] == name], name, number)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("share of the prompt kept", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    from matplotlib import rc_context

    # Labels stay text, and the same rows give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "vtoken"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    return f"plot in {path}"


def _panels(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Title -> rows with `policy`, `keep`, and `y`, a figure with its interval."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["what"] == "task" and row["task"] == ALL_TASKS:
            title = f"{row['length']} tokens, {QUESTIONS[row['question']]}\ngold strings found [%]"
            scale = 100.0
            found = row["score"]
        elif row["what"] in ("prose", "chat") and row["policy"] != FULL_CACHE:
            title = f"{row['what']}, {row['length']} tokens\nKL to the full cache [nats]"
            scale = 1.0
            found = row["figures"]["kl"]
        else:
            continue
        y = {name: found[name] * scale for name in ("value", "low", "high")}
        panels.setdefault(title, []).append({"policy": row["policy"], "keep": row["keep"], "y": y})
    return {
        title: found
        for title, found in panels.items()
        if any(row["policy"] != FULL_CACHE for row in found)
    }


def _line(axis: Any, rows: list[dict[str, Any]], name: str, number: int) -> None:
    if name == FULL_CACHE:
        for row in rows:
            axis.axhline(row["y"]["value"], color="black", linestyle="--", linewidth=1, label=name)
        return
    rows = sorted(rows, key=lambda row: row["keep"])
    x = [row["keep"] for row in rows]
    y = [row["y"]["value"] for row in rows]
    style = ("-", "--", ":")[number // 10 % 3]  # colours repeat after ten
    marker = "osD^v<>PX*"[number % 10]
    colour = f"C{number % 10}"
    axis.plot(x, y, style, marker=marker, markersize=3, color=colour, linewidth=1.2, label=name)
    low, high = ([row["y"][side] for row in rows] for side in ("low", "high"))
    axis.fill_between(x, low, high, color=colour, alpha=0.08, linewidth=0)
