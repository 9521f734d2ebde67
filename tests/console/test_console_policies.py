"""The settings page: bounds, choices, and the measured quality of policies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.console_harness import make_busy, running, screen_text, until
from tests.support.documents import ROW
from tests.support.profiles import made_up
from tests.support.served_core import serving
from tests.support.serving import Served
from vtoken import wire
from vtoken.policies import describe_policies
from vtoken_console.changes.fields import EXPERIMENTS, GROUPS, Field
from vtoken_console.changes.policies import facts_text, kept_share, measured_text, probe_text
from vtoken_console.widgets.form import Form

QUALITY = [
    wire.Recall(keep=keep, recall=recall, samples=24)
    for keep, recall in ((0.5, 0.96), (0.25, 0.75), (0.125, 0.25))
]
INFOS = {info.name: info for info in describe_policies()}
ON_SMALL = "on SmolLM2-135M-Instruct, 50% of the prompt kept"


def rows(*lengths: int, state: str = "running") -> list[wire.RequestRow]:
    return [
        msgspec.structs.replace(ROW, prompt_tokens=length - 1, output_tokens=1, state=state)
        for length in lengths
    ]


@pytest.mark.parametrize(
    ("values", "running", "share"),
    [
        ({"budget_ratio": 0.5, "budget_tokens": 100}, rows(100, 400, 1000), 0.5),
        ({"budget_ratio": 0.0, "budget_tokens": 100}, rows(100, 400, 1000), 0.25),
        ({"budget_ratio": 0.0, "budget_tokens": 900}, rows(100), 1.0),
        ({"budget_ratio": 0.0, "budget_tokens": 100}, rows(100, state="waiting"), None),
        ({"budget_ratio": 0.0, "budget_tokens": "1x"}, rows(100), None),
    ],
)
def test_the_edited_floor_is_a_share_of_a_prompt(
    values: dict[str, Any], running: list[wire.RequestRow], share: float | None
) -> None:
    assert kept_share(values, running) == share


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.6, "96% of 24 needles at 50%"),
        (0.5, "96% of 24 needles at 50%"),
        (0.49, "75% of 24 needles at 25%"),
        (0.01, "25% of 24 needles at 12%"),
        (None, "96% of 24 needles at 50%"),
    ],
)
def test_quality_is_that_of_the_next_smaller_measured_budget(
    share: float | None, text: str
) -> None:
    assert facts_text(msgspec.structs.replace(INFOS["h2o"], quality=QUALITY), share) == text


def test_facts_of_a_small_model_stand_in_for_what_was_not_measured() -> None:
    half, third, sixth = INFOS["keydiff"].facts
    for share, point in ((0.5, half), (0.4, third), (0.1, sixth), (None, half)):
        text = facts_text(INFOS["keydiff"], share)
        assert text.split() == [f"{point.found:.0%}", f"{point.later:.0%}"]
    assert INFOS["h2o"].facts[0].later is None
    assert len(facts_text(INFOS["h2o"], 0.5).split()[1]) == 1  # a dash
    assert facts_text(msgspec.structs.replace(INFOS["h2o"], facts=[]), 0.5) == "not measured"
    assert measured_text(INFOS.values(), 0.5, "a/b") == f"{ON_SMALL}; yours: vtoken calibrate a/b"
    measured = msgspec.structs.replace(INFOS["h2o"], quality=QUALITY)
    assert measured_text([measured, INFOS["tova"]], 0.5, "a/b") == (
        f"needles: on this model; facts: {ON_SMALL}"
    )


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
        await app.dashboard.action_settings("policy")
        await until(lambda: app.screen.query_one(Form).view is not None, "not shown")
        form, model = app.screen.query_one(Form), app.source.feed.model
        form.action_jump(-1)
        assert form.chosen == EXPERIMENTS
        await pilot.press("space")
        await until(lambda: len(form.rows) == len(form.fields) + len(GROUPS), "still folded")
        for number, field in enumerate(form.rows):
            form.action_jump(number)
            if isinstance(field, Field) and field.path[-1] != "name":
                words = " ".join(" ".join(detail(form)).split())
                assert field.bound_text in words, field.name
        form.action_jump(1)
        names, seen = {info.name for info in model.hello.policies}, set()
        for _ in names:
            await pilot.press("right")
            seen |= names & {line.split()[1] for line in detail(form) if len(line.split()) > 1}
        assert seen == names


async def test_policies_are_listed_with_their_quality_at_the_current_budget() -> None:
    core = make_busy()
    core.runtime.ranking.calibration = made_up(policies={"h2o": QUALITY})
    async with serving(core) as served, running(served.url, size=(120, 36)) as (app, _):
        await app.dashboard.action_settings("policy")
        await until(lambda: "probe of a request" in screen_text(app), "no table")
        lines = screen_text(app).splitlines()
        (row,) = (line for line in lines if "needles at" in line)
        assert "h2o" in row
        assert "in force" in row
        (row,) = (line for line in lines if " tova " in line)
        assert facts_text(INFOS["tova"], 0.5) in row
        assert "needles: on this model" in screen_text(app)
