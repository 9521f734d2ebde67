"""`make setup-next`: which packages a newer vLLM gets beside those of .venv."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from scripts.setup_next import lacking

HERE = version("numpy")


@pytest.mark.parametrize(
    ("new", "old", "installed"),
    [
        ("numpy", [], False),  # .venv has it
        (f"numpy>={HERE}", ["numpy"], False),
        (f"numpy>{HERE}", ["numpy"], True),
        (f"numpy>{HERE}", [f"numpy>{HERE}"], False),  # .venv's CPU build does with what it has
        ("no-such-package>=1", [], True),
        ("no-such-package>=2", ["No_Such.Package>=1"], False),  # for CUDA alone
        ("torch==99", ["torch==98"], False),  # the kernels are compiled for .venv's
    ],
)
def test_what_is_installed_beside_the_packages_of_venv(
    new: str, old: list[str], installed: bool
) -> None:
    found = list(lacking([Requirement(new)], map(Requirement, old)))
    assert found == [Requirement(new)] * installed
