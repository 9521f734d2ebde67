"""The real app, headless, on a real server: controls, settings, pages, layout."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from textual import events

from tests.support.console_harness import (
    CHANGES,
    applied,
    compact,
    drawn,
    make_busy,
    messages,
    outcome,
    running,
    screen_text,
    tokens_of,
    until,
)
from tests.support.core.live import SESSION, LiveEngine
from tests.support.scripted import ScriptedEngine
from tests.support.served_core import serving
from tests.support.serving import Served
from vtoken.base.request_ids import short_id
from vtoken.core.config.request_rules import request_rules
from vtoken.wire import commands
from vtoken_console.app.app import ConsoleApp
from vtoken_console.app.commands import Commands
from vtoken_console.feed.connection import State
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.screens.control import ControlScreen
from vtoken_console.screens.help import HelpScreen
from vtoken_console.screens.request import RequestScreen
from vtoken_console.style.appearance import choose
from vtoken_console.widgets.form import Form
from vtoken_console.widgets.requests import Requests


async def test_screen_answers_the_three_questions(core: LiveEngine, served: Served) -> None:
    async with running(served.url, size=(140, 40)) as (app, pilot):
        await pilot.pause(0.3)
        text = screen_text(app)
        assert core.call("status").fragmentation.sentence in text.splitlines()[1]
        assert "● live" in text.splitlines()[0]
        assert f"rev {core.runtime.revision}" in text.splitlines()[0]
        row = core.reporter.rows()[0]
        line = next(x for x in text.splitlines() if short_id(row.id) in x)
        kept = row.live * 100 // (row.live + row.dead)
        for part in (f"{row.prompt_tokens}+{row.output_tokens}", f"{kept}%", f"{row.blocks}"):
            assert part in line.split()
        assert "400 blocks" not in text
        assert "399 blocks" in text


async def test_a_session_is_named_as_one(core: LiveEngine, served: Served) -> None:
    core.admit("stream", 40, rules=SESSION)
    core.steps()
    async with running(served.url) as (app, _):
        await app.dashboard.open_request("stream")
        await until(lambda: "stream  running session" in screen_text(app), "not named")


async def test_pausing_the_server_asks_and_so_does_resuming(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(80, 24)) as (app, pilot):
        await pilot.press("H")
        await until(lambda: "Pause reclamation on 127.0.0.1" in screen_text(app), "not asked")
        assert "6 requests run" in screen_text(app)
        await pilot.press("enter")  # Cancel has the focus
        await until(lambda: app.screen is app.dashboard, "still asks")
        assert served.calls_of(*CHANGES) == []
        await pilot.press("H", "right", "enter")
        await until(lambda: core.runtime.config.reclamation == "paused", "not paused")
        await until(lambda: "Reclamation paused" in messages(app), "no message")
        await until(lambda: " paused by " in screen_text(app).splitlines()[0], "not in the header")
        await pilot.press("H")
        await until(lambda: "Resume reclamation on" in screen_text(app), "not asked")
        await pilot.press("right", "enter")
        await until(lambda: core.runtime.config.reclamation == "auto", "not resumed")
    assert applied(served) == [{"reclamation": "paused"}, {"reclamation": "auto"}]


@pytest.mark.parametrize("key", ["space", "p"])
@pytest.mark.usefixtures("stepping")
async def test_the_picture_freezes_visibly_and_goes_on(served: Served, key: str) -> None:
    async with running(served.url, size=(80, 24)) as (app, pilot):
        table, feed = app.dashboard.query_one(Requests), app.source.feed
        await pilot.press(key)
        await until(lambda: " frozen at " in screen_text(app).splitlines()[0], "not marked")
        await until(lambda: "go on" in screen_text(app).splitlines()[-1], "no way out")
        still = table.view.model
        await until(lambda: feed.model.step > still.step + 3, "the server stands still, too")
        app.tick()
        assert table.view.model is still
        await pilot.press("T")
        await until(lambda: table.view.theme.name == "light", "a choice is not shown")
        assert table.view.model is still
        await pilot.press("space" if key == "p" else "p")
        await until(lambda: table.view.model.step > still.step, "does not go on")
        assert "frozen" not in screen_text(app).splitlines()[0]
    assert served.calls_of(*CHANGES) == []


@pytest.mark.usefixtures("stepping")
async def test_c_compacts_once_and_shows_the_outcome(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("c")
        await until(lambda: "Compacted all requests: moved" in messages(app), "no outcome shown")
    assert served.calls_of("compact") == [commands.Compact()]


async def test_u_undoes_and_a_refused_undo_is_shown_in_full(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("u")
        await until(
            lambda: "there is no earlier configuration" in messages(app), "refusal not shown"
        )
        await pilot.press("H", "right", "enter")
        await until(lambda: core.runtime.config.reclamation == "paused", "not paused")
        await pilot.press("u")
        await until(lambda: core.runtime.config.reclamation == "auto", "not undone")


@pytest.mark.usefixtures("stepping")
async def test_theta_is_previewed_before_it_is_applied(core: LiveEngine, served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("theta_f")
        await pilot.press("left", "left")
        await until(lambda: served.calls_of("preview"), "no request was sent")
        await until(lambda: "→ 0.23\n" in outcome(app), "no what-if shown")
        assert applied(served) == []
        assert core.runtime.config.theta_f == 0.25
        await pilot.press("enter")
        await until(lambda: core.runtime.config.theta_f == 0.23, "not applied")
        (sent,) = served.calls_of("patch_config")
        assert (sent.patch, sent.if_match) == ({"theta_f": 0.23}, 1)
        await until(lambda: "Accepted: revision 2" in outcome(app), "not shown")
        await until(lambda: app.source.feed.model.config.effective.theta_f == 0.23, "not seen")
        await pilot.press("escape")
        assert app.screen is app.dashboard


async def test_refused_value_shows_field_value_and_bound_and_changes_nothing(
    core: LiveEngine,
    served: Served,
) -> None:
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("batch_size")
        await pilot.press(*"999999", "enter")
        await until(lambda: "Nothing was changed" in outcome(app), "not refused")
        text = outcome(app)
        for part in ("batch_size", "999999", "1..400"):
            assert part in text
        assert core.runtime.config.batch_size == 32
        await pilot.pause(0.2)
        assert "999999" in screen_text(app)  # the edits stay for correction


async def test_stale_revision_is_refused_with_a_message(core: LiveEngine, served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("theta_f")
        await pilot.press("left")
        await until(lambda: served.calls_of("preview"), "not asked")
        core.call("patch_config", actor="ana", patch={"batch_size": 8})  # not received yet
        await pilot.press("enter")
        conflict = "at revision 2, the call was made for 1"
        await until(lambda: conflict in outcome(app), "conflict not shown")
        assert core.runtime.config.theta_f == 0.25


async def test_policy_form_offers_the_parameters_of_the_chosen_policy(
    core: LiveEngine, served: Served
) -> None:
    core.configure(park_bytes=0)  # what is parked is no loss, and asks nobody
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("policy")
        form = app.screen.query_one(Form)
        assert "recent_ratio" in {field.name for field in form.fields}
        await pilot.press(*"streaming_llm")
        names = {field.name for field in form.fields}
        assert "sinks" in names
        assert "recent_ratio" not in names
        form.action_jump([form.key_of(row)[-1] for row in form.rows].index("sinks"))
        await pilot.press("right", "enter")
        await until(lambda: isinstance(app.screen, ConfirmScreen), "no confirmation")
        await pilot.press("right", "enter")
        await until(lambda: core.runtime.config.policy.name == "streaming_llm", "not applied")
        assert core.runtime.config.values().policy.params["sinks"] == 5
        assert applied(served) == [{"policy": {"name": "streaming_llm", "params": {"sinks": 5}}}]


@pytest.mark.parametrize("key", ["H", "c", "u", "y"])
async def test_read_only_console_sends_nothing_and_shows_why(served: Served, key: str) -> None:
    async with running(served.url, read_only=True) as (app, pilot):
        await pilot.press(key)
        await until(lambda: "--read-only" in messages(app), "no reason given")
        assert app.screen is app.dashboard
        assert "read-only" in screen_text(app).splitlines()[0]
        assert " compact" not in screen_text(app).splitlines()[-1]
    assert served.calls_of(*CHANGES) == []


async def test_request_page_shows_the_token_table_with_one_cursor(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        requests = app.dashboard.query_one(Requests)
        await until(lambda: requests.chosen is not None, "no rows")
        chosen = requests.chosen.id
        await pilot.press("enter")
        await until(lambda: isinstance(app.screen, RequestScreen), "not opened")
        await until(lambda: app.screen.query_one("#rows").table is not None, "no tokens")
        rows = tokens_of(core, chosen)
        table = app.screen.query_one("#rows").table
        assert table.live.tolist() == [row.live for row in rows]
        assert table.block.tolist() == [-1 if row.block is None else row.block for row in rows]
        await pilot.press("end")
        last = len(rows) - 1
        await until(lambda: app.screen.query_one("#rows").cursor == last, "rows did not follow")
        assert app.screen.query_one("#strip").cursor == last


async def test_request_page_marks_protected_tokens(core: LiveEngine, served: Served) -> None:
    core.configure(policy={"name": "sliding_window"}, budget_tokens=64, evict_when="always")
    core.runtime.announce("kept", request_rules({"vtoken_protect": [3, 6]}))
    core.admit("kept", 40)
    core.steps()
    core.publish()
    async with running(served.url) as (app, _):
        await app.dashboard.open_request("kept")
        await until(lambda: "P protected" in screen_text(app), "no legend")
        assert app.screen.query_one("#strip").table.protected.nonzero()[0].tolist() == [3, 4, 5]
        first = next(line for line in screen_text(app).splitlines() if "P  P  P" in line)
        assert first.count("P") == 3


async def test_slot_view_names_the_reason_of_a_pin() -> None:
    core = make_busy(100, 2, prefix_tokens=64)
    block = core.store.tables[next(iter(core.store.tables))][0]
    async with serving(core) as served, running(served.url) as (app, _):
        await app.dashboard.open_block(block)
        await until(lambda: "shared prefix" in screen_text(app), "pin reason not shown")


async def test_keys_pasted_after_the_filters_key_are_text_not_commands(served: Served) -> None:
    async with running(served.url) as (app, _):
        for key, character in (("slash", "/"), ("p", "p"), ("c", "c"), ("u", "u")):
            app.post_message(events.Key(key, character))
        await until(lambda: app.dashboard.filter.text == "pcu", "not typed into the filter")
    assert served.calls_of(*CHANGES) == []


async def test_connecting_page_shows_address_start_and_error() -> None:
    app = ConsoleApp("http://127.0.0.1:9")
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(lambda: app.source.feed.connection.failures > 0, "no failure")
        await until(lambda: "tried" in screen_text(app), "not counted")
        text = " ".join(screen_text(app).split())
        for part in ("Connecting to http://127.0.0.1:9", "since", "next try in"):
            assert part in text
        assert "connection refused; no server listens there" in text
        await pilot.press("c")
        await until(lambda: "no connection" in messages(app), "not said")


async def test_lost_connection_is_reported_the_screen_stays_and_it_reconnects() -> None:
    server = contextlib.AsyncExitStack()
    first = await server.enter_async_context(serving(make_busy(60, 2)))
    async with server, running(first.url, size=(80, 24)) as (app, pilot):

        def keys() -> str:
            return screen_text(app).splitlines()[-1]

        await until(lambda: "undo" in keys(), "no keys")
        await server.aclose()
        await until(lambda: app.source.feed.connection.state is State.LOST, "loss not seen")
        await until(lambda: "r retry" in keys(), "not offered")
        assert "undo" not in keys()
        assert "q quit" in keys()
        text = screen_text(app)
        assert "Not connected for" in text.splitlines()[1]
        assert "pool · 59 blocks" in text
        async with serving(make_busy(80, 2, epoch="two"), port=first.port):
            await pilot.press("r")
            await until(lambda: "pool · 79 blocks" in screen_text(app), "did not come back")
            await until(lambda: "undo" in keys(), "no keys")


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 36), (160, 50), (40, 10)])
async def test_every_size_draws_without_overflow(served: Served, size: tuple[int, int]) -> None:
    async with running(served.url, size=size) as (app, pilot):
        for keys in (("z",), ("Z",), *"12345", ("escape",), ("m",), ("escape",)):
            await pilot.press(*keys)
            await pilot.pause(0.12)
            lines = screen_text(app).splitlines()
            assert len(lines) == size[1]
            assert all(len(line) == size[0] for line in lines)


async def test_80x24_shows_pool_and_requests_and_drops_the_rest(served: Served) -> None:
    async with running(served.url, size=(80, 24)) as (app, _):
        await until(lambda: "pool ·" in screen_text(app), "no pool")
        text = screen_text(app)
        assert "requests ·" in text
        assert "log" not in text
        table = app.dashboard.query_one(Requests)
        assert table.page_rows == 11
        assert table.has_focus
        assert app.dashboard.heatmap.content_size.height == 3
        assert text.splitlines()[-1].strip().endswith("q quit")


async def test_ascii_console_draws_ascii_only(served: Served) -> None:
    appearance = choose(depth="truecolor", ascii_only=True)
    async with running(served.url, appearance=appearance) as (
        app,
        pilot,
    ):
        for keys in (("z",), ("escape",), ("m", "left"), ("escape",), ("question_mark",)):
            await pilot.press(*keys)
            await pilot.pause(0.4)
            assert screen_text(app).isascii()


async def test_help_opens_without_what_an_earlier_key_was_answered(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("o")
        await until(lambda: "Map by" in messages(app), "no answer")
        app.notify("an alert", severity="warning")
        await pilot.press("question_mark")
        await until(lambda: isinstance(app.screen, HelpScreen), "no help")
        await until(lambda: "an alert" in messages(app), "the alert is gone")
        assert "Map by" not in messages(app)
        await pilot.press("escape")
        app.notify("an error", severity="error")
        await pilot.press("question_mark")
        await until(lambda: isinstance(app.screen, HelpScreen), "no help")
        await until(lambda: "an error" in messages(app), "the error is gone")


async def test_palette_runs_a_command_by_name(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("colon", *"dry run")
        await until(lambda: "dry run of a compaction" in screen_text(app), "not found")
        await pilot.press("enter")
        await until(
            lambda: served.calls_of("compact") == [commands.Compact(dry_run=True)], "not run"
        )
        assert not isinstance(app.screen, ControlScreen)


@pytest.mark.parametrize(
    ("typed", "group", "name"),
    [
        ("resume", "key", "pause (H)"),
        ("slow", "key", "floor (f)"),
        ("budget", "setting", "budget_ratio"),
        ("theta", "setting", "theta_f"),
        ("snapkv", "policy", "snapkv"),
        ("a91f", "request", "cmpl-a91f"),
        ("light", "look", "theme light, 256"),
    ],
)
async def test_palette_finds_by_any_word(served: Served, typed: str, group: str, name: str) -> None:
    async with running(served.url) as (app, _):
        found = [(e.group, e.name) for e in Commands(app.dashboard).entries() if e.rank(typed)]
        assert (group, name) in found


async def test_palette_opens_a_policy_chosen_and_a_setting_under_the_cursor(
    served: Served,
) -> None:
    async with running(served.url) as (app, _):
        entries = {entry.name: entry for entry in Commands(app.dashboard).entries()}
        await entries["snapkv"].run()
        await until(lambda: app.screen.patch == {"policy": {"name": "snapkv"}}, "not chosen")
        app.pop_screen()
        await entries["batch_size"].run()
        await until(lambda: app.screen.query_one(Form).chosen.path == ("batch_size",), "not there")


async def test_relocation_is_drawn_on_its_blocks_then_fades(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(120, 36)) as (app, pilot):
        await pilot.pause(0.3)
        done = compact(core, next(iter(core.store.tables)))
        assert done.source_blocks
        await until(lambda: "○" in map_text(app), "sources not drawn")
        await until(lambda: not MOVING & set(map_text(app)), "moves never fade")


async def test_no_motion_reports_moves_without_drawing_them(
    core: LiveEngine, served: Served
) -> None:
    appearance = choose(depth="truecolor", motion=False)
    async with running(served.url, size=(120, 36), appearance=appearance) as (app, _):
        evicted = core.runtime.events.page(0, 10_000, "eviction").events[-1].ts
        await until(lambda: int(time.time()) > int(evicted), "its second is a line of the log")
        compact(core, next(iter(core.store.tables)))
        await until(lambda: " tok moved" in screen_text(app), "not in the log")
        assert not MOVING & set(map_text(app))


MOVING = set("○◌•●◐")


def map_text(app: ConsoleApp) -> str:
    """The cells of the heatmap, without its legend."""
    heatmap = app.dashboard.heatmap
    return "\n".join(strip.text for strip in drawn(heatmap)[: -heatmap.foot or None])


async def test_ten_frames_of_seventy_thousand_blocks_leave_the_loop_responsive() -> None:
    engine = ScriptedEngine(num_blocks=70_000, num_requests=2)
    async with serving(engine) as served, running(served.url, size=(160, 50)) as (app, _):
        for _ in range(10):
            engine.step(changes=200_000)
            engine.publish_frame()
            live = engine.live
            await until(lambda want=live: (app.source.feed.model.live == want).all(), "not arrived")
            app.tick()
            await asyncio.sleep(0)
        assert "69,999 blocks" in screen_text(app)
