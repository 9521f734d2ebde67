"""Fast typing, keys held down and pastes: text reaches the field it was typed for, in order."""

from __future__ import annotations

from textual import events
from textual.command import CommandPalette
from textual.widgets import Input

from tests.support.console_harness import CHANGES, running, until
from tests.support.serving import Served
from vtoken_console.screens.control import ControlScreen
from vtoken_console.screens.trial import TrialScreen

NAMES = {"/": "slash", ":": "colon", ".": "full_stop"}


def burst(app, *keys: str) -> None:
    """Sends keys in a burst, before any of them is handled."""
    for key in keys:
        app.post_message(events.Key(NAMES.get(key, key), key if len(key) == 1 else None))


async def test_value_typed_right_after_its_key_reaches_the_field(served: Served) -> None:
    async with running(served.url) as (app, _):
        burst(app, "f", *"77")
        await until(lambda: isinstance(app.screen, ControlScreen), "no settings")
        await until(lambda: list(app.screen.patch.values()) == [77], "not the value typed")
    assert served.calls_of("patch_config") == []


async def test_command_typed_right_after_its_key_runs_no_other(served: Served) -> None:
    async with running(served.url) as (app, _):
        burst(app, ":", *"pcuq")
        await until(lambda: isinstance(app.screen, CommandPalette), "no palette")
        await until(lambda: app.screen.query_one(Input).value == "pcuq", "not all of the text")
    assert served.calls_of(*CHANGES) == []


async def test_terms_typed_right_after_the_trial_key_reach_the_fields(served: Served) -> None:
    async with running(served.url) as (app, _):
        burst(app, "m", "left", "ctrl+t", "backspace", *"12", "tab", *"40")
        await until(lambda: isinstance(app.screen, TrialScreen), "no dialog")
        p95 = "#inter_token_p95"
        await until(lambda: app.screen.query_one(p95, Input).value == "40", "not typed")
        assert app.screen.query_one("#minutes", Input).value == "12"


async def test_pages_opened_and_left_in_a_burst_leave_every_key_working(served: Served) -> None:
    async with running(served.url) as (app, _):
        for page in ("m", "question_mark", "x", ":", "z"):
            burst(app, page, "escape")
        burst(app, "/", *"req")
        await until(lambda: app.dashboard.filter.text == "req", "a key was lost")
        assert app.screen is app.dashboard


async def test_key_held_down_acts_once(served: Served) -> None:
    async with running(served.url) as (app, _):
        app.dashboard.HELD_S = 60.0
        burst(app, *"cccccc", "u", *"ccc", "/", "x")
        await until(lambda: app.dashboard.filter.text == "x", "not handled to the end")
        await until(
            lambda: len(served.calls_of("compact")) == 2 and len(served.calls_of("undo")) == 1,
            "not acted",
        )
        app.dashboard.HELD_S = 0.0
        burst(app, "escape", "c")
        await until(
            lambda: len(served.calls_of("compact")) == 3, "a key that was let go of acts no more"
        )


async def test_value_can_be_pasted_into_a_setting(served: Served) -> None:
    async with running(served.url) as (app, _):
        await app.dashboard.action_settings("theta_f")
        app.post_message(events.Paste("0.0"))
        app.post_message(events.Paste(" 9\nrm -rf"))
        await until(lambda: app.screen.patch == {"theta_f": 0.09}, "not pasted")


async def test_paste_onto_the_map_runs_nothing(served: Served) -> None:
    async with running(served.url) as (app, _):
        app.post_message(events.Paste("pcuyq"))
        burst(app, "/", "x")
        await until(lambda: app.dashboard.filter.text == "x", "not handled to the end")
    assert served.calls_of(*CHANGES) == []
