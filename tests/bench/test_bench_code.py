"""Which code a log's key names, and that one benchmark runs on a machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vtoken_bench import main
from vtoken_bench.code import BENCHES, PRODUCT, sources
from vtoken_bench.log import Log
from vtoken_bench.machine_lock import MachineBusyError, machine_held


def test_what_decides_a_figure_is_in_the_version_and_what_reports_it_is_not() -> None:
    found = set(sources())
    assert PRODUCT / "core/runtime/admission.py" in found
    for name in ("vllm/load.py", "evaluation/prose.py"):
        assert BENCHES / name in found
    for name in ("output.py", "charts.py", "evaluation/causes.py", "grounds/tables.py"):
        assert (BENCHES / name).exists()
        assert BENCHES / name not in found


def test_an_entry_says_when_and_of_which_commit_it_is(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", "one")
    log.add({"a": 1}, 2.0, 0.5)
    entry = Log(log.path, "one").entry({"a": 1})
    assert entry is not None
    assert entry.at.endswith(" UTC")
    assert entry.key == {"a": 1, "code": "one"}
    assert Log(log.path, "two").entry({"a": 1}) is None


HOLD = """
import sys
from pathlib import Path
from vtoken_bench import machine_lock
machine_lock.lock_path = lambda: Path(sys.argv[1])
with machine_lock.machine_held("overhead", measures=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_benchmark_on_a_machine_is_refused_until_the_first_ends(
    own_machine_lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", HOLD, str(own_machine_lock)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert main(["telemetry"]) == 1
        refused = capsys.readouterr().err
        assert f"`vtoken bench overhead`, process {other.pid}, runs on this machine" in refused
        with machine_held("telemetry", measures=False):
            pass
        with pytest.raises(MachineBusyError), machine_held("telemetry", measures=True):
            pass
        other.communicate("")
    with machine_held("telemetry", measures=True):
        assert "`vtoken bench telemetry`" in own_machine_lock.read_text()
