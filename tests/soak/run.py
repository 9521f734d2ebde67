"""Runs the phases of a soak, each engine in a child process under a watchdog, and sums them up.

Knows what a phase answers, not what it does. A child that says nothing for too long has hung: it is
ended, and that is a failure like any other.
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

from tests.soak.phases import Phase, plan_phases
from tests.soak.server import soak_server
from tests.soak.tally import Tally, total

SILENCE_S = 240.0  # starting an engine is the longest silence
# Small tensors gain nothing from more, and lose much where the cores are shared.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
COLUMNS = (
    ("requests", "requests"),
    ("tokens", "tokens"),
    ("evictions", "evicted"),
    ("relocations", "relocated"),
    ("recycled", "recycled"),
    ("preemptions", "preempted"),
    ("aborted", "aborted"),
    ("switches", "switches"),
    ("checks", "checks"),
    ("judged_tokens", "judged"),
    ("violations", "violations"),
    ("failed", "failed"),
)


class Answer(msgspec.Struct):
    """One line of a child."""

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
    whole = total(tallies)
    _print_tally("all", whole)
    _summarise(args.logs / "soak.json", args.seed, names, tallies, whole)
    return 0 if whole.ok else 1


def run_phase(phase: Phase) -> Tally:
    """One phase in a child process; its tally, with a failure in it when the child died or hung."""
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
            env=ONE_THREAD | os.environ | phase.engine.environment,
            start_new_session=True,
        )
    os.close(write)
    assert child.stdin is not None
    # A child that has died already breaks the pipe; its log says why.
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(msgspec.json.encode(phase).decode() + "\n")
    tally, ended = Tally(), False
    with os.fdopen(read, "rb", buffering=0) as answers:
        buffer = b""
        while not ended:
            ready, _, _ = select.select([answers], [], [], SILENCE_S)
            chunk = answers.read(1 << 16) if ready else b""
            if not chunk:
                _kill(child)
                what = "ended without an answer" if ready else f"was silent for {SILENCE_S:.0f} s"
                tally.failures.append(f"{phase.name}: the engine {what}, see {errors}")
                tally.failed += 1
                break
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                answer = msgspec.json.decode(line, type=Answer)
                tally, ended = answer.done or answer.tally or tally, answer.done is not None
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        _kill(child)
    return tally


def _kill(child: subprocess.Popen[str]) -> None:
    """The child and the ranks that it may have started."""
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


def _summarise(path: Path, seed: int, names: list[str], tallies: list[Tally], whole: Tally) -> None:
    document: dict[str, Any] = {
        "seed": seed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ok": whole.ok,
        "total": whole,
        "phases": [
            {"name": name, "seed": seed + number, "tally": tally}
            for number, (name, tally) in enumerate(zip(names, tallies, strict=True))
        ],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    print(f"{'ok' if whole.ok else 'FAILED'}; the summary is in {path}", flush=True)
