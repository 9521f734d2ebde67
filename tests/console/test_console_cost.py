"""The console's own cost, as it shows it."""

from __future__ import annotations

from vtoken_console.frame.cost import Cost


def test_rates_are_over_the_time_between_two_samples() -> None:
    cost = Cost()
    cost.sample(10.0)
    cost.written_bytes, cost.received_bytes, cost.drawn, cost.dropped = 500, 3000, 20, 2
    assert cost.sample(10.4).written_per_s == 0  # too soon for a new one
    sample = cost.sample(12.0)
    assert (sample.written_per_s, sample.received_per_s, sample.drawn_per_s) == (250, 1500, 10)
    assert sample.dropped == 2
    later = cost.sample(30.0)
    assert later.dropped == 2  # long ago: nobody need act
    assert sample.rss_bytes > 1_000_000
