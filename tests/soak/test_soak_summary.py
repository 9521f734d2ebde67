"""The summary of a soak: what ran on which commit, and what it counted."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import msgspec

from tests.soak.run import summary
from tests.soak.tally import Tally
from vtoken_bench.output import commit_of

ROOT = Path(__file__).parents[2]


def test_a_summary_names_its_run_and_sums_its_phases() -> None:
    args = Namespace(seed=7, minutes=0.5, phase_seconds=15.0, only="tiny", steps=None)
    tallies = [Tally(requests=3, relocations=2), Tally(requests=4, violations=1)]
    found = msgspec.json.decode(summary(args, ["one", "two"], tallies))
    assert (found["seed"], found["minutes"], found["only"]) == (7, 0.5, "tiny")
    assert found["commit"] == commit_of(ROOT / "vtoken", ROOT / "tests" / "soak")
    assert not found["ok"]
    assert (found["total"]["requests"], found["total"]["violations"]) == (7, 1)
    phases = [(phase["name"], phase["seed"]) for phase in found["phases"]]
    assert phases == [("one", 7), ("two", 8)]
