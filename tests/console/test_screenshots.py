"""`make screenshots` on a running server."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.screenshots import take
from scripts.screenshots.__main__ import main
from tests.support.console_harness import make_busy
from tests.support.served_core import serving


@pytest.mark.slow
async def test_screenshots_are_written_for_each_view(tmp_path: Path) -> None:
    async with serving(make_busy(100, 3)) as served:
        written = await take.take(
            served.url, tmp_path, views=["pool", "request"], settle_s=0.2, when=take.is_live
        )
    names = {p.name for p in written if p.suffix == ".svg"}
    assert names == {"console-pool.svg", "console-request.svg"}
    assert "99&#160;blocks" in (tmp_path / "console-pool.svg").read_text(encoding="utf-8")


def test_screenshot_of_no_server_fails_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take, "TIMEOUT_S", 0.5)
    assert main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 1
    assert "no data from http://127.0.0.1:9" in capsys.readouterr().err


def test_an_unknown_view_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as usage:
        main(["--views", "pool,pol"])
    assert usage.value.code == 2
    assert "unknown views pol; known: pool, " in capsys.readouterr().err
