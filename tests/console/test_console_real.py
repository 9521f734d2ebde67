"""The console on the real API in front of the real core, headless and in a real terminal."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from tests.support.console_harness import messages, running, screen_text, until
from tests.support.core.live import HOLES, LiveEngine, make_quiet
from tests.support.serving import Served, serve
from vtoken_console.app.commands import Commands
from vtoken_console.frame import silence
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.widgets.outcome import Outcome


@pytest.fixture
async def core() -> AsyncIterator[LiveEngine]:
    """A stepping engine with two requests, random eviction and no compaction."""
    with make_quiet(num_blocks=512) as core:
        rare = {"reclamation": "auto", "low_watermark_blocks": 0, "theta_f": 0.5}
        core.configure(**HOLES | rare)
        core.admit("a", 300)
        core.admit("b", 280)
        core.steps(3)
        async with core.stepping(pause_s=0.1):
            yield core


async def test_shadow_is_chosen_in_the_settings_and_its_disagreement_shown(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(200, 60)) as (app, pilot):
        await app.dashboard.action_settings("shadow")
        await pilot.press("right", "enter")
        await until(lambda: core.runtime.config.values().shadow is not None, "no shadow")
        await pilot.press("escape", "5")
        await until(lambda: "of the victims" in screen_text(app), "not shown")


async def test_read_only_server_gives_the_reason_and_enforces_it(core: LiveEngine) -> None:
    async with (
        serve(core.handle, host="0.0.0.0") as served,
        running(served.url) as (app, pilot),
    ):
        for key in ("H", "c", "u", "y"):
            await pilot.press(key)
            await until(lambda: "bound to more than loopback" in messages(app), "no reason")
            await pilot.press("escape")
        names = [entry.name for entry in Commands(app.dashboard).entries()]
        assert not any(name.startswith(("compact", "undo (", "pause", "keep")) for name in names)
        assert any(name.startswith("undo?") for name in names), "the dry run is not offered"
        await until(lambda: not messages(app), "the last reason is still shown")
        hello = app.source.feed.model.hello
        hello.can_control = True  # a console that does not care
        await pilot.press("H")
        await until(lambda: isinstance(app.screen, ConfirmScreen), "not asked")
        await pilot.press("right", "enter")
        await until(lambda: messages(app), "no answer")
        assert messages(app)[2:] == hello.read_only_reason, "not the server's own refusal"
        assert not served.calls_of("patch_config"), "the engine was asked"
        assert core.runtime.config.reclamation == "auto"


async def test_observer_sees_what_a_change_would_do_and_cannot_make_it(core: LiveEngine) -> None:
    async with (
        serve(core.handle, host="0.0.0.0") as served,
        running(served.url) as (app, pilot),
    ):
        await app.dashboard.action_settings("budget_tokens")
        await pilot.press(*"32")
        outcome = app.screen.query_one(Outcome)
        await until(lambda: "budget_tokens 64 → 32" in outcome.text, "no what-if")
        consequences = re.compile(r"evicts 0 → [\d,]+ tokens, into host memory")
        await until(lambda: consequences.search(outcome.text), "no consequences")
        await until(lambda: "apply is off: read-only" in screen_text(app), "not shown as off")
        for key in ("enter", "ctrl+t"):
            await pilot.press(key)
            await until(lambda: "Not applied: this server is read-only" in outcome.text, "unsaid")
            assert outcome.text.count("Not applied") == 1
            assert consequences.search(outcome.text), "the what-if was removed"
        await pilot.press("escape", "U")
        await until(lambda: "there is no earlier configuration" in messages(app), "not asked")
        await pilot.press("escape", "C")
        await until(lambda: "Dry run over all requests" in messages(app), "not tried out")
        assert core.runtime.revision == 1
        assert (await served.service.journal.entries(10)).entries == []


async def test_paused_engine_is_shown_as_paused_and_waiting_requests_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A paused engine takes no steps; the console must not report a hang."""
    monkeypatch.setattr(silence, "SILENT_S", 0.5)
    with closing(make_quiet(num_blocks=512)) as core:
        core.admit("runs", 300)
        core.steps(3)
        core.admit("waits", 280)
        async with serve(core.handle) as served, running(served.url, size=(140, 40)) as (app, _):
            served.line.hangs = True  # it answers nobody either
            await until(lambda: "No step for" in screen_text(app), "a hung engine looks alive")
            served.line.hangs = False
            core.reporter.scheduling.changed("paused", time.monotonic())
            expected = (
                "PAUSED: vLLM schedules nothing until it is resumed; 1 request is suspended, "
                "1 waits."
            )
            await until(lambda: expected in screen_text(app), "not shown")
            assert "No step for" not in screen_text(app)
            assert "● live" in screen_text(app).splitlines()[0]
            assert re.search(r"waits +waiting ", screen_text(app))
            core.reporter.scheduling.changed("running", time.monotonic())
            core.steps(1)
            core.publish()
            await until(
                lambda: "Paused" not in app.source.feed.model.status.fragmentation.sentence, "?"
            )
