"""Attaches a worker's report to the output of the step's sampled tokens.

vLLM has two kinds of output. One is complete. The other is asynchronous: a separate thread fetches
it when the device has sampled, and waits there for scores still in transfer, right after the
tokens. So scores delay neither the step nor the report by a step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from vtoken.core.protocol.step import WorkerReport
from vtoken.vllm.worker.scores import PendingScores


class OutputWithScores(AsyncModelRunnerOutput):
    """An asynchronous output that adds the pending scores to `report` when it is fetched."""

    def __init__(
        self, output: AsyncModelRunnerOutput, report: WorkerReport, scores: PendingScores
    ) -> None:
        self._output, self._report, self._scores = output, report, scores

    def get_output(self) -> Any:
        output = self._output.get_output()
        self._report.scores = self._scores()
        return output

    def get_kv_connector_output(self) -> Any:
        """Pass on vLLM's question, which it asks since 0.33; this has nothing to add."""
        return self._output.get_kv_connector_output()


def attach_report(output: Any, report: WorkerReport, scores: PendingScores | None) -> Any:
    """Attach `report` with `scores` to the `output` of a step; return the output to send."""
    for name in ("_model_runner_output", "model_runner_output"):  # asynchronous: V1, V2
        if hasattr(output, name):
            getattr(output, name).vtoken = report
            return output if scores is None else OutputWithScores(output, report, scores)
    if scores is not None:
        report.scores = scores()
    output.vtoken = report
    return output
