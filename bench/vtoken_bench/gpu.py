"""`vtoken bench gpu`: the open checks of docs/gpu.md on the CUDA device of this machine.

1. Each check is a step as `make gpu-kit` has them: a process with a time limit. A failed one does
   not stop the others.
2. Checks finished on this device are stored in `.bench/gpu/` and are not run again.
3. If a check fails, the tables have the others, and the exit status is 1.

docs/gpu.md says what is expected of each figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from scripts.gpu_kit.run import SERVING, Step
from scripts.gpu_kit.run import run as run_step
from vtoken_bench.output import FOLDER, Cell, Table, finish, new_result
from vtoken_bench.target import device_name, found_device

CHECKS = ("pages", "copies", "overlap", "probe", "parking", "serving")
NEEDS_VLLM = ("serving",)  # a machine that runs the kit may lack it
LIMIT_MINUTES = 10.0
# What a check's table shows of a row: figures, and dictionaries of figures. The probe's ratios, one
# for each installed kernel, are shown too.
SHOWN = {
    "pages": ("kernel", "batch", "context", "us", "ratio_to_block_size", "share_of_ceiling",
              "equal_bits_scattered", "max_error"),
    "copies": ("tokens", "triton", "torch", "triton_exact", "torch_exact"),
    "overlap": ("variant", "step_us", "host_us", "host_synchronisations_in_4_steps"),
    "probe": ("batch", "context", "probe_us", "max_error"),
    "parking": ("tokens", "host slots", "returned_exact", "park", "restore"),
    "serving": ("variant", "repeat", "seconds", "itl_ms", "ttft_ms", "mean_running", "preemptions",
                "moved_tokens", "gpu_seconds", "hook_seconds"),
}  # fmt: skip


class Finished(msgspec.Struct):
    """The result of one check, its device and its end time."""

    check: str
    device: str
    finished: str
    seconds: float
    result: dict[str, Any]


Outcome = Finished | str  # a str: why there is no result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument(
        "--limit-minutes",
        type=float,
        default=LIMIT_MINUTES,
        help=f"time limit of a check (default: {LIMIT_MINUTES:.0f})",
    )
    parser.add_argument("--again", action="store_true", help="also run finished checks again")
    parser.add_argument(
        "--results",
        type=Path,
        help="report what `make gpu-kit` measured on another machine, in this folder",
    )


def run(args: argparse.Namespace) -> int:
    if args.results is not None:
        return _report(args, *_carried(args.results), time.monotonic())
    if found_device() != "cuda":
        print("vtoken bench gpu: torch finds no CUDA device here", file=sys.stderr)
        return 1
    started = time.monotonic()
    parent = args.json.parent if args.json else FOLDER
    folder = parent / ("gpu-quick" if args.quick else "gpu")
    device = device_name()
    modules = {name: ("vtoken_bench.checks", name) for name in CHECKS} | {"serving": (SERVING,)}
    steps = [Step(name, 60 * args.limit_minutes, "", modules[name]) for name in args.checks]
    outcomes = measure(steps, folder, device, tiny=args.quick, again=args.again)
    return _report(args, device, outcomes, started)


def _carried(folder: Path) -> tuple[str, dict[str, Outcome]]:
    """The device and the outcomes in `folder`."""
    found: dict[str, Outcome] = {}
    for name in CHECKS:
        try:
            found[name] = msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=Finished)
        except (OSError, msgspec.MsgspecError) as error:
            if name not in NEEDS_VLLM or (folder / f"{name}.json").exists():
                found[name] = f"no result in {folder}: {error}"
    devices = {outcome.device for outcome in found.values() if isinstance(outcome, Finished)}
    return ", ".join(sorted(devices)), found


def _report(
    args: argparse.Namespace, device: str, outcomes: dict[str, Outcome], started: float
) -> int:
    result = new_result("gpu", "make bench-gpu", {"GPU": device})
    failed = {name: found for name, found in outcomes.items() if isinstance(found, str)}
    for outcome in outcomes.values():
        if isinstance(outcome, Finished):
            result.tables.append(table_of(outcome))
            result.setup |= {
                name: outcome.result["facts"][name] for name in ("torch", "cuda", "triton")
            }
    if failed:
        rows = [{"check": name, "why": why} for name, why in failed.items()]
        result.tables.append(Table.of("Not measured", rows))
    result.raw = msgspec.to_builtins(outcomes)
    result.seconds = time.monotonic() - started
    finish(result, path=args.json, markdown=args.markdown)
    for name, why in failed.items():
        print(f"vtoken bench gpu: {name}: {why}", file=sys.stderr)
    return int(bool(failed))


def table_of(outcome: Finished) -> Table:
    """The check's rows; times are null where there was no device."""
    notes = [f"failed: {kernel}: {why}" for kernel, why in outcome.result.get("failed", {}).items()]
    rows = [dict(_cells(outcome.check, row)) for row in outcome.result["rows"]]
    return Table.of(f"{outcome.check}, {outcome.device}, {outcome.finished}", rows, *notes)


def _cells(check: str, row: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    for name, value in row.items():
        if name not in SHOWN[check] and not name.startswith("ratio, "):
            continue
        if isinstance(value, dict):
            yield from ((f"{name}, {inner}", figure) for inner, figure in value.items())
        else:
            yield name, str(value) if isinstance(value, bool) else value


def measure(
    steps: Sequence[Step], folder: Path, device: str, *, tiny: bool = False, again: bool = False
) -> dict[str, Outcome]:
    """Run the checks; return the outcome of each. `folder` keeps one file per finished check."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    for step in steps:
        path = folder / f"{step.name}.json"
        stored = None if again else _stored(path, device)
        if stored is not None:
            print(f"{step.name}: finished {stored.finished}, --again repeats it", file=sys.stderr)
            outcomes[step.name] = stored
            continue
        print(f"{step.name}: at most {step.limit_s / 60:.0f} min", file=sys.stderr, flush=True)
        row = run_step(step, device, {"--tiny": []} if tiny else {}, folder, in_kit=False)
        if row["why"]:
            path.unlink(missing_ok=True)  # so that it runs again
        failed = f"{row['why']}, see {folder / step.name}.log"
        outcomes[step.name] = _stored(path, device) or failed
    return outcomes


def _stored(path: Path, device: str) -> Finished | None:
    """The result stored in `path` for `device`; None if it is missing or unreadable."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Finished)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.device == device else None
