"""`make setup-next`: the environment of a vLLM without a CPU build."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from scripts import setup_next
from scripts.setup_next import lacking, main, make

HERE = version("numpy")
SHOW = """
import importlib.metadata, numpy, pathlib, vllm
print(vllm.__version__, importlib.metadata.version("vllm"), numpy.__version__)
print(pathlib.Path(vllm.__file__).with_name("_C.abi3.so").resolve())
"""


@pytest.mark.parametrize(
    ("new", "old", "installed"),
    [
        ("numpy", [], False),  # .venv has it
        (f"numpy>={HERE}", ["numpy"], False),
        (f"numpy>{HERE}", ["numpy"], True),
        (f"numpy>{HERE}", [f"numpy>{HERE}"], False),  # .venv's CPU build does with what it has
        ("no-such-package>=1", [], True),
        ("no-such-package>=2", ["No_Such.Package>=1"], False),  # for CUDA alone
        ("torch==99", ["torch==98"], False),  # the kernels are compiled for .venv's
    ],
)
def test_what_is_installed_beside_the_packages_of_venv(
    new: str, old: list[str], installed: bool
) -> None:
    found = list(lacking([Requirement(new)], map(Requirement, old)))
    assert found == [Requirement(new)] * installed


@pytest.mark.vllm
def test_the_environment_has_the_wheels_python_and_the_kernels_and_packages_of_venv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wheel = tmp_path / "next", tmp_path / "vllm-99.0-cp38-abi3-linux.whl"
    monkeypatch.setattr(setup_next, "NEXT", folder)
    with ZipFile(wheel, "w") as packed:
        packed.writestr("vllm/__init__.py", "__version__ = '99.0'")
        packed.writestr("vllm/_C.abi3.so", "of CUDA")
        packed.writestr("vllm-99.0.dist-info/METADATA", "Name: vllm\nVersion: 99.0\n")
    make("99.0", wheel, [])
    shown = subprocess.run(
        [folder / "bin" / "python", "-c", SHOW], check=True, capture_output=True, text=True
    ).stdout
    versions, kernels = shown.splitlines()
    assert versions == f"99.0 99.0+cpu {HERE}"  # vLLM knows its CPU build by the suffix
    assert not Path(kernels).is_relative_to(folder)
    assert Path(kernels).read_bytes() != b"of CUDA"


@pytest.mark.parametrize(
    ("own", "words"),
    [("99.0", "vLLM 99.0 is in .venv as a CPU build"), (None, "make setup ACCEL=cpu")],
)
def test_what_cannot_be_made_is_said(
    own: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def installed(name: str) -> str:
        if own is None:
            raise PackageNotFoundError(name)
        return own

    monkeypatch.setattr(setup_next, "version", installed)
    monkeypatch.setattr(setup_next, "described", lambda _: ("99.0", []))
    assert main([]) == 2
    assert words in capsys.readouterr().err
