"""Decoders of documents in several threads."""

from __future__ import annotations

import subprocess
import sys

# Types of 30 nested structs: four threads make the first decoder of each at the same time.
THREADS = """
import sys, threading, types
import msgspec
from vtoken.base.documents import Decoder

FIELDS = "".join(f"    f{n}: 'int | None' = None\\n" for n in range(20))

def new_type():
    module = sys.modules["made"] = types.ModuleType("made")
    module.msgspec, below = msgspec, ""
    for n in range(30):
        exec(f"class S{n}(msgspec.Struct):\\n{FIELDS}{below}", module.__dict__)
        below = f"    below: 'S{n} | None' = None\\n"
    return module.S29

sys.setswitchinterval(1e-6)
found = []
for _ in range(20):
    kind, begin = new_type(), threading.Barrier(4)

    def use():
        begin.wait()
        found.append(Decoder(kind).decode(b'{"below":{"below":{"f1":3}}}').below.below.f1)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(found == [3] * 80)
"""


def test_threads_may_make_the_first_decoders_of_a_type_at_the_same_time() -> None:
    """Without one lock for all decoders msgspec ends the process with a segmentation fault."""
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
