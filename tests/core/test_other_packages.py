"""Policies of other packages: found by entry point, validated, harmless when broken."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine
from vtoken.commands import Command, Policies
from vtoken.control.controller import Controller
from vtoken.control.facts import EngineFacts
from vtoken.control.report import Reporter
from vtoken.errors import RefusedError
from vtoken.policies import describe_policies, make_policy, policy_names, registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "policy"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(package, entry points, files)`: what an installer leaves behind, on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, points: dict[str, str], files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        info = tmp_path / f"{package.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[vtoken.policies]", *lines, ""]))
        registry._load_all.cache_clear()

    yield put
    monkeypatch.undo()
    registry._load_all.cache_clear()
    shutil.rmtree(tmp_path)


@pytest.fixture
def example(install: Install) -> None:
    """The example package, as its own pyproject.toml declares it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    install(
        project["project"]["name"],
        project["project"]["entry-points"]["vtoken.policies"],
        {file.name: file.read_text() for file in EXAMPLE.glob("*.py")},
    )


def controller(engine: CoreEngine) -> Controller:
    facts = EngineFacts("e", "0", "0", "m", "cpu")
    return Controller(Reporter(engine.runtime, facts, np.zeros(128, dtype=np.bool_)))


def test_the_guide_shows_the_very_file_that_is_tested() -> None:
    source = (EXAMPLE / "evenly_spaced.py").read_text()
    guide = (ROOT / "docs" / "policies.md").read_text()
    assert f"```python\n{source}```" in guide
    assert len(source.splitlines()) <= 30
    declared = (EXAMPLE / "pyproject.toml").read_text()
    assert declared[declared.index("[project.entry") :].split("\n\n")[0] in guide


def test_without_a_package_there_is_no_such_policy() -> None:
    assert "evenly_spaced" not in policy_names()


@pytest.mark.usefixtures("example")
def test_a_package_offers_its_policy_with_schema_and_bounds() -> None:
    (info,) = [info for info in describe_policies() if info.name == "evenly_spaced"]
    assert info.params_schema["properties"]["sinks"]["maximum"] == 1024
    assert make_policy("evenly_spaced", {}).min_budget_tokens() == 6
    with pytest.raises(RefusedError) as caught:
        make_policy("evenly_spaced", {"sinks": -1})
    assert caught.value.field == "policy.params.sinks"


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("reclamation", ["auto", "off"])
def test_its_policy_is_chosen_live_and_keeps_evenly_spaced_tokens(reclamation: str) -> None:
    engine = CoreEngine(
        num_blocks=128,
        block_size=4,
        config={"budget_tokens": 12, "interval_tokens": 2, "reclamation": reclamation},
    )
    engine.add("a", 42)
    engine.step()
    result = controller(engine).patch_config({"policy": {"name": "evenly_spaced"}})
    assert result.desired is not None
    assert result.desired.policy.params == {"sinks": 4}
    engine.step()
    kept = engine.runtime.tables["a"].live_ids().tolist()
    assert kept == [0, 1, 2, 3, 4, 35, *range(36, 42), 42]
    for _ in range(20):
        engine.step()
        engine.check()
    assert engine.runtime.counters.violations == 0


PICKY = """
from vtoken.policies import Params, Policy
from vtoken.policies.signals import Signal
class PickyParams(Params, frozen=True):
    window: int = 8
class Picky(Policy):
    name, summary, needs, Params = "picky", "-", frozenset({"attention"}), PickyParams
    def signal(self):
        window = self.params.window
        return "attention" if window == 3 else Signal("attention_window", window)
    def min_budget_tokens(self):
        return 8 / self.params.window if self.params.window == 5 else 8 // self.params.window
"""


@pytest.mark.parametrize("window", [0, -1, 3, 5, 9])
def test_parameters_that_make_another_packages_policy_fail_are_refused(
    window: int, install: Install
) -> None:
    install("vtoken-picky", {"picky": "picky:Picky"}, {"picky.py": PICKY})
    assert make_policy("picky", {"window": 4}).reads is not None
    with pytest.raises(RefusedError, match="does not accept these parameters"):
        make_policy("picky", {"window": window})


BROKEN: dict[str, tuple[dict[str, str], str, str]] = {
    "cannot be imported": ({"lazy": "p_import:Lazy"}, "import a_module_that_is_not", "a_module"),
    "exits": ({"lazy": "p_exit:Lazy"}, "import sys\nsys.exit('no licence')", "no licence"),
    "names nothing": ({"lazy": "p_nothing:Lazy"}, "", "has no attribute 'Lazy'"),
    "is no policy": ({"lazy": "p_dict:Lazy"}, "Lazy = dict", "not a subclass"),
    "has another name": (
        {"lazy": "p_other:H"},
        "from vtoken.policies import Policy\nclass H(Policy):\n    name = 'h'\n    summary = '-'",
        "has the name 'h', not",
    ),
    "takes a known name": (
        {"h2o": "p_known:H"},
        "from vtoken.policies import Policy\nclass H(Policy):\n    name = 'h2o'\n    summary = '-'",
        "is taken",
    ),
    "has no summary": (
        {"lazy": "p_bare:Lazy"},
        "from vtoken.policies import Policy\nclass Lazy(Policy):\n    name = 'lazy'",
        "no summary",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.usefixtures("example")
def test_a_broken_package_is_reported_and_not_offered(kind: str, install: Install) -> None:
    points, source, why = BROKEN[kind]
    name, module = next((name, value.split(":")[0]) for name, value in points.items())
    install("vtoken-broken", points, {f"{module}.py": source})
    offered = [info.name for info in describe_policies()]
    assert offered == policy_names()
    assert offered.count(name) == (name == "h2o")
    assert "evenly_spaced" in offered  # the others are not concerned
    listed: Any = controller(CoreEngine(num_blocks=128)).handle(Command(call=Policies())).value
    (broken,) = [info for info in listed if info.error is not None]
    assert broken.name == f"{name} (vtoken-broken)"
    assert why in broken.error
    if name != "h2o":
        with pytest.raises(RefusedError, match="unknown policy 'lazy'; lazy"):
            make_policy(name, {})
