"""`python -m tests.faults`: inject every fault and write the two tables of docs/trust.md.

The exit code is 1 if the expected check does not notice a fault. `python -m tests.faults core`
writes the first table alone, in seconds and without vLLM.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.catalogue import Fault, Noticed
from tests.faults.document import DOCUMENT, HEAD, row

Row = tuple[Fault, Noticed | None]


def core_rows() -> Iterator[Row]:
    from tests.faults.core import run_core_fault
    from tests.faults.core_blocks import BLOCKS
    from tests.faults.core_parking import PARKING
    from tests.faults.core_tokens import TOKENS

    for fault in [*TOKENS.faults, *BLOCKS.faults, *PARKING.faults]:
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


TABLES: dict[str, Callable[[], Iterator[Row]]] = {"core": core_rows, "engine": engine_rows}


def main(names: list[str]) -> int:
    text, missed = DOCUMENT.read_text(), 0
    for name in names or TABLES:
        lines = []
        for fault, found in TABLES[name]():
            missed += found is None or not found.by.startswith(fault.by)
            lines.append(row(fault, found))
        table = f"<!-- {name} faults -->\n{HEAD}{''.join(lines)}<!-- end -->"
        text = re.sub(
            rf"<!-- {name} faults -->.*?<!-- end -->", lambda _, new=table: new, text, flags=re.S
        )
    DOCUMENT.write_text(text)
    print(f"{DOCUMENT}: {missed} faults not noticed by the expected check")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
