"""The process of `vtoken bench host`: one `HostEngine`, measured on demand.

Reads JSON lines on stdin, first the load and then the arguments of one `run` a line. Writes one
line for each on the file descriptor in the first argument.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from vtoken_bench.vllm.without_gpu import ENVIRONMENT, keep_triton


def main() -> None:
    os.environ |= ENVIRONMENT
    keep_triton()
    import torch

    import vtoken
    from vtoken_bench.output import commit_of
    from vtoken_bench.vllm.host_engine import HostEngine
    from vtoken_bench.vllm.steps_overlap import async_scheduling

    torch.set_num_threads(1)
    with (
        os.fdopen(int(sys.argv[1]), "w") as answers,
        tempfile.TemporaryDirectory() as folder,
        async_scheduling(),
    ):
        engine = HostEngine(json.loads(sys.stdin.readline()), Path(folder))
        package = Path(vtoken.__file__).parent
        facts = {"tree": str(package.parent), "commit": commit_of(package)}
        print(json.dumps(facts), file=answers, flush=True)
        for line in sys.stdin:
            found = engine.run(**json.loads(line))
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
