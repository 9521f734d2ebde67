"""`vtoken console --sample`: the recording in the package holds its incident, and plays."""

from __future__ import annotations

import gzip
import re

from scripts import sample
from tests.support.cli_harness import run
from tests.support.console_harness import running, screen_text
from vtoken_console.feed.replay import SAMPLE


def test_it_is_ample_then_short_then_given_then_tried_and_undone() -> None:
    sample.check(SAMPLE)


def test_a_recording_that_ends_before_a_scene_is_refused() -> None:
    seen = list(sample.statuses(SAMPLE))
    missing = {sample.missing_scene(iter(seen[:end])) for end in range(len(seen))}
    assert missing >= {*sample.SCENES}


def test_it_names_nothing_of_the_machine_that_made_it() -> None:
    text = gzip.decompress(SAMPLE.read_bytes()).decode()
    assert not re.findall(r"/(?:home|root|tmp|work)/[\w/.-]*", text)
    assert '"actor":"ana@' in text


async def test_it_opens_with_the_guide_and_without_a_server() -> None:
    async with running(SAMPLE.name, size=(80, 24), recording=SAMPLE, guided=True) as (app, _):
        assert "first minute" in screen_text(app)
        assert app.source.replay.indexed


async def test_it_is_a_recording_itself() -> None:
    ran = await run("console", "--sample", "--replay", "x.jsonl.gz")
    assert ran.code == 2
    assert "leave --replay out" in ran.err
