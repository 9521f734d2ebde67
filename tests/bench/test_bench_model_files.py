"""The fingerprint of a model's weights, which the keys of logs have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vtoken_bench.grounds.model_files import PIECE_BYTES, PIECES, fingerprint


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
    with pytest.raises(ValueError, match=str(model)):
        fingerprint(model)


def test_a_model_whose_configuration_nests_too_deep_is_named(model: Path) -> None:
    (model / "config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ValueError, match=str(model)):
        fingerprint(model)
