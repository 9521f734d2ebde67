"""The core's test harness in one import: a real engine core without vLLM.

`CoreEngine` for step-by-step tests, `make_engine` for one with control plane and telemetry.
"""

from tests.support.core.engine import CoreEngine, Request
from tests.support.core.live import LiveEngine, make_engine, make_holes
from tests.support.core.store import SimpleStore
from tests.support.core.worker import SimulatedWorker, StepMessage, scores_of

__all__ = [
    "CoreEngine",
    "LiveEngine",
    "Request",
    "SimpleStore",
    "SimulatedWorker",
    "StepMessage",
    "make_engine",
    "make_holes",
    "scores_of",
]
