"""The quality canary: a share of finished requests is read once more, without eviction.

`samples` selects the requests and collects the log-probabilities of their tokens; `checks` runs a
check as one more request of the engine. `vtoken.core.runtime.canary` evaluates the result.
"""
