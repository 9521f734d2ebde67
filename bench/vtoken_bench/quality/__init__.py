"""Quality of answers under eviction: RULER tasks, continuations, and token equality.

`ruler` makes prompts, `server` runs them, `work` defines the jobs, `measures` the metrics; `tables`
and `curves` show the results; `command` runs all of it.
"""

from vtoken_bench.quality.command import add_arguments, run

__all__ = ["add_arguments", "run"]
