"""What charts need of the last quarter of an hour, one point a second.

A point is taken from a status that a frame has anyway, so it costs the engine nothing more. The
API's flight recorder asks for a frame a second while no client does. The points outlive every API
process.
"""

from __future__ import annotations

from collections import deque

from vtoken.wire import Point, Status

POINT_S = 0.95  # between two points
NUM_POINTS = 900


class History:
    """At most NUM_POINTS points, POINT_S or more apart."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)

    def note(self, status: Status) -> None:
        """Add a point, unless the newest is not old enough."""
        if not self._points or status.ts - self._points[-1].ts >= POINT_S:
            self.add(Point.of(status))

    def add(self, point: Point) -> None:
        self._points.append(point)

    def clear(self) -> None:
        self._points.clear()

    def points(self) -> list[Point]:
        """All points, oldest first."""
        return [*self._points]
