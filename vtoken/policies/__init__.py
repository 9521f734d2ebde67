"""Eviction policies, one file each; importing this package registers the built-in ones."""

from vtoken.policies import (  # noqa: F401  (registers them)
    fastgen,
    h2o,
    keydiff,
    knorm,
    none,
    peak_attention,
    r_kv,
    random,
    scissorhands,
    sliding_window,
    snapkv,
    streaming_llm,
    tova,
)
from vtoken.policies.base import Params, Policy, register
from vtoken.policies.registry import (
    describe_broken,
    describe_policies,
    make_policy,
    policy_names,
)
from vtoken.policies.selection import lowest, oldest
from vtoken.policies.signals import Signal
from vtoken.policies.view import Batch, TokenIds, View

__all__ = [
    "Batch",
    "Params",
    "Policy",
    "Signal",
    "TokenIds",
    "View",
    "describe_broken",
    "describe_policies",
    "lowest",
    "make_policy",
    "oldest",
    "policy_names",
    "register",
]
