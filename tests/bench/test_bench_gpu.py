"""Benchmarks for a GPU, tested without one: arguments, checks, `make bench`."""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.gpu_kit.run import Step
from vtoken_bench import gpu, main, overhead, serving_check, target
from vtoken_bench.evaluation.answers import FIXED, PRESSURE
from vtoken_bench.evaluation.points import Run
from vtoken_bench.evaluation.variants import NAIVE
from vtoken_bench.gpu import Finished
from vtoken_bench.grounds.settings import numbers_key
from vtoken_bench.output import Result
from vtoken_bench.overhead import GROUPS, RATIOS, Slices
from vtoken_bench.shapes import LLAMA_3_1_8B
from vtoken_bench.target import ModelShape, Target, as_flags, paged_attention

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
DEVICE = "a device"


# ---------------------------------------------------------------- targets


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has a Hopper GPU."""
    monkeypatch.setattr(target, "found_device", lambda: "cuda")
    monkeypatch.setattr(target, "_capability", lambda: 9)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "found_device", lambda: "cpu")
    monkeypatch.setattr(gpu, "found_device", lambda: "cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B.config()))
    return tmp_path


def parsed(*argv: str) -> Target:
    parser = argparse.ArgumentParser()
    target.add_arguments(parser)
    return target.target(parser.parse_args(argv))


@pytest.mark.usefixtures("cuda")
def test_a_gpu_serves_in_bfloat16_with_graphs_on_a_kernel_that_reads_page_size_one() -> None:
    found = parsed()
    assert (found.device, found.dtype, found.graphs) == ("cuda", "bfloat16", True)
    assert found.attention == "FLASH_ATTN"
    assert found.stock_block_size == 16
    assert found.settings() == {"experimental_cuda": True}
    assert parsed("--no-graphs").graphs is False
    assert parsed("--dtype", "float32").attention == "TRITON_ATTN"
    assert parsed("--attention-backend", "FLASHINFER").attention == "FLASHINFER"
    assert parsed("--device", "cpu") == Target()


@pytest.mark.usefixtures("cpu")
def test_without_a_gpu_benchmarks_run_on_cpu_and_refuse_what_needs_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parsed() == Target()
    for bench in ("overhead", "grounds"):
        assert main([bench, "--device", "cuda"]) == 1
        message = capsys.readouterr().err
        assert message == f"vtoken bench {bench}: --device cuda: torch finds no CUDA device here\n"
        assert main([bench, "--graphs"]) == 1
        assert "CUDA graphs need --device cuda" in capsys.readouterr().err
    assert main(["gpu"]) == 1
    assert capsys.readouterr().err == "vtoken bench gpu: torch finds no CUDA device here\n"


@pytest.mark.usefixtures("cpu")
def test_a_folder_without_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bench in ("overhead", "grounds"):
        assert main([bench, "--model", str(tmp_path)]) == 1
        assert f"{tmp_path} is no model folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [
        (8, "bfloat16", "TRITON_ATTN"),  # FlashAttention 2 wants pages of 16
        (9, "bfloat16", "FLASH_ATTN"),
        (9, "float32", "TRITON_ATTN"),
        (10, "bfloat16", "TRITON_ATTN"),
    ],
)
def test_the_kernel_is_one_that_reads_page_size_one_there(
    capability: int, dtype: str, backend: str
) -> None:
    assert paged_attention(capability, dtype) == backend


def test_engines_of_one_gpu_take_what_their_cache_needs(llama: Path) -> None:
    on_gpu = Target(device="cuda", dtype="bfloat16", graphs=True, attention="FLASH_ATTN")
    blocks = on_gpu.num_blocks(llama, 7 * 1600, block_size=16)
    assert blocks == 800
    args = on_gpu.engine_args(llama, block_size=16, max_model_len=2048, num_blocks=blocks)
    assert args["kv_cache_memory_bytes"] == 801 * 16 * 128 * 1024  # 128 KiB a token
    assert args["num_gpu_blocks_override"] == 801
    assert args["attention_backend"] == "FLASH_ATTN"
    assert args["enforce_eager"] is False
    assert args["gpu_memory_utilization"] < 0.1
    alone = on_gpu.engine_args(llama, block_size=16, max_model_len=2048)
    assert alone["gpu_memory_utilization"] > 0.5


def test_a_cache_of_given_size_has_the_blocks_that_fit(llama: Path) -> None:
    given = Target(device="cuda", dtype="bfloat16", cache_bytes=2 * GIB)
    assert given.num_blocks(llama, 10**9, block_size=16) == 2 * GIB // (16 * 128 * 1024) - 1


def test_engine_arguments_are_flags_of_the_server(llama: Path) -> None:
    on_gpu = Target(device="cuda", dtype="bfloat16", graphs=True, dummy_weights=True)
    flags = as_flags(on_gpu.engine_args(llama, block_size=16, max_model_len=2048))
    assert {"--dtype=bfloat16", "--no-enforce-eager", "--load-format=dummy"} <= {*flags}
    assert "--enforce-eager" in as_flags(
        Target().engine_args(llama, block_size=16, max_model_len=9)
    )
    assert not any(str(llama) in flag for flag in flags)


def test_samples_of_other_devices_or_dtypes_have_other_keys() -> None:
    keys = [
        numbers_key(where)
        for where in (
            Target(),
            Target(dtype="bfloat16"),
            Target(device="cuda", dtype="bfloat16"),
            Target(device="cuda", dtype="bfloat16", graphs=True),
        )
    ]
    assert len({str(key) for key in keys}) == len(keys)
    assert keys[0] == {}


@pytest.mark.usefixtures("cpu")
def test_a_dead_engine_fails_its_group_alone(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(
        name: str, folder: Path, where: Target, counts: Any, group: str, *_: Any
    ) -> list[Slices]:
        assert (folder, where) == (llama, Target())
        if group == "eviction":
            raise RuntimeError("the engine of 'h2o' died:\nno kernel")
        figures = dict.fromkeys([*RATIOS, "tokens_per_second", "scheduler_us", "worker_us"], 1.0)
        runs = [Run({"variant": v.name}, n, figures) for v in GROUPS[group] for n in range(9)]
        return [Slices(name, 8, group, runs)]

    monkeypatch.setattr(overhead, "_measure", measured)
    path = tmp_path / "overhead.json"
    options = ["--model", str(llama), "--groups", "indirection", "eviction"]
    assert main(["overhead", *options, "--json", str(path)]) == 1
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert result.tables[0].rows == [[f"{llama.name}, eviction", "no kernel"]]
    assert {row["group"] for row in result.raw} == {"indirection"}


def test_the_shape_is_that_of_llama_3_1_8b(llama: Path) -> None:
    shape = LLAMA_3_1_8B
    attention = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_size
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    total = shape.num_layers * layer + (2 * shape.vocab_size + 1) * shape.hidden_size
    assert total == 8_030_261_248  # as Meta's checkpoint has
    assert ModelShape.of(llama).token_bytes(2) == 128 * 1024


# ---------------------------------------------------------------- checks

FACTS = {"device": DEVICE, "python": "3", "torch": "2", "triton": "3.6", "cuda": "13.0"}


def printed() -> dict[str, dict[str, Any]]:
    """What checks print, in their form."""
    pages = {"kernel": "a", "batch": 1, "us": {"page 1": 2.5}, "equal_bits_scattered": True}
    rows = {"pages": pages, "copies": {"tokens": 4096, "triton": {"us": None}}}
    return {
        name: {
            "check": name,
            "facts": FACTS,
            "rows": [rows.get(name, {"ratio, a kernel": 1.5})],
            "failed": {"a kernel": "RuntimeError: page size 1"} if name == "pages" else {},
        }
        for name in gpu.CHECKS
    }


def test_a_check_shows_its_figures_flat_and_the_kernels_that_refused() -> None:
    pages, copies, probe = (
        gpu.table_of(Finished(name, DEVICE, "today", 1.0, printed()[name]))
        for name in ("pages", "copies", "probe")
    )
    assert pages.columns == ["kernel", "batch", "us, page 1", "equal_bits_scattered"]
    assert pages.rows == [["a", 1, 2.5, "True"]]
    assert pages.notes == ["failed: a kernel: RuntimeError: page size 1"]
    assert copies.rows == [[4096, None]]
    assert probe.columns == ["ratio, a kernel"]


@pytest.mark.vllm
def test_the_short_check_of_serving_measures_every_variant_on_real_engines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vtoken_bench.serving_check", "--tiny"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    rows = {row["variant"]: row for row in result["rows"]}
    assert [*rows] == [*serving_check.VARIANTS]
    assert {row["tokens"] for row in rows.values()} == {6 * 40}
    evicted = {name: row.get("evicted_tokens", 0) > 0 for name, row in rows.items()}
    assert [*evicted.values()] == [False, False, True, True, True, True]
    assert rows[FIXED]["moved_tokens"]
    assert not rows[NAIVE]["moved_tokens"]
    for name, row in rows.items():
        assert row["gpu_seconds"] is None  # there is no GPU, and no graph
        assert row["graphs"]["decode"]["NONE"] + row["graphs"]["mixed"]["NONE"] == row["steps"]
        assert [len(times) for times in row["requests"]] == [4] * 6
        both = [row["hook_seconds"][side] > 0 for side in ("scheduler", "worker")]
        assert both == [name != serving_check.NATIVE] * 2
    table = gpu.table_of(Finished("serving", DEVICE, "today", 1.0, result))
    assert [row[0] for row in table.rows] == [*serving_check.VARIANTS]


@pytest.mark.vllm
def test_some_variants_run_in_an_executor_of_their_own_and_leave_traces(tmp_path: Path) -> None:
    options = ["--variants", PRESSURE, "--executor", "mp", "--profile", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "vtoken_bench.serving_check", "--tiny", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    (row,) = result["rows"]
    assert json.dumps(row) in done.stderr.splitlines()  # also when it is stopped later
    assert [*row["hook_seconds"]] == ["scheduler"]  # the worker is in another process
    assert row["evicted_tokens"]
    (trace,) = tmp_path.glob("vToken--pressure*.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {e["name"] for e in events if str(e.get("name", "")).startswith("execute_")}
    assert steps


def test_a_finished_check_runs_again_only_on_request_or_on_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules in place of the checks print a result in its form."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, result in printed().items():
        text = f"a library says hello\n{json.dumps([result], indent=2)}\n"
        (tmp_path / f"{name}.py").write_text(f"print({text!r})")
    steps = [Step(name, 60.0, "", (name,), takes=()) for name in gpu.CHECKS]
    ran: list[str] = []
    inner = gpu.run_step

    def run_step(step: Step, *given: Any, **how: bool) -> dict[str, Any]:
        ran.append(step.name)
        return inner(step, *given, **how)

    monkeypatch.setattr(gpu, "run_step", run_step)

    def measure(*, device: str = DEVICE, **how: bool) -> dict[str, gpu.Outcome]:
        ran.clear()
        return gpu.measure(steps, tmp_path / "gpu", device, **how)

    found = measure()
    assert ran == [*gpu.CHECKS]
    assert {n: f.result for n, f in found.items() if isinstance(f, Finished)} == printed()
    assert measure() == found
    assert ran == []
    (tmp_path / "gpu" / "overlap.json").write_text("{ cut off")
    measure()
    assert ran == ["overlap"]
    (tmp_path / "probe.py").write_text("raise SystemExit('out of memory')")
    again = measure(again=True)
    assert ran == [*gpu.CHECKS]
    assert again["probe"] == f"status 1: out of memory, see {tmp_path}/gpu/probe.log"
    measure()
    assert ran == ["probe"]
    measure(device="another device")
    assert ran == [*gpu.CHECKS]


def test_the_bench_writes_a_result_and_fails_with_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "found_device", lambda: "cuda")
    monkeypatch.setattr(gpu, "device_name", lambda: DEVICE)
    outcomes: dict[str, gpu.Outcome] = {
        name: Finished(name, DEVICE, "today", 1.0, result) for name, result in printed().items()
    }
    monkeypatch.setattr(gpu, "measure", lambda *_, **__: outcomes)
    path = tmp_path / "gpu.json"
    assert main(["gpu", "--json", str(path)]) == 0
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert (result.setup["GPU"], result.setup["triton"]) == (DEVICE, "3.6")
    assert len(result.tables) == len(gpu.CHECKS)
    assert result.raw["overlap"]["result"] == printed()["overlap"]
    outcomes["pages"] = "status 1: out of memory"
    assert main(["gpu", "--json", str(path)]) == 1
    assert "pages: status 1: out of memory" in capsys.readouterr().err
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert result.tables[-1].rows == [["pages", "status 1: out of memory"]]


def test_make_bench_runs_gpu_parts_first_and_continues_after_a_failure(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    calls = tmp_path / "calls"
    for name in ("pytest", "vtoken"):
        stub = stubs / name
        stub.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{calls}\n'
            'case "$*" in tests/gpu*|*overhead*) exit 1;; esac\n'
        )
        stub.chmod(0o755)

    def made(accel: str, **values: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls.unlink(missing_ok=True)
        outer = {"JOBS": "", "ARGS": ""}  # what this suite was called with
        settings = {**outer, "ACCEL": accel, "SETUP": "", "BIN": str(stubs), **values}
        done = subprocess.run(
            ["make", "bench", *(f"{name}={value}" for name, value in settings.items())],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, [" ".join(line.split()) for line in calls.read_text().splitlines()]

    done, ran = made("cuda", ARGS="--quick")
    assert done.returncode != 0
    assert "failed: test-gpu bench-overhead" in done.stderr
    assert ran == [
        "pytest tests/gpu -n 4 --dist loadgroup --junitxml=.bench/gpu/tests.xml",
        "vtoken bench gpu --quick",
        "vtoken bench evaluation --model llama-8b --dummy-weights --quick",
        "vtoken bench overhead --quick",
    ]
    _, ran = made("cuda", EVAL_MODEL="/a/model")
    assert "vtoken bench evaluation --model /a/model" in ran
    _, ran = made("cpu")
    assert ran[:2] == ["vtoken bench evaluation", "vtoken bench overhead"]
    assert ran[-1] == "vtoken bench results"
    assert not any("gpu" in line for line in ran)
