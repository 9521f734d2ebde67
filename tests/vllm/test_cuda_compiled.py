"""vToken's Triton kernels compile for GPUs that are not present, within their budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.compiled import ARCHITECTURES, CASES, Case, compiled

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Triton's cache of this module alone, so that every kernel is compiled once and here."""
    folder = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace("`", ""))
def test_a_kernel_keeps_its_budget_and_spills_nothing(case: Case, architecture: int) -> None:
    assert compiled(case, architecture).excess(case) == []


# Numbers of a call that are the same in all steps, by the engine and its configuration.
STEADY = {"row_words", "query_row", "key_slot", "key_head", "table_row", "pages_row", "anchor_row"}
STEADY |= {"num_chosen"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace("`", ""))
def test_no_number_that_differs_between_steps_compiles_a_kernel_anew(case: Case) -> None:
    """Triton compiles for 1, for multiples of 16 and for others, unless it is told not to."""
    numbers = {name for name, kind in case.types.items() if kind == "i32"}
    fixed = {p.name for p in case.kernel.params if p.do_not_specialize}
    assert fixed == numbers - STEADY


def test_control_a_kernel_with_too_few_registers_spills_and_is_noticed() -> None:
    case = next(case for case in CASES if "logits" in case.name)
    found = compiled(case, 90, maxnreg=32).excess(case)
    assert any("spills" in what for what in found)
    assert any("local memory" in what for what in found)


def test_control_copies_of_rows_without_alignment_are_noticed() -> None:
    """What is left are the loads of slot numbers."""
    case = CASES[0]
    unaligned = replace(case, constants=case.constants | {"ALIGNMENT": 4})
    assert compiled(unaligned, 90).excess(case) == ["loads of 64 bits"]
