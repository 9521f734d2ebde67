"""Facts found under eviction, on grounds that share no text: `vtoken bench grounds`.

`texts`, `facts` and `tools` are what prompts are made of, `prompts` makes them, `settings` are
policies with what they keep, `engines` answers; `paired` has the statistics, `command` runs the
samples, and `tables` shows them.
"""

from vtoken_bench.grounds.command import add_arguments, run

__all__ = ["add_arguments", "run"]
