"""`vtoken bench evaluation`: vToken beside native vLLM and naive-evict, in parts.

`points` says what is measured, as data; `running` measures it, in turns and resumable; `effects`
has ratios with their intervals, `columns` what tables show of runs; `answers`, `bursts` and
`prose` are loads. A part is a file of its own: its points, and the tables and claims of their runs.
"""

from vtoken_bench.evaluation.command import add_arguments, run

__all__ = ["add_arguments", "run"]
