"""`python -m tests.faults`: inject every fault, write the table into docs/trust.md.

Two tables, generated between their markers; exit code 1 when a fault is not noticed by what must
notice it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.faults.catalogue import Fault, Noticed

DOCUMENT = Path(__file__).parents[2] / "docs" / "trust.md"
HEAD = "| fault | rule | what noticed it | after |\n|---|---|---|---|\n"
Row = tuple[Fault, Noticed | None]


def core_rows() -> Iterator[Row]:
    from tests.faults.core import run_core_fault
    from tests.faults.core_blocks import BLOCKS
    from tests.faults.core_tokens import TOKENS

    for fault in [*TOKENS.faults, *BLOCKS.faults]:
        yield fault, run_core_fault(fault)


def engine_rows() -> Iterator[Row]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    from tests.faults.engine import ENGINE_ARGUMENTS, EngineUnderFaults
    from tests.faults.engine_faults import ENGINE
    from vtoken.demo.model import build
    from vtoken.vllm import engine_args

    model = build(Path(tempfile.gettempdir()) / "vtoken-demo-model")
    settings = engine_args({}, strict=False, check_every_step=True)
    from vllm import LLM

    engine = None
    for fault in ENGINE.faults:
        if engine is None or engine.broken:
            if engine is not None:
                engine.llm.llm_engine.engine_core.shutdown()
            arguments = ENGINE_ARGUMENTS | settings
            engine = EngineUnderFaults(LLM(model=str(model), **arguments), model)
        yield fault, engine.run(fault)


def row(fault: Fault, found: Noticed | None) -> str:
    if found is None:
        by, after = "nothing", ""
    elif found.by.startswith("wrong"):
        by, after = f"{found.by}: {found.detail}", "judged at the end"
    else:
        by = found.by
        after = (
            ("the same step", "the next step")[found.steps]
            if found.steps < 2
            else (f"{found.steps} steps")
        )
    return f"| {fault.name} | {fault.rule} | {by} | {after} |\n"


def main() -> int:
    text, missed = DOCUMENT.read_text(), 0
    for name, rows in (("core", core_rows()), ("engine", engine_rows())):
        lines = []
        for fault, found in rows:
            missed += found is None or not found.by.startswith(fault.by)
            lines.append(row(fault, found))
        table = f"<!-- {name} faults -->\n{HEAD}{''.join(lines)}<!-- end -->"
        text = re.sub(
            rf"<!-- {name} faults -->.*?<!-- end -->", lambda _, new=table: new, text, flags=re.S
        )
    DOCUMENT.write_text(text)
    print(f"{DOCUMENT}: {missed} faults were not noticed by what must notice them")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
