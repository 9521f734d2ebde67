"""vToken's Triton kernels with their programs in random order, and NaN around every buffer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.test_cuda_interpreted import run_process


@pytest.fixture(scope="module")
def wrong() -> Any:
    return run_process("-m", "tests.support.shuffled")


@pytest.mark.parametrize(
    "kernel", ["copies", "host_rows", "tables", "probes", "keys", "accumulators"]
)
def test_no_order_of_programs_and_no_shape_changes_a_result_or_writes_beside_it(
    wrong: Any, kernel: str
) -> None:
    assert wrong[kernel] == ""


def test_control_a_race_and_an_overrun_are_noticed(wrong: Any) -> None:
    assert wrong["control_race"] == "order decides"
    assert wrong["control_overrun"] == "a write beside a buffer"
