# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The processor time that processes use (proc_pid_stat(5))."""

import dataclasses
import os

# The kernel's threads that do the work of the network when it is too much for the moment at which it comes.
SOFTIRQ_THREAD = "ksoftirqd/"


@dataclasses.dataclass(frozen=True)
class Stat:
    """What the kernel says of a process. own: its processor time in seconds. ended: that of the processes that it
    started and that have ended."""

    name: str
    parent: int
    own: float
    ended: float

    @classmethod
    def parse(cls, text):
        """Returns what a line of /proc/PID/stat says. A name may hold spaces and parentheses."""
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        user, system, ended_user, ended_system = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])
        return cls(name, int(fields[1]), user + system, ended_user + ended_system)

    @classmethod
    def of(cls, pid):
        """Returns what the kernel says of a process."""
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return cls.parse(file.read())


def every():
    """Returns what the kernel says of all processes, by their numbers."""
    found = {}
    for name in os.listdir("/proc"):
        try:
            if name.isdigit():
                found[int(name)] = Stat.of(name)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended since
    return found


def started_by(pid, stats):
    """Returns the processes that a process has started, those that they have started, and so on."""
    children: dict[int, list] = {}
    for child, stat in stats.items():
        children.setdefault(stat.parent, []).append(child)
    found, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return found


def used(pid, stats):
    """Returns the processor time, in seconds, of all that a process has started, and of the kernel's threads for
    the network's work. What the kernel does for the network at other moments is in the time of the process that is
    interrupted."""
    started = [stats[child] for child in started_by(pid, stats)]
    threads = [stat for stat in stats.values() if stat.name.startswith(SOFTIRQ_THREAD)]
    return sum(stat.own + stat.ended for stat in started) + sum(stat.own for stat in threads)
