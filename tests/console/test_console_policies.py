"""The settings page: bounds, choices, and the measured quality of policies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.console_harness import make_busy, running, screen_text, until
from tests.support.documents import ROW
from tests.support.served_core import serving
from tests.support.serving import Served
from vtoken import wire
from vtoken.policies import describe_policies
from vtoken_console.changes.fields import EXPERIMENTS, GROUPS, Field
from vtoken_console.changes.policies import facts_text, kept_share, measured_text, probe_text
from vtoken_console.widgets.form import Form

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


def test_facts_are_those_of_the_next_smaller_measured_budget() -> None:
    half, third, sixth = INFOS["keydiff"].facts
    for share, point in ((0.5, half), (0.4, third), (0.1, sixth), (None, half)):
        text = facts_text(INFOS["keydiff"], share)
        assert text.split() == [f"{point.found:.0%}", f"{point.later:.0%}"]
    assert INFOS["h2o"].facts[0].later is None
    assert len(facts_text(INFOS["h2o"], 0.5).split()[1]) == 1  # a dash
    assert facts_text(msgspec.structs.replace(INFOS["h2o"], facts=[]), 0.5) == "not measured"
    assert measured_text(INFOS.values(), 0.5) == ON_SMALL


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


async def test_policies_are_listed_with_their_facts_at_the_current_budget() -> None:
    async with serving(make_busy()) as served, running(served.url, size=(120, 36)) as (app, _):
        await app.dashboard.action_settings("policy")
        await until(lambda: "probe of a request" in screen_text(app), "no table")
        lines = screen_text(app).splitlines()
        for name, is_in_force in (("h2o", True), ("tova", False)):
            facts = facts_text(INFOS[name], 0.5)
            (row,) = (line for line in lines if f" {name} " in line and facts in line)
            assert ("in force" in row) == is_in_force
        assert "on SmolLM2-135M-Instruct, " in screen_text(app)
