"""The metrics panel: gates, moves, latency, and marks of configuration changes."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from tests.support.console_harness import charts_text, make_busy, running, screen_text, until
from tests.support.core.live import LiveEngine
from tests.support.serving import Served
from vtoken import wire
from vtoken.core.runtime.canary import Check
from vtoken_console.feed.samples import NAMES, marker_of
from vtoken_console.feed.series import BIN_S, Series
from vtoken_console.style import palette, units
from vtoken_console.style.appearance import choose
from vtoken_console.widgets.figures.charts import Charts, make_charts
from vtoken_console.widgets.figures.sections import (
    canary_section,
    gates_section,
    latency_section,
    relocation_section,
    shadow_section,
)


def status_of_an_engine() -> wire.Status:
    core = make_busy(60, 1)
    core.close()
    return core.reporter.status()


def config_events(core: LiveEngine) -> list[wire.Event]:
    return core.runtime.events.page(0, 100, "config").events


def text_of(lines: list) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


async def test_latency_is_shown_beside_memory(core: LiveEngine, served: Served) -> None:
    async with running(served.url, size=(200, 50)) as (app, pilot):
        await pilot.pause(0.3)
        gauge = screen_text(app).splitlines()[3]
        latency = core.call("status").latency
        assert latency is not None
        assert f"between tokens p95 {units.latency(latency.inter_token.p95_ms, 0)}" in gauge
        assert f"first p95 {units.latency(latency.ttft.p95_ms, 0)}" in gauge
        assert "between tokens p95" in charts_text(app)
        assert "first token p95" in charts_text(app)


def test_a_closed_gate_is_no_fault() -> None:
    status = status_of_an_engine()
    status.fragmentation.gates = [
        wire.Gate(name="price", open=False, detail="saves 0 µs <= costs 0 µs")
    ]
    styles = {style for line in gates_section(status) for _, style in line}
    assert not styles & {palette.WARN_STYLE, palette.BAD_STYLE}


async def test_metrics_fit_80x24_and_match_the_status(core: LiveEngine, served: Served) -> None:
    core.core.worker.hole_us = 200
    core.steps(4)
    core.call("compact")
    core.steps(10)
    async with running(served.url, size=(80, 24)) as (app, pilot):
        app.dashboard.show_panel("numbers")
        await pilot.pause(0.3)
        text = screen_text(app)
        done = core.call("status").reclamation
        assert done.moved_bytes > 0
        for part in (
            f"{done.relocation_freed_blocks:,} blocks",
            f"{done.relocation_freed_blocks / done.moved_bytes * 1e6:.1f} blocks/MB",
            f"in {done.payback_steps} steps",
            "watermark",
            "p99",
        ):
            assert part in text


def test_values_missing_from_an_older_server_are_dashes() -> None:
    status = status_of_an_engine()
    status.latency = status.shadow = None
    status.fragmentation.gates = []
    status.reclamation = wire.Reclamation(
        state="auto",
        in_flight=0,
        relocations=0,
        moved_tokens=0,
        moved_bytes=0,
        reclaimed_blocks=0,
        recycled_slots=0,
    )

    class NoSeries:
        series = None

    assert units.latency(None, 0) in text_of(gates_section(status))
    assert units.latency(None, 0) in text_of(latency_section(status))
    section = text_of(relocation_section(NoSeries(), status))  # type: ignore[arg-type]
    assert units.latency(None, 0) in section
    assert "in 0 steps" not in section


def test_shadow_section_shows_disagreement_and_error() -> None:
    status = status_of_an_engine()
    status.shadow = wire.Shadow(
        policy=wire.PolicyChoice(name="tova"),
        compared=12,
        victims=800,
        agreed=600,
        waiting=3,
        error="ValueError: boom",
    )
    text = text_of(shadow_section(status))
    for part in ("tova", "75.0%", "200", "12", "ValueError: boom"):
        assert part in text


@pytest.mark.parametrize(
    ("figures", "row"),
    [
        ([], ""),
        ([(7, 95, 40)], f"{units.percent(None, 0)} 40 of 95"),
        ([(7, 2000, 1220)], "61.0% since rev 7"),
        ([(7, 2000, 1220), (6, 1000, 740)], "61.0% before 74%"),
        ([(7, 95, 40), (6, 90, 0), (5, 1000, 740)], f"{units.percent(None, 0)} 40 of 95"),
    ],
)
def test_latency_section_has_a_row_of_accepted_drafts_where_there_are_any(
    figures: list[tuple[int, int, int]], row: str
) -> None:
    status = status_of_an_engine()
    status.drafts = [wire.DraftFigures(*one) for one in figures]
    rows = [line for line in text_of(latency_section(status)).splitlines() if "drafts" in line]
    assert [" ".join(line.split()) for line in rows] == [f"drafts accepted {row}"] * bool(row)


def checked(core: LiveEngine) -> None:
    """The canary is on: evicting requests lose something, the control group nothing."""
    for agreed in (90, 95):
        core.runtime.canary.add(Check("random", 1, 100, agreed, 12.5, -80.0), evicted=True)
    core.runtime.canary.add(Check("random", 1, 50, 50, 0.0, -60.0), evicted=False)
    core.configure(canary={"share": 0.5})


async def test_quality_is_shown_beside_latency_once_the_canary_is_on(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(200, 50)) as (app, pilot):
        await pilot.pause(0.3)
        assert "agree" not in screen_text(app).splitlines()[3]
        checked(core)
        await until(
            lambda: "agree  92.5% lost  0.125" in screen_text(app).splitlines()[3], "no metrics"
        )


async def test_quality_section_has_the_control_group_beside(core: LiveEngine) -> None:
    assert canary_section(core.reporter.status()) == []
    checked(core)
    core.runtime.canary.drop(7)
    lines = text_of(canary_section(core.reporter.status())).splitlines()
    found = {line[:15].strip(): line[15:].split() for line in lines}
    assert found["agreement"] == ["92.5%", "100.0%"]
    assert found["log-prob. lost"] == ["0.125", "0.000"]
    assert found["log-probability"] == ["-0.800", "-1.200"]
    assert found["checked"] == ["2", "1"]
    assert found["dropped"] == ["7"]


async def test_trial_bar_shows_the_value_of_the_canary_guard(
    core: LiveEngine, served: Served
) -> None:
    guards = [{"metric": "canary_agreement{group=evicting}", "below": 0.5}]
    core.call("patch_config", patch={"canary": {"share": 1.0}}, guards=guards)
    core.runtime.canary.add(Check("random", 2, 100, 60, 12.5, -80.0), evicted=True)
    core.steps(1)
    async with running(served.url, size=(200, 50)) as (app, _):
        shown = "agreement >= 0.5 (now 0.6), 1 of 20 canaries"
        await until(lambda: shown in screen_text(app), "no guard")


async def test_mark_on_the_axis_is_named_below_with_who_what_and_when(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(200, 50)) as (app, pilot):
        await pilot.press("H", "right", "enter")
        await until(lambda: config_events(core), "not changed")
        who = config_events(core)[0].data["actor"]
        await until(lambda: f"▲2 {who} reclamation auto → paused" in screen_text(app), "no mark")
        await pilot.press("H", "right", "enter")
        await until(lambda: f"▲3 {who}" in screen_text(app), "no second mark")
        charts = app.dashboard.query_one(Charts)
        charts.focus()
        await pilot.press("left", "left")
        await pilot.pause(0.2)
        assert charts.chosen.revision == 2
        assert "▲3" not in charts_text(app)
        await pilot.press("end")
        await pilot.pause(0.2)
        assert "▲3" in charts_text(app)


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.usefixtures("stepping")
async def test_charts_are_curves_up_to_now_and_bars_in_ascii(
    served: Served, ascii_only: bool
) -> None:
    appearance = choose(depth="truecolor", ascii_only=ascii_only)
    async with running(served.url, size=(120, 36), appearance=appearance) as (app, _):
        charts = app.dashboard.query_one(Charts)
        dots = "[\u2801-\u28ff]"
        drawn = "#" if ascii_only else dots
        await until(lambda: re.search(drawn, charts_text(app)), "nothing drawn")
        assert ("now" in charts_text(app)) is not ascii_only
        assert bool(re.search(dots, charts_text(app))) is not ascii_only
        assert charts.content_size.height == len(charts_text(app).splitlines())


async def test_a_scale_holds_the_figure_above_it(core: LiveEngine, served: Served) -> None:
    """The figure is of the newest moment, a column of the chart a mean over several seconds."""
    core.steps(3)
    async with running(served.url) as (app, _):
        view = app.dashboard.query_one(Charts).view
        assert view.model.status.latency is not None
        view.model.status.latency.ttft.p95_ms = 6_101.3
        series = Series(NAMES)
        for n in range(600):
            newest = 185.0 if n == 599 else 20.0
            series.add(n * BIN_S, tuple(newest for _ in NAMES))
        view = replace(view, series=series)
        tops = {
            "".join(text for text, _ in chart.title).split()[0]: chart.top
            for chart in make_charts(view, series.window(300, 30))
        }
        assert tops["185"] >= 185
        assert tops["first"] >= 6_101.3


def test_end_of_a_trial_has_a_mark_of_its_own() -> None:
    event = wire.Event(seq=1, ts=1.0, step=1, kind="config", summary="s", data={"revision": 4})
    kinds = []
    for more in ({}, {"reverted": 3}, {"kept": 3}, {"confirmed": 3}):
        marker = marker_of(msgspec.structs.replace(event, data={"revision": 4, **more}))
        assert marker is not None
        kinds.append(marker.kind)
    assert kinds == ["changed", "reverted", "kept", "kept"]
