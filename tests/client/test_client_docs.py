"""The examples of docs/client.md work against a real server on the real core."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.support.core.live import LiveEngine
from tests.support.serving import Served

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.usefixtures("stepping")
async def test_every_example_runs_and_prints(
    served: Served, core: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTOKEN_URL", served.url)
    monkeypatch.delenv("VTOKEN_TOKEN", raising=False)
    assert len(EXAMPLES) == 9
    printed = []
    for number, example in enumerate(EXAMPLES):
        out = io.StringIO()
        code = compile(example, f"{PAGE.name} example {number}", "exec")
        with contextlib.redirect_stdout(out):
            await asyncio.to_thread(exec, code, {"__name__": "example"})
        assert out.getvalue(), example
        printed.append(out.getvalue())
    assert f"Server(url='{served.url}', actor='', engine=None)" in printed[1]
    assert "would evict " in printed[2]
    assert core.runtime.config.theta_f == 0.25  # changed, confirmed, undone
    assert printed[3].startswith("done OperationResult(")
    assert core.runtime.requests.forgotten == {"a": ((8, 24),), "b": ((8, 24),)}
    assert printed[5].startswith("theta_f = 2: expected ")
