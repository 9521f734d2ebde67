"""`vtoken bench quality` from end to end, on a real server with the demo model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vtoken_bench import main
from vtoken_bench.output import Result
from vtoken_bench.quality.tables import FULL_CACHE

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("own_machine_lock")]

POLICIES = ["streaming_llm", "tova"]
SAMPLES = 2


def test_the_bench_measures_compares_and_goes_on_where_it_stopped(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "quality.json"
    sizes = ["--lengths", "512", "--keep", "0.5", "--samples", str(SAMPLES), "--new-tokens", "24"]
    arguments = ["quality", "--model", str(demo_model), "--policies", *POLICIES, *sizes]
    arguments += ["--json", str(path)]

    def result(*tasks: str) -> Result:
        assert main([*arguments, "--tasks", *tasks]) == 0
        return msgspec.json.decode(path.read_bytes(), type=Result)

    found = result("niah_single_2", "prose", "chat", "exact")
    assert "samples, done" in capsys.readouterr().err
    dropped = next(t for t in found.tables if t.title.startswith("Not compared"))
    assert dropped.rows == [["niah_single_2, 512", "0 [0 .. 0]"]]  # weights are random
    rows = {(row["what"], row["policy"]): row["figures"] for row in found.raw["rows"]}
    assert set(rows) == {
        (kind, policy) for kind in ("prose", "chat") for policy in (*POLICIES, FULL_CACHE)
    }
    for kind in ("prose", "chat"):
        for policy in POLICIES:
            figures = rows[kind, policy]
            assert figures["kl"]["value"] > 0
            assert figures["kl"]["samples"] == SAMPLES
            assert 0 <= figures["first"]["value"] <= 1
            assert figures["longer"]["value"] == 1  # no end of text that random weights choose
    assert set(found.raw["exact"]) == set(POLICIES)
    for runs in found.raw["exact"].values():
        assert len(runs) == 4
        assert all(ids == runs["naive-evict"] for ids in runs.values())

    server_log = tmp_path / "quality" / "server.log"
    server_log.unlink()
    again = result("niah_single_2", "prose", "chat", "exact")
    assert not server_log.exists()  # every sample was in the log: no server was needed
    assert again.tables == found.tables
    assert result("prose").raw["rows"] == [r for r in found.raw["rows"] if r["what"] == "prose"]
