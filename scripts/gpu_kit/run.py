"""Runs the steps of this kit on the GPU of this machine, one after another: `python run.py`.

Needs torch, Triton and the Python that the kit is for. Each step has its own time limit; one that
is late is ended with all its processes, and no step stops another. Everything is in one folder,
`results/`, rewritten after every step, so it is complete whenever this command or the machine
stops: report.json (each step's end), a file for each finished check, and what each step printed
(NAME.out, NAME.log). The exit status is 1 if a step did not pass. `--tiny` only shows that the
checks run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CACHE = HERE / "cache"
# Warnings of another torch than the tests' own say nothing about the GPU.
TESTS = (
    "pytest",
    "-v",
    "-c",
    "src/pyproject.toml",
    "-W",
    "default",
    "-o",
    f"cache_dir={CACHE}/pytest",
)
ENGINE = "src/tests/gpu/test_gpu_engine.py"
VARIANTS = ("vToken, pressure", "vToken, fixed budget")
PROFILED = ("vToken, pressure", "vToken, fixed budget, h2o")
GRACE_S = 5.0  # from SIGINT, at which pytest writes its file, to SIGKILL
DEVICE = "import torch as t; print(t.cuda.get_device_name() if t.cuda.is_available() else 'cpu')"


@dataclass(frozen=True, slots=True)
class Step:
    """`module`: with arguments, for `python -m`; `{results}` in one is the folder of results.

    `prints`: a JSON array with one result. `takes`: which of the command's own options it knows.
    """

    name: str
    limit_s: float
    shows: str
    module: tuple[str, ...]
    prints: bool = True
    takes: tuple[str, ...] = ("--tiny",)


def _kernels(limit_s: float) -> list[Step]:
    what = {
        "pages": "checks 1 and 2: attention at page size 1, a graph's replay against no graph",
        "copies": "check 3: relocation over 32 layers",
        "overlap": "check 4: copies beside the forward",
        "probe": "check 5: the score probe",
        "parking": "check 7: tokens to the host and back",
    }
    takes = ("--tiny", "--device")
    return [Step(n, limit_s, w, ("vtoken_bench.checks", n), takes=takes) for n, w in what.items()]


SERVING = "vtoken_bench.serving_check"
WITHOUT_VLLM = _kernels(600)
WITH_VLLM = [
    Step(
        "environment",
        240,  # it compiles the bytecode of what it imports
        "imports, versions, the kit's files",
        ("scripts.gpu_kit.environment",),
        takes=("--device",),
    ),
    *_kernels(120),
    Step("serving", 360, "check 6: native and vToken, two loads each", (SERVING, "--repeats", "2")),
    Step(
        "engine",
        360,
        "tokens with graphs, without, and of stock vLLM, whatever reclamation does",
        (*TESTS, "-n", "2", "--dist", "loadgroup", "--junitxml", "{results}/engine.xml", ENGINE),
        prints=False,
        takes=(),
    ),
    Step(
        "executor",
        240,
        "check 6 with the scheduler and the worker in two processes",
        (SERVING, "--repeats", "2", "--executor", "mp", "--variants", *VARIANTS),
    ),
    Step(
        "profile",
        240,
        "30 steps in torch's profiler; traces in results/profile",
        (SERVING, "--profile", "{results}/profile", "--variants", *PROFILED),
    ),
    Step(
        "tests",
        150,
        "tests/gpu without the engine",
        (*TESTS, "--junitxml", "{results}/tests.xml", "src/tests/gpu", "--ignore", ENGINE),
        prints=False,
        takes=(),
    ),
]


def environment() -> dict[str, str]:
    """For a step: the kit's modules and packages, and caches in the kit's folder.

    Without vLLM the machine's numpy is used if there is one.
    """
    paths = [HERE / "src"]
    library = HERE / "lib" / PYTHON
    if (library / "vllm").exists():
        paths = [library, HERE / "src", HERE / "src" / "api", HERE / "src" / "bench"]
    elif importlib.util.find_spec("numpy") is None:
        paths.append(library)
    given = os.environ.get("PYTHONPATH")
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
        "NUMBA_CACHE_DIR": str(CACHE / "numba"),
        "XDG_STATE_HOME": str(CACHE / "state"),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([given] if given else [])]),
    }


def found_device() -> str:
    """The name of the CUDA device; "cpu" without one."""
    command = [sys.executable, "-c", DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    return done.stdout.strip()


def run(
    step: Step,
    device: str,
    options: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    in_kit: bool = True,
) -> dict[str, Any]:
    """Run one step; its row of report.json. A finished check's result is NAME.json in `folder`.

    Without `in_kit` it runs in this process's folder and environment, as a checkout has them.
    """
    started = time.monotonic()
    module = [argument.format(results=folder) for argument in step.module]
    taken = [word for name in step.takes if name in options for word in (name, *options[name])]
    command = [sys.executable, "-m", *module, *taken]
    out, log = folder / f"{step.name}.out", folder / f"{step.name}.log"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=HERE if in_kit else None,
            env=environment() if in_kit else None,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
    row = {"shows": step.shows, "limit_s": step.limit_s, "seconds": time.monotonic() - started}
    if status is None:
        return row | {"status": "late", "why": f"ended after its limit of {step.limit_s:.0f} s"}
    why = "" if status == 0 else f"status {status}: {last_line(log) or last_line(out)}"
    if step.prints:
        try:
            printed = f"\n{out.read_text(errors='replace')}"
            (result,) = json.loads(printed[printed.rindex("\n[\n") :])
        except ValueError:
            why = why or "it printed no result"
        else:
            finished = {
                "check": result["check"],
                "device": device,
                "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
                "seconds": row["seconds"],
                "result": result,
            }
            write(folder / f"{step.name}.json", finished)
    return row | {"status": "failed" if why else "passed", "why": why}


def end(process: subprocess.Popen[bytes]) -> None:
    """End the step's processes, however many they are."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def write(path: Path, value: Any) -> None:
    """Write JSON so that the file is whole whenever the machine stops."""
    made = path.with_name(f".{path.name}")
    made.write_text(json.dumps(value, indent=1))
    made.replace(path)


