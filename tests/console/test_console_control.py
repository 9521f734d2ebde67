"""Safe changes: what-if, trial, guard, confirmation, undo, alerts."""

from __future__ import annotations

import asyncio
import itertools
import re
import time

import pytest
from msgspec.structs import replace

from tests.support.console_harness import applied, messages, outcome, running, screen_text, until
from tests.support.core.live import LiveEngine
from tests.support.documents import ROW
from tests.support.serving import Served
from tests.support.waiting import LIMIT_S
from vtoken import wire
from vtoken.sentences.what_if import difference
from vtoken.wire import Guard
from vtoken_api.state import recorder
from vtoken_console.changes.descriptions import irreversible
from vtoken_console.changes.trials import countdown, guards_text, parse_terms
from vtoken_console.screens.confirm import ConfirmScreen
from vtoken_console.screens.control import EXAMPLES, ControlScreen
from vtoken_console.screens.trial import TrialScreen
from vtoken_console.widgets.form import Form
from vtoken_console.widgets.trial_bar import TrialBar

H2O, NONE = wire.PolicyChoice("h2o"), wire.PolicyChoice("none")
VALUES = wire.ConfigValues(policy=H2O, budget_tokens=512, evict_when="always")


def trial(core: LiveEngine) -> wire.Trial | None:
    document: wire.ConfigDocument = core.call("config")
    return document.trial


async def open_trial(app, pilot, *keys: str) -> None:
    """Lowers theta_f by one step and opens the trial dialog; types `keys` into it."""
    await app.dashboard.action_settings("theta_f")
    await pilot.press("left", "ctrl+t")
    await until(lambda: isinstance(app.screen, TrialScreen), "no dialog")
    await pilot.press(*keys)


async def test_what_if_has_evicted_moved_freed_and_gates(core: LiveEngine, served: Served) -> None:
    core.configure(theta_f=0.5, low_watermark_blocks=core.store.num_blocks - 1)
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("theta_f")
        await pilot.press(*"0.01")
        await until(lambda: "0.5 → 0.01" in outcome(app), "no what-if")
        found = core.call("patch_config", patch={"theta_f": 0.01}, validate_only=True)
        assert outcome(app).split("\n")[1:] == [line.text for line in difference(found)]
        assert "evicts" not in outcome(app)  # what dies without the change, too
        assert applied(served) == []


