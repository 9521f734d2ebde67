"""Facts found under eviction, on grounds that share no text: `vtoken bench grounds`.

`texts` and `facts` are what prompts are made of, `prompts` makes them, `engines` answers them;
`paired` has the statistics, `command` runs the samples and makes the tables. `search` tunes
policies on the tuning ground.
"""

from vtoken_bench.grounds.command import add_arguments, run

__all__ = ["add_arguments", "run"]