def run_all(
    steps: Sequence[Step],
    device: str,
    options: Mapping[str, Sequence[str]],
    folder: Path,
    facts: dict[str, Any],
) -> int:
    """Run `steps`; how many did not pass. report.json is complete after each."""
    report = facts | {"device": device, "steps": {step.name: {"status": "to do"} for step in steps}}
    write(folder / "report.json", report)
    for step in steps:
        report["steps"][step.name] = row = run(step, device, options, folder)
        write(folder / "report.json", report)
        said = f"{row['status']} after {row['seconds']:.0f} s"
        print(f"{step.name}: {said}{': ' if row['why'] else ''}{row['why']}", flush=True)
    return sum(row["status"] != "passed" for row in report["steps"].values())


def chosen(steps: Sequence[Step], names: Sequence[str] | None, limits: Sequence[str]) -> list[Step]:
    """The steps of these names, in this order, with other limits. Raises ValueError."""
    known = {step.name: step for step in steps}
    given = dict(pair.partition("=")[::2] for pair in limits)
    unknown = [name for name in [*(names or ()), *given] if name not in known]
    if unknown:
        raise ValueError(f"no step {', '.join(unknown)}; the kit has {', '.join(known)}")
    wanted = [known[name] for name in names or known]
    return [replace(s, limit_s=float(given.get(s.name, s.limit_s))) for s in wanted]


def main() -> int:
    facts = json.loads((HERE / "manifest.json").read_text())
    steps = WITH_VLLM if "vllm" in facts else WITHOUT_VLLM
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    table = "\n".join(f"  {s.name:<12} {s.limit_s:>4.0f} s  {s.shows}" for s in steps)
    parser.epilog = f"steps, with their limits:\n{table}"
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for correctness only")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu in Triton's interpreter")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="these, in this order")
    parser.add_argument("--limits", nargs="+", default=[], metavar="NAME=SECONDS")
    arguments = parser.parse_args()
    if PYTHON not in facts["pythons"]:
        pythons = ", ".join(facts["pythons"])
        print(f"this is Python {PYTHON}, and the kit is for {pythons}", file=sys.stderr)
        return 2
    try:
        wanted = chosen(steps, arguments.steps, arguments.limits)
    except ValueError as error:
        parser.error(str(error))
    device = found_device()
    if arguments.device == "cuda" and device == "cpu":
        print("torch sees no CUDA device", file=sys.stderr)
        return 2
    folder = arguments.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = {"--device": [arguments.device], **({"--tiny": []} if arguments.tiny else {})}
    failed = run_all(wanted, device, options, folder, {"kit": facts | {"parts": None}})
    print(f"results: {folder}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
