"""`make gpu-kit`: its checks of parts run where neither vLLM nor the project is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scripts.gpu_kit.__main__ import write_frame, write_kernels
from scripts.gpu_kit.run import PYTHON
from vtoken_bench import main
from vtoken_bench.checks.__main__ import CHECKS
from vtoken_bench.output import Result

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("own_machine_lock")]

# What a machine with torch, Triton and numpy alone does not have. Python imports it at its start.
BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"vllm", "numba", "msgspec", "scipy", "yaml", "tests"}:
            raise ModuleNotFoundError(f"this machine has no {name}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    write_kernels(folder)
    write_frame(folder, {"pythons": [PYTHON]})
    (folder / "src" / "sitecustomize.py").write_text(BARE)
    return folder


def run_kit(kit: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        cwd=kit,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_the_kits_checks_run_on_the_cpu_and_find_the_kernels_exact(kit: Path) -> None:
    command = ["-m", "vtoken_bench.checks", *CHECKS, "--device", "cpu", "--tiny"]
    done = run_kit(kit, *command, TRITON_INTERPRET="1", PYTHONPATH=str(kit / "src"))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [result["check"] for result in results] == [*CHECKS]
    for row in (row for result in results for row in result["rows"]):
        assert row.get("max_error", 0.0) < 1e-5
        assert all(value for key, value in row.items() if key.endswith("_exact"))
        assert all(value for key, value in row.items() if key.startswith("equal_bits"))


def test_its_one_command_leaves_results_that_the_report_reads(kit: Path, tmp_path: Path) -> None:
    """On the CPU, whose results have no times."""
    command = ["run.py", "--device", "cpu", "--tiny", "--steps", "pages"]
    done = run_kit(kit, *command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout
    path = tmp_path / "gpu.json"
    assert main(["gpu", "--results", str(kit / "results"), "--json", str(path)]) == 1
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert result.setup["GPU"] == "cpu"
    pages, missing = result.tables
    stand_in = dict(zip(pages.columns, pages.rows[0], strict=True))
    assert stand_in["kernel"] == "triton stand-in"
    assert stand_in["equal_bits_scattered"] == "True"
    assert "no result in" in str(dict(missing.rows)["copies"])


def test_without_a_device_the_kit_says_so(kit: Path) -> None:
    done = run_kit(kit, "run.py")
    assert done.returncode == 2
    assert done.stderr == "torch sees no CUDA device\n"
