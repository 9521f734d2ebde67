"""How a worker's report travels: with the output of the step's sampled tokens.

Knows vLLM's two kinds of output. One is complete. The other is fetched by a thread of its own when
the device has sampled; scores that are still on their way from the device are waited for there,
right after the tokens. So neither the step nor the report is a step later for them.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from vtoken.protocol.step import WorkerReport
from vtoken.vllm.worker.scores import PendingScores


class Delivery(AsyncModelRunnerOutput):
    """`output`, whose report `report` is complete once `told` has answered."""

    def __init__(
        self, output: AsyncModelRunnerOutput, report: WorkerReport, told: PendingScores
    ) -> None:
        self._output, self._report, self._told = output, report, told

    def get_output(self) -> Any:
        output = self._output.get_output()
        self._report.scores = self._told()
        return output


def deliver(output: Any, report: WorkerReport, told: PendingScores | None) -> Any:
    """Give `output` of a step `report`, with the scores that `told` answers; what to send."""
    for name in ("_model_runner_output", "model_runner_output"):  # asynchronous: V1, V2
        if hasattr(output, name):
            getattr(output, name).vtoken = report
            return output if told is None else Delivery(output, report, told)
    if told is not None:
        report.scores = told()
    output.vtoken = report
    return output
