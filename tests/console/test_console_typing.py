"""Fast typing, keys held down and pastes: text reaches the field it was typed for, in order."""

from __future__ import annotations

from textual import events
from textual.command import CommandPalette
from textual.widgets import Input

from tests.support.console_harness import running, until
from tests.support.fake_console.fake_server import FakeServer
from vtoken_console.screens.control import ControlScreen
from vtoken_console.screens.trial import TrialScreen

NAMES = {"/": "slash", ":": "colon", ".": "full_stop"}


def burst(app, *keys: str) -> None:
    """Keys that come all at once, before any of them is acted upon."""
    for key in keys:
        app.post_message(events.Key(NAMES.get(key, key), key if len(key) == 1 else None))


async def test_value_typed_right_behind_its_key_is_the_value(server: FakeServer) -> None:
    server.frozen = True
    async with running(server.url) as (app, _):
        burst(app, "t", *"0.07")
        await until(lambda: isinstance(app.screen, ControlScreen), "no settings")
        await until(lambda: app.screen.patch == {"theta_f": 0.07}, "not the value typed")
    assert [dry for _, dry, _ in server.patches if not dry] == []


async def test_command_typed_right_behind_its_key_runs_no_other(server: FakeServer) -> None:
    async with running(server.url) as (app, _):
        burst(app, ":", *"pcuq")
        await until(lambda: isinstance(app.screen, CommandPalette), "no palette")
        await until(lambda: app.screen.query_one(Input).value == "pcuq", "not all of the text")
    assert (server.patches, server.compactions, server.undos) == ([], [], 0)


async def test_terms_typed_right_behind_the_trials_key_are_its_terms(server: FakeServer) -> None:
    async with running(server.url) as (app, _):
        burst(app, "t", "left", "ctrl+t", "backspace", *"12", "tab", *"40")
        await until(lambda: isinstance(app.screen, TrialScreen), "no dialog")
        await until(lambda: app.screen.query_one("#p95", Input).value == "40", "not typed")
        assert app.screen.query_one("#minutes", Input).value == "12"


async def test_pages_opened_and_left_in_a_burst_leave_every_key_working(server: FakeServer) -> None:
    async with running(server.url) as (app, _):
        for page in ("t", "question_mark", "x", ":", "z"):
            burst(app, page, "escape")
        burst(app, "/", *"req")
        await until(lambda: app.dashboard.filter.text == "req", "a key was lost")
        assert app.screen is app.dashboard


async def test_key_held_down_acts_once(server: FakeServer) -> None:
    async with running(server.url) as (app, _):
        app.controls.HELD_S = 60.0
        burst(app, *"cccccc", "u", *"ccc", "/", "x")
        await until(lambda: app.dashboard.filter.text == "x", "not handled to the end")
        await until(lambda: len(server.compactions) == 2 and server.undos == 1, "not acted")
        app.controls.HELD_S = 0.0
        burst(app, "escape", "c")
        await until(lambda: len(server.compactions) == 3, "a key that was let go of acts no more")


async def test_value_can_be_pasted_into_a_setting(server: FakeServer) -> None:
    async with running(server.url) as (app, pilot):
        await pilot.press("t")
        app.post_message(events.Paste("0.0"))
        app.post_message(events.Paste(" 9\nrm -rf"))
        await until(lambda: app.screen.patch == {"theta_f": 0.09}, "not pasted")


async def test_paste_onto_the_map_runs_nothing(server: FakeServer) -> None:
    async with running(server.url) as (app, _):
        app.post_message(events.Paste("pcuyq"))
        burst(app, "/", "x")
        await until(lambda: app.dashboard.filter.text == "x", "not handled to the end")
    assert (server.patches, server.compactions, server.undos) == ([], [], 0)
