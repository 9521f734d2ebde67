"""Does the server still answer well? RULER's tasks, continuations, and the same tokens.

`ruler` makes prompts, `server` runs them, `work` says what is measured of them, `measures` how;
`log` keeps finished samples, `tables` and `curves` show them, `command` puts all together.
"""

from vtoken.bench.quality.command import add_arguments, run

__all__ = ["add_arguments", "run"]
