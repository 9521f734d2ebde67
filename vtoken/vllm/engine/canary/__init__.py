"""The quality canary: a share of finished requests is read once more, without eviction.

`samples` decides which requests, and collects what they were sampled with; `checks` runs a check as
one more request of the engine. What a check means: `vtoken.runtime.canary`.
"""
