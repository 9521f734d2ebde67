"""The settings page: bounds, choices, and the measured quality of policies."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.console_harness import make_busy, running, screen_text, until
from tests.support.profiles import made_up
from tests.support.served_core import serving
from tests.support.serving import Served
from vtoken import wire
from vtoken.policies import describe_policies
from vtoken_console.changes.policies import (
    budget_share,
    probe_text,
    quality_text,
    remedy,
    share_text,
)
from vtoken_console.widgets.form import Form

QUALITY = [
    wire.Recall(keep=keep, recall=recall, samples=24)
    for keep, recall in ((0.5, 0.96), (0.25, 0.75), (0.125, 0.25))
]
INFOS = {info.name: info for info in describe_policies()}


def rows(*lengths: int, state: str = "running") -> list[wire.RequestRow]:
    core = make_busy(60, 1)
    core.close()
    (row,) = core.reporter.rows()
    return [
        msgspec.structs.replace(row, prompt_tokens=length - 1, output_tokens=1, state=state)
        for length in lengths
    ]


def test_budget_is_a_share_of_the_median_running_request() -> None:
    assert budget_share(rows(100, 400, 1000), 100) == 0.25
    assert budget_share(rows(100, state="waiting"), 100) is None
    assert share_text(0.25) == "the budget holds 25% of the median request"
    assert "full" in share_text(1.0)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.6, "96% of 24 at 50%"),
        (0.5, "96% of 24 at 50%"),
        (0.49, "75% of 24 at 25%"),
        (0.01, "25% of 24 at 12%"),
        (None, "25% at 12%, 96% at 50%"),
    ],
)
def test_quality_is_that_of_the_next_smaller_measured_budget(
    share: float | None, text: str
) -> None:
    assert quality_text(QUALITY, share) == text


def test_quality_that_was_not_measured_is_not_guessed() -> None:
    assert quality_text([], 0.5) == "not measured"
    assert remedy(INFOS.values(), "a/b") == "not measured: vtoken calibrate a/b"
    measured = msgspec.structs.replace(INFOS["h2o"], quality=QUALITY)
    assert remedy([measured, INFOS["none"]], "a/b") == ""


def test_price_of_a_probe_is_shown_where_it_was_measured() -> None:
    price = wire.Price(us=41.25, per="request", source="measured", samples=3)
    h2o = INFOS["h2o"]
    assert probe_text(INFOS["tova"], h2o, price) == "41.2 µs"
    prior = msgspec.structs.replace(price, source="prior")
    assert probe_text(INFOS["tova"], h2o, prior) == "probes attention"
    assert probe_text(INFOS["keydiff"], h2o, price) == "probes keys"
    assert probe_text(INFOS["tova"], h2o, None) == "probes attention"
    assert probe_text(INFOS["streaming_llm"], h2o, price) == "no probe"


def detail(form: Form) -> list[str]:
    """The lines below the settings."""
    lines = [form.render_line(y).text for y in range(form.size.height)]
    first = next(y for y, line in enumerate(lines) if line.startswith("─"))
    return lines[first:]


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_every_bound_choice_and_policy_can_be_read(
    served: Served, size: tuple[int, int]
) -> None:
    async with running(served.url, size=size) as (app, pilot):
        await pilot.press("P")
        await until(lambda: app.screen.query_one(Form).view is not None, "not shown")
        form, model = app.screen.query_one(Form), app.source.feed.model
        names = {info.name for info in model.hello.policies}
        for number, field in enumerate(form.rows):
            form.action_jump(number)
            if field.path[-1] != "name":
                words = " ".join(" ".join(detail(form)).split())
                assert field.bound_text in words, field.label
        form.action_jump(0)
        seen = set()
        for _ in names:
            await pilot.press("right")
            seen |= names & {line.split()[1] for line in detail(form) if len(line.split()) > 1}
        assert seen == names
        assert "not measured: vtoken calibrate demo/test-llama" in screen_text(app)


async def test_policies_are_listed_with_their_quality_at_the_current_budget() -> None:
    core = make_busy()
    core.runtime.ranking.calibration = made_up(policies={"h2o": QUALITY})
    async with serving(core) as served, running(served.url, size=(120, 36)) as (app, pilot):
        await pilot.press("P")
        await until(lambda: "probe of a request" in screen_text(app), "no table")
        share = budget_share(app.source.feed.model.requests.values(), 256)
        assert share is not None
        lines = screen_text(app).splitlines()
        (row,) = (line for line in lines if "at 25%" in line or "at 50%" in line)
        assert "h2o" in row
        assert quality_text(QUALITY, share) in row
        (row,) = (line for line in lines if " tova " in line)
        assert "not measured" in row
        assert share_text(share) in screen_text(app)
