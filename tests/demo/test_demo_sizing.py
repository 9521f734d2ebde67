"""The cache size for any model: it fits beside the weights, or an error explains why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtoken.demo import sizing
from vtoken.demo.server import DemoError
from vtoken.demo.sizing import BLOCK_SIZE, MIN_TOKENS, NUM_BLOCKS, RESERVE_BYTES, Geometry, fit

GEOMETRY = Geometry(num_layers=30, num_kv_heads=3, head_size=64, max_model_len=8192)


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 gfni\n", "bfloat16"),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", "bfloat16"),
        ("Features\t: fp asimd i8mm bf16\n", "bfloat16"),
        ("model name\t: bf16 in a name\nflags\t\t: fpu avx2 avx512f\n", "float32"),
        ("", "float32"),
    ],
)
def test_bfloat16_is_chosen_where_the_cpu_has_instructions_for_it(
    tmp_path: Path, cpuinfo: str, dtype: str
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert sizing.faster_dtype(tmp_path / "cpuinfo") == dtype


def test_a_system_that_does_not_say_gets_float32_and_no_memory_check(tmp_path: Path) -> None:
    assert sizing.faster_dtype(tmp_path / "none") == "float32"
    assert sizing.available_bytes(tmp_path / "none") is None
    assert fit("m", GEOMETRY, "float32", None, num_weights=10**12).num_blocks == NUM_BLOCKS


def test_available_memory_is_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:       64 kB\n")
    assert sizing.available_bytes(tmp_path / "meminfo") == 65_536


def test_bytes_per_token_are_those_of_k_and_v_in_all_layers() -> None:
    assert GEOMETRY.bytes_per_token("float32") == 2 * 30 * 3 * 64 * 4
    assert GEOMETRY.bytes_per_token("bfloat16") == 2 * 30 * 3 * 64 * 2


@pytest.mark.parametrize("tokens_left", [MIN_TOKENS, 3000, 6400, 10**6])
def test_weights_cache_and_reserve_fit_into_what_is_available(tokens_left: int) -> None:
    weights = 135_000_000
    left = tokens_left * GEOMETRY.bytes_per_token("float32")
    available = RESERVE_BYTES + 4 * weights + left
    size = fit("m", GEOMETRY, "float32", available, weights)
    assert RESERVE_BYTES + 4 * weights + size.cache_bytes <= available
    assert size.num_blocks == min(NUM_BLOCKS, tokens_left // BLOCK_SIZE)
    assert size.max_model_len <= (size.num_blocks - 1) * BLOCK_SIZE


def test_engines_share_the_blocks_as_they_share_the_traffic() -> None:
    blocks = [
        fit("m", GEOMETRY, "float32", None, 1, num_engines).num_blocks for num_engines in (1, 2, 99)
    ]
    assert blocks == [NUM_BLOCKS, NUM_BLOCKS // 2, MIN_TOKENS // BLOCK_SIZE + 1]


def test_a_model_that_does_not_fit_is_refused_with_the_figures() -> None:
    weights = 7 * 2**30
    says = r"big does not fit: 28\.00 GiB of weights in float32.*8\.00 GiB of memory are available"
    with pytest.raises(DemoError, match=says):
        fit("big", GEOMETRY, "float32", 8 << 30, weights)


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "a/b/c"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(DemoError, match=f"the folder {name} does not exist"):
        sizing.read_config(name)


@pytest.mark.slow
def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=f"{tmp_path} cannot be read as a model"):
        sizing.read_config(str(tmp_path))


@pytest.mark.slow  # torch and transformers are imported
def test_geometry_and_weights_of_the_tiny_model_are_those_of_its_files(demo_model: Path) -> None:
    from safetensors import safe_open

    config = sizing.read_config(str(demo_model))
    assert sizing.geometry(config) == sizing.geometry(sizing.own_config(demo_model))
    assert sizing.geometry(config) == Geometry(4, 2, 64, 16_384)
    with safe_open(demo_model / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        stored = sum(weights.get_tensor(name).numel() for name in names)
    assert sizing.count_parameters(config) == stored
