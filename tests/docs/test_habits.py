"""Changelog, pre-commit hooks, templates and CI agree with the repository."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import vtoken
from tests.soak import server as soak_server
from tests.soak.phases import plan_phases
from tests.support.core.harness import CoreEngine, make_engine
from tests.support.core.live import make_quiet
from tests.support.engines import engine_args
from tests.support.shipped import PARK_BYTES
from vtoken.core.config.values import default_config, merge_patch
from vtoken.vllm.serve import build_parser, flag_of, initial_patch

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml"))
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)


def make_check() -> list[str]:
    """The programs that `make check` runs, as words without the folder."""
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    return [line.strip().removeprefix("$(BIN)/") for line in recipe.splitlines()]


def test_the_changelog_begins_with_unreleased_and_then_this_version_with_its_date() -> None:
    unreleased, *versions = HEADING.findall((ROOT / "CHANGELOG.md").read_text())
    assert unreleased == "Unreleased"
    dates = []
    for heading in versions:
        version, date = re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", heading).groups()  # type: ignore[union-attr]
        dates.append((version, datetime.date.fromisoformat(date)))
    assert dates[0][0] == vtoken.__version__
    assert [date for _, date in dates] == sorted((date for _, date in dates), reverse=True)


def test_pre_commit_runs_what_make_check_runs() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    entries = [hook["entry"] for hook in repo["hooks"]]
    hooked = {tuple(e.split()[:2]) for e in entries if e.startswith(".venv/bin/ruff")}
    assert hooked == {(".venv/bin/ruff", "check"), (".venv/bin/ruff", "format")}
    for command in make_check():
        program = command.split()[0]
        assert any(e.split()[0] == f".venv/bin/{program}" for e in entries), command


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_issue_form_has_what_github_requires(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content["name"]
    assert content["description"]
    ids = [field["id"] for field in content["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    for field in content["body"]:
        required = "value" if field["type"] == "markdown" else "label"
        assert isinstance(field["attributes"][required], str)


def test_the_bug_report_asks_for_the_doctor() -> None:
    (bug,) = [form for form in FORMS if form.name.startswith("bug")]
    assert "vtoken doctor --json" in bug.read_text()


# ---------------------------------------------------------------- what ships is what is tested


@pytest.fixture
def ships() -> dict[str, Any]:
    """What `vtoken serve --vtoken-policy auto` sets."""
    return initial_patch(build_parser().parse_args(["--vtoken-policy=auto"]))


def test_engines_of_vllm_start_from_what_ships(
    ships: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VTOKEN_ENABLED", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "0")  # set by the call
    assert engine_args()["additional_config"]["vtoken"]["config"] == ships


def test_engines_without_vllm_start_from_what_ships(ships: dict[str, Any]) -> None:
    with make_engine() as busy, make_quiet() as quiet:
        for engine in (CoreEngine(), busy.core, quiet.core):
            num_blocks, config = engine.store.num_blocks, engine.runtime.config
            patch = ships | {"park_bytes": PARK_BYTES, "verify_ratio": config.verify_ratio}
            wanted = merge_patch(
                default_config(num_blocks), patch, num_blocks=num_blocks, num_layers=2
            )
            assert config.values() == wanted.values()


def test_the_soak_starts_with_what_ships_and_keeps_it_for_a_phase(ships: dict[str, Any]) -> None:
    first, *_ = plan_phases(seconds=1, seed=0, model="m", logs="l", only=None, phase_seconds=1)
    assert ships.keys() <= set(first.engine.keeps)
    flags = {flag for flag, _, _ in (argument.partition("=") for argument in soak_server.ARGUMENTS)}
    assert "--vtoken-policy=auto" in soak_server.ARGUMENTS
    assert flags & {flag_of(name) for name in ships} == {"--vtoken-policy"}
