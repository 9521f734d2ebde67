"""A status has the peaks of the last day, each with its time."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.core.live import make_pressed
from tests.support.serving import serve
from vtoken import wire
from vtoken_api.state.peaks import HOUR_S, NUM_HOURS, Peaks


@pytest.fixture
def status() -> wire.Status:
    with make_pressed() as live:
        live.steps(20)
        found: wire.Status = live.call("status")
        return found


def test_a_peak_is_the_first_highest_value_of_a_day_and_another_hours_after_it(
    status: wire.Status,
) -> None:
    peaks, start = Peaks(), 1000 * HOUR_S

    def waiting(num: int, at: float) -> tuple[float, float] | None:
        status.requests.waiting, status.ts = num, start + at
        found = {peak.name: peak for peak in peaks.after(status)}
        peak = found.get("waiting")
        return None if peak is None else (peak.value, peak.ts - start)

    assert waiting(0, 0) is None
    assert waiting(3, 60) == (3, 60)
    assert waiting(7, 120) == (7, 120)
    assert waiting(7, 180) == (7, 120)
    assert waiting(2, 200) == (7, 120)
    assert waiting(5, 2 * HOUR_S) == (7, 120)
    assert waiting(1, NUM_HOURS * HOUR_S - 1) == (7, 120)
    assert waiting(1, NUM_HOURS * HOUR_S) == (5, 2 * HOUR_S)
    assert waiting(1, 100 * HOUR_S) == (1, 100 * HOUR_S)


def test_peaks_are_of_the_facts_of_a_status(status: wire.Status) -> None:
    assert status.pressure is not None
    assert status.latency is not None
    status.pressure.short_blocks, status.requests.waiting = 9, 4
    found = {peak.name: peak.value for peak in Peaks().after(status)}
    assert found == {
        "waiting": 4,
        "short_blocks": 9,
        "used_share": pytest.approx(status.blocks.used / status.blocks.total),
        "ttft_p95_ms": status.latency.ttft.p95_ms,
        "inter_token_p95_ms": status.latency.inter_token.p95_ms,
    }
    status.pressure = status.latency = None
    assert {peak.name for peak in Peaks().after(status)} == {"waiting", "used_share"}


async def test_every_status_of_the_server_has_them() -> None:
    with make_pressed() as live:
        live.steps(20)
        async with serve(live.handle) as served:
            answer = await served.http.get("/vtoken/v1/status")
            found = msgspec.json.decode(answer.content, type=wire.Status)
    alone = {peak.name: peak.value for peak in Peaks().after(found)}
    assert {peak.name: peak.value for peak in found.peaks} == alone
