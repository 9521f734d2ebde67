"""Exported files: images, tables, documents."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli_harness import VTOKEN
from tests.support.console_harness import messages, running, until
from tests.support.core.live import LiveEngine
from tests.support.recorded import START_TS, record
from tests.support.serving import Served
from tests.support.small_files import limited
from vtoken import wire
from vtoken.cli import main
from vtoken_console.export import files as export


async def exported(app: Any, pilot: Any, key: str) -> str:
    await pilot.press("x")
    await pilot.pause(0.1)
    await pilot.press(key)
    await until(lambda: "xported" in messages(app) or "No PNG" in messages(app), "no message")
    return messages(app)


async def test_images_show_the_page_without_the_dialog(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(served.url) as (app, pilot):
        said = await exported(app, pilot, "s")
        (svg,) = tmp_path.glob("vtoken-*.svg")
        assert said == f"✓ Exported {svg}."
        text = svg.read_text(encoding="utf-8")
        assert "test-llama" in text
        assert "export&#160;what" not in text
        app.clear_notifications()
        await exported(app, pilot, "p")
        (png,) = tmp_path.glob("vtoken-*.png")
        assert png.read_bytes().startswith(b"\x89PNG")


async def test_tables_hold_every_block_and_request(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(served.url) as (app, pilot):
        await pilot.pause(0.3)
        await exported(app, pilot, "c")
        model = app.source.feed.model
    found = {path.stem.rpartition("-")[2]: path for path in tmp_path.glob("*.csv")}
    assert set(found) == {"blocks", "requests", "series"}
    blocks = list(csv.DictReader(io.StringIO(found["blocks"].read_text())))
    assert [int(row["live"]) for row in blocks] == model.live.tolist()
    assert [row["state"] == "free" for row in blocks] == (model.flags == 0).tolist()
    requests = list(csv.DictReader(io.StringIO(found["requests"].read_text())))
    assert {row["id"]: int(row["live"]) for row in requests} == {
        row.id: row.live for row in model.requests.values()
    }
    series = list(csv.DictReader(io.StringIO(found["series"].read_text())))
    assert float(series[-1]["f"]) == pytest.approx(model.status.fragmentation.f, abs=1e-4)


async def test_document_is_the_state_as_wire_documents(
    core: LiveEngine, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(served.url) as (app, pilot):
        await exported(app, pilot, "j")
        (path,) = tmp_path.glob("*.json")
        document = msgspec.json.decode(path.read_bytes(), type=export.Exported)
        assert document.source == served.url
        assert document.status is not None
        assert document.status.model == "demo/test-llama"
        assert len(document.blocks.live) == core.store.num_blocks
        assert isinstance(document.requests[0], wire.RequestRow)


async def test_disk_error_is_shown(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    async with running(served.url) as (app, pilot):
        assert "Not exported: " in await exported(app, pilot, "s")


def test_existing_name_gets_a_number(tmp_path: Path) -> None:
    first = export.write(tmp_path, {"a.svg": b"1"})
    second = export.write(tmp_path, {"a.svg": b"2"})
    assert [p.name for p in first + second] == ["a.svg", "a-2.svg"]
    assert first[0].read_bytes() == b"1"


def test_times_of_the_series_are_those_of_the_samples(tmp_path: Path) -> None:
    from vtoken_console.feed.samples import NAMES
    from vtoken_console.feed.series import Series

    series = Series(NAMES)
    for n in range(10):
        series.add(START_TS + n, tuple(float(n) for _ in NAMES))
    rows = list(csv.reader(io.StringIO(export.tables(_empty(), series)["series"].decode())))
    assert rows[1:] == [
        [f"{START_TS + n:.1f}", *([f"{float(n):.6g}"] * len(NAMES))] for n in range(10)
    ]


def _empty() -> Any:
    from vtoken.wire.reducer import StreamState

    return StreamState()


@pytest.mark.parametrize("kind", ["svg", "json", "csv"])
def test_a_moment_of_a_recording_is_exported_without_a_terminal(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, out = tmp_path / "incident.jsonl.gz", tmp_path / f"moment.{kind}"
    record(recording, 20.0)
    arguments = ["console", "--replay", str(recording), "--at", "12", "--export", str(out)]
    assert main(arguments) == 0
    if kind == "csv":
        assert (tmp_path / "moment-blocks.csv").exists()
        return
    assert capsys.readouterr().out == f"{out}\n"
    if kind == "json":
        assert json.loads(out.read_bytes())["ts"] == START_TS + 12
    assert main(arguments) == 1
    assert "File exists" in capsys.readouterr().err


def test_a_damaged_or_torn_recording_is_exported_as_far_as_it_is_readable(tmp_path: Path) -> None:
    recording, out = tmp_path / "torn.jsonl.gz", tmp_path / "view.svg"
    record(recording, 20.0)
    recording.write_bytes(recording.read_bytes()[:-30] + bytes(20))
    assert main(["console", "--replay", str(recording), "--at", "5", "--export", str(out)]) == 0
    assert "torn.jsonl.gz" in out.read_text()


def test_export_of_a_moment_outside_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "incident.jsonl"
    record(recording, 5.0)
    arguments = ["console", "--replay", str(recording), "--at", "99", "--export"]
    assert main([*arguments, str(tmp_path / "a.svg")]) == 1
    assert "is not a moment of this recording" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "a.gif")]) == 1
    assert "the suffix must be one of .svg, .png, .csv, .json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["view.svg", "view.csv"])
def test_an_export_that_does_not_fit_the_disk_names_its_file_and_leaves_none(
    tmp_path: Path, name: str
) -> None:
    record(tmp_path / "run.jsonl", seconds=20)
    out = tmp_path / "out"
    out.mkdir()
    command = ["console", "--replay", str(tmp_path / "run.jsonl"), "--export", str(out / name)]
    ran = subprocess.run(
        limited(*VTOKEN, *command),
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert re.fullmatch(rf"vtoken: {out}/view\S+ cannot be written: File too large\n", ran.stderr)
    assert list(out.iterdir()) == []
