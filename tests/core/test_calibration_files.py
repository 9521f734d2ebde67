"""Profiles as files, and the fingerprint that ties one to a model's weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.profiles import made_up
from tests.support.small_files import limited
from vtoken.base.errors import ProfileError
from vtoken.calibration import store
from vtoken.calibration.model_files import PIECE_BYTES, PIECES, fingerprint, model_folder
from vtoken.core.config.calibration import CalibrationProfile, SignalProfile


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files that the fingerprint reads."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 4, "transformers_version": "5.0", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = np.random.default_rng(0).normal(size=(2, 64, 512)).astype(np.float32)
    save_file({"a": weights[0], "b": weights[1]}, folder / "model.safetensors")
    return folder


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---------------------------------------------------------------- the fingerprint


def test_a_copy_elsewhere_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "under-another-name")
    assert fingerprint(copy) == fingerprint(model)
    assert len(fingerprint(model)) == 32


def test_fields_of_how_a_model_runs_do_not_change_the_fingerprint(model: Path) -> None:
    before = fingerprint(model)
    change_config(model, transformers_version="6.0", dtype="bfloat16", _name_or_path="/a")
    assert fingerprint(model) == before
    change_config(model, num_hidden_layers=5)
    assert fingerprint(model) != before


def test_other_weights_of_the_same_shape_are_another_model(model: Path) -> None:
    before = fingerprint(model)
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content)):  # one of two tensors
        content[place] ^= 1
    path.write_bytes(content)
    assert fingerprint(model) != before


def test_pieces_reach_from_the_first_byte_to_the_last(model: Path) -> None:
    path = model / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert path.stat().st_size - header > PIECES * PIECE_BYTES
    before = fingerprint(model)
    for place in (header, path.stat().st_size - 1):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
        assert fingerprint(model) != before
        before = fingerprint(model)


def test_only_shards_of_the_index_count(model: Path) -> None:
    single = model / "model.safetensors"
    single.rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    before = fingerprint(model)
    (model / "consolidated.safetensors").write_bytes(b"another format of the same weights")
    assert fingerprint(model) == before


def test_a_small_file_is_read_completely(model: Path) -> None:
    save_file({"a": np.zeros(4, dtype=np.float32)}, model / "model.safetensors")
    before = fingerprint(model)
    save_file({"a": np.ones(4, dtype=np.float32)}, model / "model.safetensors")
    assert fingerprint(model) != before


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_model_is_named(model: Path, missing: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ProfileError, match=str(model)):
        fingerprint(model)


def test_a_model_whose_configuration_nests_too_deep_is_named(model: Path) -> None:
    (model / "config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ProfileError, match=str(model)):
        fingerprint(model)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ProfileError, match="nobody/nothing is neither a folder nor"):
        model_folder("nobody/nothing")


# ---------------------------------------------------------------- the file


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "profile.json"
    store.write(made_up(), path)
    assert store.read(path) == made_up()
    assert [*path.parent.iterdir()] == [path]  # nothing temporary is left
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_profile_of_another_model_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    store.write(made_up(), path)
    with pytest.raises(ProfileError) as refused:
        store.require(path, model="other/model", fingerprint="f" * 32, num_layers=4, num_heads=4)
    for part in (str(path), "made-up/model", made_up().fingerprint, "other/model", "f" * 32):
        assert part in str(refused.value)
    assert "vtoken calibrate other/model" in str(refused.value)


@pytest.mark.parametrize(
    ("num_layers", "num_heads", "why"),
    [(4, 4, None), (2, 4, "have 2 layers with 4;"), (4, 2, "have 4 layers with 2;")],
)
def test_a_profile_of_more_layers_or_heads_than_the_model_has_is_refused(
    tmp_path: Path, num_layers: int, num_heads: int, why: str | None
) -> None:
    path = tmp_path / "profile.json"
    store.write(made_up(), path)
    weights = made_up().fingerprint

    def require() -> CalibrationProfile:
        return store.require(
            path, model="m", fingerprint=weights, num_layers=num_layers, num_heads=num_heads
        )

    if why is None:
        assert require() == made_up()
        return
    with pytest.raises(ProfileError, match="a profile of 4 layers with 4 query heads") as refused:
        require()
    for part in (str(path), why, "vtoken calibrate m"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a calibration profile"),
        (b"\xff\xfe", "not a calibration profile"),
        (b'{"format": 1, "mod', "not a calibration profile"),
        (b'{"format": 1}', "missing required field"),
    ],
)
def test_a_file_that_is_not_a_profile_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=why) as refused:
        store.read(path)
    assert str(path) in str(refused.value)
    assert "vtoken calibrate" in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        store.read(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"signals": {"key_norm": SignalProfile([4])}}, r"layers \[4\] of key_norm .* 0\.\.3"),
        ({"signals": {"key_norm": SignalProfile([0], [-1])}}, r"heads \[-1\] of key_norm"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    path = tmp_path / "profile.json"
    store.write(made_up(**changes), path)
    with pytest.raises(ProfileError, match=why):
        store.read(path)


def test_an_unwritable_path_is_found_before_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder is needed")
    path = tmp_path / "cache" / "calibration" / "profile.json"
    for attempt in (lambda: store.require_writable(path), lambda: store.write(made_up(), path)):
        with pytest.raises(ProfileError, match="--output"):
            attempt()


def test_a_full_disk_is_found_before_the_measurement(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vtoken.calibration import store; "
        "store.require_writable(Path(sys.argv[1]))"
    )
    command = limited(sys.executable, "-c", code, str(tmp_path / "profile.json"))
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "profile.json cannot be written: File too large; choose another file" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_profiles_are_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_path("ab") == tmp_path / "vtoken" / "calibration" / "ab.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.default_path("ab").is_relative_to(Path.home() / ".cache" / "vtoken")
