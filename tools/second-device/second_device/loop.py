# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The loop of the one thread: file descriptors, timers, and QPs that have something to do."""

import heapq
import selectors
import time
from collections.abc import Callable
from typing import Protocol


class Runnable(Protocol):
    """What the loop runs."""

    def run(self) -> None:
        """Does a bounded piece of work."""

    def timer(self, deadline: float) -> None:
        """Is called when `deadline` is over, once for each call of Loop.at()."""


class Loop:
    """Runs what is ready, in turn, and sleeps when nothing is."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.ready: dict[Runnable, None] = {}
        self.timers: list[tuple[float, int, Runnable]] = []
        self.count = 0

    def watch(self, source: object, callback: Callable[[], None]) -> None:
        """Calls `callback` when `source` is readable."""
        self.selector.register(source, selectors.EVENT_READ, callback)  # type: ignore[arg-type]

    def unwatch(self, source: object) -> None:
        """Ends what watch() began."""
        self.selector.unregister(source)  # type: ignore[arg-type]

    def schedule(self, work: Runnable) -> None:
        """Has `work` run soon. Several calls before it runs are one."""
        self.ready[work] = None

    def at(self, deadline: float, work: Runnable) -> None:
        """Calls the timer of `work` when time.monotonic() has reached `deadline`."""
        self.count += 1
        heapq.heappush(self.timers, (deadline, self.count, work))

    def turn(self) -> None:
        """Does one turn."""
        for key, _ in self.selector.select(self._patience()):
            if self.selector.get_map().get(key.fd) is key:  # Another callback may have ended the watch.
                key.data()
        now = time.monotonic()
        while self.timers and self.timers[0][0] <= now:
            deadline, _, work = heapq.heappop(self.timers)
            work.timer(deadline)
        for work in list(self.ready):
            del self.ready[work]
            work.run()

    def _patience(self) -> float | None:
        if self.ready:
            return 0
        if self.timers:
            return max(0, self.timers[0][0] - time.monotonic())
        return None
