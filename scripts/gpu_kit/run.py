"""Runs checks 1 to 5 of vToken's docs/gpu.md on the GPU of this machine: `python run.py`.

Needs Python 3.11 to 3.13, torch and Triton. Writes one folder, `results/`: a file for each finished
check, and what each one printed. A check that fails, or takes ten minutes, stops no other; then the
exit status is 1. `--tiny` takes a minute and only shows that the checks run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKS = ("pages", "copies", "overlap", "probe")
LIMIT_S = 600.0
DEVICE = "import torch as t; print(t.cuda.get_device_name() if t.cuda.is_available() else 'cpu')"


def environment() -> dict[str, str]:
    """For a check: the kit's modules, and its numpy if there is no other."""
    paths = [str(HERE / "src")]
    if importlib.util.find_spec("numpy") is None:
        paths.append(str(HERE / "lib" / f"{sys.version_info.major}.{sys.version_info.minor}"))
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths + ([given] if given else []))}


def found_device() -> str:
    """The name of the CUDA device; "cpu" without one."""
    done = subprocess.run(
        [sys.executable, "-c", DEVICE],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    return done.stdout.strip()


def run(name: str, device: str, options: list[str], folder: Path) -> str:
    """Run one check; why it failed, or ""."""
    started = time.monotonic()
    command = [sys.executable, "-m", "vtoken_bench.checks", name, *options]
    with (folder / f"{name}.out").open("w+") as out, (folder / f"{name}.log").open("w+") as log:
        try:
            done = subprocess.run(
                command, stdout=out, stderr=log, env=environment(), timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {LIMIT_S:.0f} s"
        out.seek(0)
        log.seek(0)
        printed, said = out.read(), log.read().strip().splitlines()
    if done.returncode:
        return said[-1] if said else f"status {done.returncode}"
    (result,) = json.loads(printed[max(f"\n{printed}".rfind("\n[\n"), 0) :])
    finished = {
        "check": name,
        "device": device,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "seconds": time.monotonic() - started,
        "result": result,
    }
    (folder / f"{name}.json").write_text(json.dumps(finished, indent=1))
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for correctness only")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu in Triton's interpreter")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS)
    arguments = parser.parse_args()
    device = found_device()
    if arguments.device == "cuda" and device == "cpu":
        print("torch sees no CUDA device", file=sys.stderr)
        return 2
    arguments.results.mkdir(parents=True, exist_ok=True)
    options = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    failed = 0
    for name in arguments.checks:
        why = run(name, device, options, arguments.results)
        failed += bool(why)
        print(f"{name}: {why or 'finished'}", flush=True)
    print(f"results: {arguments.results}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
