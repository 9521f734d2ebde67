"""Eviction policies, one file each; importing this package registers the built-in ones."""

from vtoken.policies import h2o, none, random, sliding_window, streaming_llm
from vtoken.policies.base import (
    Params,
    Policy,
    View,
    describe_policies,
    make_policy,
    params_dict,
    policy_names,
    register,
)

__all__ = [
    "Params",
    "Policy",
    "View",
    "describe_policies",
    "h2o",
    "make_policy",
    "none",
    "params_dict",
    "policy_names",
    "random",
    "register",
    "sliding_window",
    "streaming_llm",
]
