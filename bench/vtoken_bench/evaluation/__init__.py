"""The evaluation: the paper's section 5 on this machine, `vtoken bench evaluation`."""

from vtoken_bench.evaluation.command import add_arguments, run

__all__ = ["add_arguments", "run"]