async def test_a_proposed_change_is_there_with_what_it_would_do(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("budget_ratio", {"budget_ratio": 0.33})
        await until(lambda: "budget_ratio 0 → 0.33" in outcome(app), "no what-if")
        form = app.screen.query_one(Form)
        assert form.field.path == ("budget_ratio",)
        await until(lambda: "0.33" in screen_text(app) and "set 0.00" in screen_text(app), "unseen")
        assert app.screen.patch == {"budget_ratio": 0.33}
        await pilot.press("delete")
        await until(lambda: not app.screen.patch, "cannot be taken back")


async def test_f_proposes_all_of_the_advised_change(core: LiveEngine, served: Served) -> None:
    change = {"budget_ratio": 0.22, "budget_floor_tokens": 113}
    core.configure(budget_ratio=0.5)
    async with running(served.url) as (app, pilot):
        app.source.feed.model.status.advice = [
            wire.Advice("floor", "short", "a lower floor", change, action="floor")
        ]
        await pilot.press("f")
        await until(lambda: app.screen.patch == change, "not proposed")
        assert app.screen.query_one(Form).field.path == ("budget_ratio",)


async def test_a_setting_without_effect_says_why_and_loses_it_with_the_edit(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("budget_ratio")

        def row(name: str) -> str:
            return next((x for x in screen_text(app).splitlines() if name in x), "")

        await until(lambda: "no effect: budget_ratio is 0" in row("budget_floor_tokens"), "unsaid")
        assert "no effect" not in row("budget_tokens")
        await pilot.press(*"0.5")
        why = "no effect: budget_ratio 0.5 decides the budget"
        await until(lambda: why in row("budget_tokens"), "not by the edit")
        assert "no effect" not in row("budget_floor_tokens")


async def test_what_ifs_never_queue_and_the_newest_edits_get_a_result(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("theta_f")
        rest, held, under_way = app.source.rest, asyncio.Event(), []
        ask = type(rest).patch_config

        class Slow:
            token_ignored = False

            async def patch_config(self, patch, **options):
                under_way.append(patch)
                assert len(under_way) - len(served.calls_of("preview")) <= 1, (
                    "two questions at once"
                )
                await held.wait()
                return await ask(rest, patch, **options)

        app.source.rest = Slow()
        await pilot.press("left")
        await until(lambda: under_way, "not asked")
        for _ in range(5):
            await pilot.press("left")
            await pilot.pause(0.2)
        held.set()
        await until(lambda: "theta_f 0.25 → 0.19" in outcome(app), "not the newest")
        assert [p["theta_f"] for p in under_way] == [0.24, 0.19]
        app.source.rest = rest


async def test_trial_shows_who_what_and_the_time_left_and_y_keeps_it(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        await open_trial(app, pilot, "enter")
        await until(lambda: core.runtime.config.theta_f == 0.24, "not applied")
        terms = trial(core)
        assert terms.expires_ts - terms.started_ts == 300
        await until(lambda: "On trial: revision 2" in messages(app), "not told")
        assert app.screen is app.dashboard
        bar = app.dashboard.query_one(TrialBar)
        await until(lambda: bar.display and "ON TRIAL" in screen_text(app), "no bar")
        line = next(x for x in screen_text(app).splitlines() if "ON TRIAL" in x)
        for part in (
            "reverted in",
            "unless kept",
            f"rev 2 by {terms.actor}",
            "theta_f 0.25 → 0.24",
        ):
            assert part in line
        await pilot.press("y")
        await until(lambda: trial(core) is None, "not confirmed")
        await until(lambda: "Kept: revision 2 stays" in messages(app), "not shown")
        await until(lambda: not bar.display, "the bar stays")
        assert core.runtime.config.theta_f == 0.24


async def test_u_reverts_a_trial_at_once(core: LiveEngine, served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await open_trial(app, pilot, "enter")
        await until(lambda: trial(core) is not None, "no trial")
        await until(lambda: app.screen is app.dashboard, "the page stays")
        await pilot.press("u")
        await until(lambda: core.runtime.config.theta_f == 0.25, "not undone")
        assert trial(core) is None


async def test_guard_reverts_and_its_alert_stays_until_dismissed(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(160, 36)) as (app, pilot):
        await open_trial(app, pilot, "tab", *"500 ms", "tab", "0", "enter")
        await until(lambda: trial(core) is not None, "no trial")
        assert [guard.above for guard in trial(core).guards] == [0.5, 0]
        await until(lambda: "p95 inter-token <= 500 ms" in screen_text(app), "guard not shown")
        whole = guards_text(app.source.feed.model.status)
        await until(lambda: whole in screen_text(app), "a guard is cut")
        slow = itertools.count()
        core.core.clock = lambda: time.monotonic() + 0.9 * next(slow)
        core.steps(6)
        await until(lambda: "Reverted: revision 2" in messages(app), "revert not shown")
        assert re.search(r"p95 inter-token \S+ s > 500 ms", messages(app))
        assert core.runtime.config.theta_f == 0.25
        await pilot.press("H", "right", "enter")
        await until(lambda: "Reclamation paused" in messages(app), "later message lost")
        assert "Reverted: revision 2" in messages(app), "a later message hid the revert"
        await pilot.press("escape")
        assert messages(app) == ""


async def test_unconfirmed_trial_is_reverted_with_its_own_mark(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url, size=(120, 40)) as (app, pilot):
        await open_trial(app, pilot, "backspace", *"0.02", "enter")
        await until(lambda: core.runtime.revision == 3, "not tried and reverted")
        assert core.runtime.config.theta_f == 0.25
        await until(lambda: "▼3" in screen_text(app), "no mark of the revert")
        await until(lambda: "not confirmed within 1 s" in messages(app), "no reason")


async def test_invalid_terms_are_refused_before_anything_is_sent(served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await open_trial(app, pilot, "backspace", "x", "enter")
        await until(lambda: "minutes = 'x' is not a number" in screen_text(app), "not refused")
        await pilot.press("backspace", "enter")
        await until(lambda: "needs a time limit or guard" in screen_text(app), "no limit is one")
        await pilot.press("escape")
        assert isinstance(app.screen, ControlScreen)
    assert applied(served) == []


async def test_second_change_while_one_is_on_trial_is_refused_in_words(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        await open_trial(app, pilot, "enter")
        await until(lambda: "On trial" in messages(app), "no trial")
        await until(lambda: app.source.feed.model.config.desired.theta_f == 0.24, "not seen")
        await app.dashboard.action_settings("theta_f")
        await until(lambda: "ON TRIAL" in screen_text(app), "no bar on the page")
        await pilot.press("left", "enter")
        await until(lambda: "Refused" in outcome(app), "not refused")
        assert f"revision 2 by {trial(core).actor} is on trial" in outcome(app)


async def test_lower_budget_is_confirmed_with_the_host_named_and_cancel_focused(
    core: LiveEngine,
    served: Served,
) -> None:
    core.configure(policy={"name": "random"}, park_bytes=0)  # what is parked is no loss
    core.steps(2)
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("budget_tokens")
        await pilot.press(*"64", "enter")
        await until(lambda: isinstance(app.screen, ConfirmScreen), "not asked")
        await pilot.pause(0.2)
        text = screen_text(app)
        change = core.call("patch_config", patch={"budget_tokens": 64}, validate_only=True)
        evicted = change.what_if.evicted_tokens
        assert evicted > 1000
        for part in (
            served.url.removeprefix("http://"),
            "demo/test-llama",
            "budget_tokens 256 → 64",
            f"It evicts {evicted:,} tokens now",
            "cannot come back",
        ):
            assert part in text
        assert app.screen.focused.id == "cancel"
        await pilot.press("enter")
        await until(lambda: isinstance(app.screen, ControlScreen), "dialog stays")
        await until(lambda: "Cancelled" in outcome(app), "not shown")
        assert applied(served) == []
        await pilot.press("enter")
        await until(lambda: isinstance(app.screen, ConfirmScreen), "not asked again")
        await pilot.press("right", "enter")
        await until(lambda: core.runtime.config.budget_tokens == 64, "not applied")


async def test_higher_budget_needs_no_confirmation(core: LiveEngine, served: Served) -> None:
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("budget_tokens")
        await pilot.press(*"90000", "enter")
        await until(lambda: core.runtime.config.budget_tokens == 90000, "not applied")
        assert isinstance(app.screen, ControlScreen)


@pytest.mark.usefixtures("stepping")
async def test_superseded_change_has_an_alert_until_dismissed(
    core: LiveEngine, served: Served
) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("H", "right", "enter")
        await until(lambda: "Reclamation paused" in messages(app), "not paused")
        # A change that no step used is superseded, too, with another message.
        await until(lambda: app.source.feed.model.config.effective_revision == 2, "not in force")
        core.call("patch_config", actor="ana", patch={"reclamation": "auto"})
        await until(lambda: "Superseded: your revision 2 is overridden" in messages(app), "unsaid")
        assert "ana set reclamation paused → auto (rev 3)" in messages(app)


async def test_failing_part_of_the_server_is_in_the_header_and_has_an_alert(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "PERIOD_S", 0.05)
    async with running(served.url, size=(80, 24)) as (app, pilot):
        assert "FAILS" not in screen_text(app)
        segments = served.service.journal.flights[0].segments
        await until(lambda: served.engine.flight.recording, "not recording")
        folder = segments.directory
        folder.rename(folder.with_name("away"))
        folder.write_text("a file where the directory was")
        segments.ends_at = 0.0  # the next segment cannot be opened
        await until(lambda: "recorder FAILS" in screen_text(app).splitlines()[0], "no badge")
        dead = "stopped: [Errno 20] Not a directory"
        await until(lambda: f"The server's recorder FAILS: {dead}" in messages(app), "not shown")
        await pilot.press("escape")
        assert messages(app) == ""
        folder.unlink()
        await until(lambda: "recorder works again" in messages(app), "not shown")
        await until(lambda: "FAILS" not in screen_text(app).splitlines()[0], "the badge stays")


@pytest.mark.parametrize("state", ["applied", "not applied"])
async def test_change_whose_answer_is_lost_is_looked_up_and_told(
    core: LiveEngine, served: Served, state: str
) -> None:
    server, bus = served.line, served.bus
    async with running(served.url) as (app, pilot):
        server.answers_late, server.hangs = state == "applied", state != "applied"
        bus.timeout_s = 0.3
        await pilot.press("H", "right", "enter")
        await until(lambda: "Looking it up" in messages(app), "unsaid")
        assert f"the engine did not answer 'patch_config' within {bus.timeout_s:g} s" in messages(
            app
        )
        bus.timeout_s, server.answers_late, server.hangs = LIMIT_S, False, False
        if state == "applied":
            await until(lambda: "Reclamation paused: revision 2" in messages(app), "not told")
            assert "was looked up: it is applied" in messages(app)
        else:
            await until(lambda: "nothing was done" in messages(app), "not told")
            assert core.runtime.config.reclamation == "auto"


async def test_settings_whose_answer_is_lost_are_looked_up_and_told(
    core: LiveEngine, served: Served
) -> None:
    server = served.line
    async with running(served.url) as (app, pilot):
        await app.dashboard.action_settings("theta_f")
        await pilot.press("right")
        await until(lambda: app.screen.patch, "no edits")
        server.answers_late, served.bus.timeout_s = True, 0.3
        await pilot.press("enter")
        await until(lambda: "Looking it up" in outcome(app), "unsaid")
        server.answers_late, served.bus.timeout_s = False, LIMIT_S
        await until(lambda: "revision 2" in outcome(app), "not told")
        assert "was looked up: it is applied" in outcome(app)
        assert core.runtime.revision == 2


@pytest.mark.usefixtures("stepping")
async def test_unrelated_changes_of_other_clients_are_only_logged(
    core: LiveEngine,
    served: Served,
) -> None:
    async with running(served.url) as (app, pilot):
        await pilot.press("H", "right", "enter")
        await until(lambda: "Reclamation paused" in messages(app), "not paused")
        core.steps(2)  # with this revision, which else were overtaken
        core.call("patch_config", actor="ana", patch={"batch_size": 8})
        await until(
            lambda: any(e.data.get("actor") == "ana" for e in app.source.feed.model.events),
            "not seen",
        )
        await pilot.pause(0.3)
        assert "Superseded" not in messages(app)


@pytest.mark.parametrize(
    ("before", "change", "evicted", "asks"),
    [
        ({}, {"theta_f": 0.1}, 0, False),
        ({}, {"reclamation": "off"}, 0, False),
        ({}, {"budget_tokens": 256}, 0, True),
        ({"policy": NONE}, {"budget_tokens": 256}, 0, False),
        ({}, {"budget_tokens": 1024}, 0, False),
        ({}, {"budget_tokens": 1024}, 12, False),
        ({"budget_ratio": 0.5}, {"budget_tokens": 256}, 0, False),
        ({"budget_ratio": 0.5}, {"budget_ratio": 0.33}, 0, True),
        ({"budget_ratio": 0.5}, {"budget_ratio": 0.6}, 0, False),
        ({"budget_ratio": 0.5}, {"budget_floor_tokens": 16}, 0, True),
        ({"budget_ratio": 0.5}, {"budget_ratio": 0.0}, 0, True),
        ({}, {"theta_f": 0.1}, 12, False),
        ({}, {"interval_tokens": 8}, 12, True),
        ({"policy": NONE}, {"policy": H2O}, 0, True),
        ({}, {"policy": NONE}, 0, False),
        ({}, {"policy": wire.PolicyChoice("h2o", {"sinks": 1})}, 0, False),
        ({"evict_when": "pressure"}, {"evict_when": "always"}, 0, True),
        ({"evict_when": "pressure"}, {"evict_when": "always"}, 12, True),
        ({"evict_when": "pressure", "policy": NONE}, {"evict_when": "always"}, 0, False),
        ({}, {"evict_when": "pressure"}, 0, False),
        ({"evict_when": "pressure"}, {"evict_after_wait_ms": 500}, 0, False),
    ],
)
def test_only_irreversible_changes_need_confirmation(
    before: dict, change: dict, evicted: int, asks: bool
) -> None:
    values = replace(VALUES, **before)
    assert (irreversible(values, replace(values, **change), evicted) is not None) is asks


def test_lower_floor_is_said_to_take_tokens_only_while_memory_is_short() -> None:
    rows = [replace(ROW, live=live, prompt_tokens=500) for live in (300, 100)]
    lower = replace(VALUES, budget_tokens=256)
    assert irreversible(VALUES, lower, 0, rows) == (
        "Requests keep 256 live tokens; they hold 44 tokens more than that."
    )
    pressure = replace(VALUES, evict_when="pressure", budget_ratio=0.5, budget_floor_tokens=16)
    assert irreversible(pressure, replace(pressure, budget_ratio=0.3), 0, rows) == (
        "Requests may be cut down to 30% of their prompt, at least 16 tokens, while memory is "
        "short; they hold 150 tokens more than that."
    )


def test_terms_are_minutes_for_people_and_seconds_on_the_wire() -> None:
    terms = parse_terms("2.5", {"inter_token_p95": "", "preemptions": " 3 "})
    assert terms == {"confirm_within_s": 150, "guards": [Guard(metric="preemptions", above=3)]}
    guarded = parse_terms("", {"inter_token_p95": "40 ms"}, "f > 0.5; rate(preemptions)<1;")
    assert guarded["confirm_within_s"] is None
    assert [(guard.metric, guard.limit) for guard in guarded["guards"]] == [
        ("latency_seconds{kind=inter_token,quantile=0.95}", 0.04),
        ("f", 0.5),
        ("rate(preemptions)", 1),
    ]
    assert parse_terms("", {"inter_token_p95": "1.5s"})["guards"][0].limit == 1.5
    for example in EXAMPLES:
        assert len(parse_terms("", {}, example)["guards"]) == 1
    with pytest.raises(ValueError, match="needs a unit: 2 ms or 2 s"):
        parse_terms("", {"inter_token_p95": "2"})
    for minutes, name, text, others in (
        ("-1", "preemptions", "", ""),
        ("", "preemptions", "-1", ""),
        ("", "preemptions", "nan", ""),
        ("1", "preemptions", "", "f"),
    ):
        with pytest.raises(ValueError, match="is not"):
            parse_terms(minutes, {name: text}, others)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(272, "4:32"), (0, "0:00"), (-3, "0:00"), (3723, "1:02:03")]
)
def test_countdown_reads_like_a_clock(seconds: float, shown: str) -> None:
    assert countdown(seconds) == shown
