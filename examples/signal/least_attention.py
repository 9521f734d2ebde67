"""Evict the tokens to which some recent query paid the least attention: a signal and its policy."""

from vtoken.policies import Policy, Signal, TokenIds, View, lowest
from vtoken.policies.signals import Array, AttentionKind, namespace


class AttentionLeast(AttentionKind):
    name = "attention_least"
    summary = "minimum attention over the newest W probed queries"
    queries = "window"
    linear = False

    def over_queries(self, given: Array) -> Array:
        return namespace(given).amin(given, axis=-2)


class LeastAttention(Policy):
    name = "least_attention"
    summary = "evict the tokens with the least attention of a recent query"

    def signal(self) -> Signal:
        return Signal("attention_least", 4)

    def select_victims(self, view: View) -> TokenIds:
        return lowest(view, view.scores, sinks=0, recent=4)

    def min_budget_tokens(self) -> int:
        return 5
