"""Policies and signals of other packages: found by entry point, validated, harmless when broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.core.harness import CoreEngine
from tests.support.core.live import controller_of
from tests.support.packages import Install, install_example, installer
from vtoken.base.errors import RefusedError
from vtoken.policies import describe_policies, make_policy, policy_names
from vtoken.policies.signals import Accumulator, Signal
from vtoken.wire.commands import Command, Policies

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NONE = {"name": "none"}  # until a test chooses a package's
FIXED = {"policy": NONE, "budget_tokens": 12, "interval_tokens": 0, "evict_when": "always"}


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    with installer(tmp_path) as put:
        yield put


@pytest.fixture
def example(install: Install) -> None:
    install_example(install, "policy")


def with_policies(install: Install, points: dict[str, str], files: dict[str, str]) -> None:
    """Install the package `vtoken-broken`."""
    install("vtoken-broken", {"vtoken.policies": points}, files)


@pytest.mark.parametrize("file", ["policy/evenly_spaced.py", "signal/least_attention.py"])
def test_the_guide_shows_the_very_file_that_is_tested(file: str) -> None:
    source = (EXAMPLES / file).read_text()
    guide = (ROOT / "docs" / "policies.md").read_text()
    assert f"```python\n{source}```" in guide
    assert len(source.splitlines()) <= 30
    declared = (EXAMPLES / file).with_name("pyproject.toml").read_text()
    points = declared[declared.index("[project.entry") : declared.index("[tool.")].strip()
    assert points in guide


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
        config=FIXED | {"interval_tokens": 2, "reclamation": reclamation},
    )
    engine.add("a", 42)
    engine.step()
    result = controller_of(engine).patch_config({"policy": {"name": "evenly_spaced"}})
    assert result.desired is not None
    assert result.desired.policy.params == {"sinks": 4}
    engine.step()
    kept = engine.runtime.tables["a"].live_ids().tolist()
    assert kept == [0, 1, 2, 3, 4, 35, *range(36, 42), 42]
    engine.run(20)
    assert engine.runtime.counters.invariants.violations == 0


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
    def select_victims(self, view):
        return view.token_ids[: view.num_victims]
    def min_budget_tokens(self):
        return 8 / self.params.window if self.params.window == 5 else 8 // self.params.window
"""


@pytest.mark.parametrize("window", [0, -1, 3, 5, 9])
def test_parameters_that_make_another_packages_policy_fail_are_refused(
    window: int, install: Install
) -> None:
    with_policies(install, {"picky": "picky:Picky"}, {"picky.py": PICKY})
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
    "chooses nothing": (
        {"lazy": "p_idle:Lazy"},
        "from vtoken.policies import Policy\nclass Lazy(Policy):\n    name, summary = 'lazy', '-'",
        "defines neither select_many nor select_victims",
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
    with_policies(install, points, {f"{module}.py": source})
    offered = [info.name for info in describe_policies()]
    assert offered == policy_names()
    assert offered.count(name) == (name == "h2o")
    assert "evenly_spaced" in offered  # the others are not concerned
    listed: Any = controller_of(CoreEngine(num_blocks=128)).handle(Command(call=Policies())).value
    (broken,) = [info for info in listed if info.error is not None]
    assert broken.name == f"{name} (vtoken-broken)"
    assert why in broken.error
    if name != "h2o":
        with pytest.raises(RefusedError, match="unknown policy 'lazy'; lazy"):
            make_policy(name, {})


# ---------------------------------------------------------------- signals


@pytest.fixture
def least_attention(install: Install) -> None:
    install_example(install, "signal")


@pytest.mark.usefixtures("least_attention")
def test_a_policy_of_a_package_evicts_by_a_signal_of_its_own() -> None:
    """The scheduler asks for it at its default depth, and the worker's scores decide."""
    engine = CoreEngine(num_blocks=128, block_size=4, config=FIXED)
    controller_of(engine).patch_config({"policy": {"name": "least_attention"}})
    engine.worker.score = lambda _, n: np.abs(np.arange(n, dtype=np.float32) - 20)
    engine.add("a", 42)
    plan = engine.step()
    assert plan.signals["a"] == (Signal("attention_least", 4, layers=(2,)),)
    engine.steps(6)
    engine.check()
    kept = engine.runtime.tables["a"].live_ids().tolist()
    assert kept[:3] == [0, 1, 2]  # far from 20, where the scores are lowest
    assert len(kept) == 13
    assert engine.runtime.counters.invariants.violations == 0


@pytest.mark.usefixtures("least_attention")
def test_a_signal_of_a_package_is_accumulated_by_its_definition() -> None:
    signal = Signal("attention_least", 4)
    accumulator = Accumulator(signal)
    rows = np.random.default_rng(0).random((5, 5), dtype=np.float32)
    for number, row in enumerate(rows):
        live = [token for token in range(number + 1) if token != 1 or number < 3]
        accumulator.add(np.array(live), row[None, live], 1)
    found = accumulator.scores()
    assert found is not None
    newest = np.tril(rows)[-4:, [0, 2, 3, 4]]
    assert found.tolist() == newest.min(axis=0).tolist()
    assert signal.first_report == "4 probed queries of it, or its whole prompt"


def test_without_its_package_a_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'attention_least' is not one of attention_hits"):
        Signal("attention_least", 4)


KIND = """
from vtoken.policies.signals import AttentionKind
class Odd(AttentionKind):
    name, summary, queries = "odd", "-", "window"
    def over_queries(self, given):
        return {}
"""
BROKEN_KINDS = {
    "no kind": ("Odd = dict", "not a subclass"),
    "numbers of queries": (KIND.format("given.sum(axis=-1)"), "numbers of shape"),
    "not linear": (KIND.format("given.max(axis=-2)"), "do not add up"),
    "of another type": (KIND.format("given.argmax(axis=-2)"), "type int64"),
    "not a sum": (
        KIND.format("given.mean(axis=-2)").replace('"window"', '"all"'),
        "its over_queries is not a sum",
    ),
    "without queries": (
        KIND.format("given.mean(axis=-2)").replace('"window"', '"some"'),
        "neither newest nor window nor all",
    ),
}


@pytest.mark.parametrize("what", BROKEN_KINDS)
def test_a_broken_signal_is_reported_and_not_offered(what: str, install: Install) -> None:
    source, why = BROKEN_KINDS[what]
    install("vtoken-broken", {"vtoken.signals": {"odd": "odd:Odd"}}, {"odd.py": source})
    listed: Any = controller_of(CoreEngine(num_blocks=128)).handle(Command(call=Policies())).value
    (broken,) = [info for info in listed if info.error is not None]
    assert broken.name == "odd (vtoken-broken)"
    assert why in broken.error
    with pytest.raises(ValueError, match="kind 'odd' is not one of"):
        Signal("odd", 4)
