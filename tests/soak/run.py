"""Run the phases of a soak, each engine in a child process with a watchdog, and sum them up.

A child that sends nothing for too long is killed and counts as a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

import vtoken
from tests.soak.phases import Phase, plan_phases
from tests.soak.server import soak_server
from tests.soak.tally import Tally, total
from vtoken_bench.output import commit_of

SILENCE_S = 240.0  # starting an engine is the longest silence
# More threads gain nothing for small tensors, and cost much on shared cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
COLUMNS = (
    ("requests", "requests"),
    ("tokens", "tokens"),
    ("evictions", "evicted"),
    ("relocations", "relocated"),
    ("recycled", "recycled"),
    ("parked", "parked"),
    ("restored", "restored"),
    ("swapped", "swapped"),
    ("preemptions", "preempted"),
    ("aborted", "aborted"),
    ("switches", "switches"),
    ("checks", "checks"),
    ("compared_tokens", "compared"),
    ("violations", "violations"),
    ("statements", "documents"),
    ("contradictions", "contradict"),
    ("failed", "failed"),
)


class Report(msgspec.Struct):
    """One line from a child."""

    tally: Tally | None = None
    done: Tally | None = None


def run(args: argparse.Namespace) -> int:
    from vtoken.demo.model import build

    args.logs.mkdir(parents=True, exist_ok=True)
    model = build(Path(tempfile.gettempdir()) / "vtoken-demo-model")
    seconds = args.minutes * 60
    phases = plan_phases(
        seconds=seconds,
        seed=args.seed,
        model=str(model),
        logs=str(args.logs),
        only=args.only,
        phase_seconds=seconds if args.steps else args.phase_seconds,
    )
    if args.steps:
        phases = [msgspec.structs.replace(phases[0], steps=args.steps)]
    _print_row("phase", [title for _, title in COLUMNS])
    tallies = []
    for phase in phases:
        tallies.append(run_phase(phase))
        _print_tally(phase.name, tallies[-1])
        if not tallies[-1].ok:
            _explain(phase, tallies[-1])
    names = [phase.name for phase in phases]
    if not (args.no_server or args.steps or args.only):
        names.append("server, HTTP clients")
        tallies.append(
            soak_server(
                model=str(model),
                seconds=min(seconds, 2 * args.phase_seconds),
                seed=args.seed,
                log=args.logs / "server.log",
            )
        )
        _print_tally(names[-1], tallies[-1])
        for failure in tallies[-1].failures[:10]:
            print(f"  {failure}")
    sums = total(tallies)
    _print_tally("all", sums)
    path = args.logs / "soak.json"
    path.write_bytes(summary(args, names, tallies))
    print(f"{'ok' if sums.ok else 'FAILED'}; the summary is in {path}", flush=True)
    return 0 if sums.ok else 1


def run_phase(phase: Phase) -> Tally:
    """Run one phase in a child process; its tally has a failure if the child died or hung."""
    read, write = os.pipe()
    errors = Path(phase.log).with_suffix(".err")
    with errors.open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
            pass_fds=(write,),
            text=True,
            env=ENVIRONMENT | os.environ | phase.engine.environment,
            start_new_session=True,
        )
    os.close(write)
    assert child.stdin is not None
    # A dead child breaks the pipe; its log has the reason.
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(msgspec.json.encode(phase).decode() + "\n")
    tally, ended = Tally(), False
    with os.fdopen(read, "rb", buffering=0) as reports:
        buffer = b""
        while not ended:
            ready, _, _ = select.select([reports], [], [], SILENCE_S)
            chunk = reports.read(1 << 16) if ready else b""
            if not chunk:
                _kill(child)
                what = "exited without a result" if ready else f"sent nothing for {SILENCE_S:.0f} s"
                tally.failures.append(f"{phase.name}: the engine {what}, see {errors}")
                tally.failed += 1
                break
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                report = msgspec.json.decode(line, type=Report)
                tally, ended = report.done or report.tally or tally, report.done is not None
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        _kill(child)
    return tally


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and the ranks that it may have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _explain(phase: Phase, tally: Tally) -> None:
    for failure in tally.failures[:10]:
        print(f"  {failure}")
    again = f"python -m tests.soak --seed {phase.seed} --only {shlex.quote(phase.name)} --steps N"
    print(f"  to repeat: {again} (N rounds, see {phase.log})", flush=True)


def _print_tally(name: str, tally: Tally) -> None:
    _print_row(name, [f"{getattr(tally, field):,}" for field, _ in COLUMNS])


def _print_row(name: str, cells: list[str]) -> None:
    print(f"{name:26}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def summary(args: argparse.Namespace, names: list[str], tallies: list[Tally]) -> bytes:
    """What ran, the commit that it ran on, and the counts, as JSON."""
    sums = total(tallies)
    document: dict[str, Any] = {
        "seed": args.seed,
        "minutes": args.minutes,
        "phase_seconds": args.phase_seconds,
        "only": args.only,
        "steps": args.steps,
        "commit": commit_of(Path(vtoken.__file__).parent, Path(__file__).parent),
        "cores": os.cpu_count(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ok": sums.ok,
        "total": sums,
        "phases": [
            {"name": name, "seed": args.seed + number, "tally": tally}
            for number, (name, tally) in enumerate(zip(names, tallies, strict=True))
        ],
    }
    return msgspec.json.format(msgspec.json.encode(document)) + b"\n"
