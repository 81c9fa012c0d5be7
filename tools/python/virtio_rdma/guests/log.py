# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Kernel logs of guests."""

import os
import re

# What a kernel log must not contain. A panic ends a guest.
PANIC = re.compile(r"Kernel panic - not syncing")
REPORT = re.compile(
    r"\bBUG: |\bWARNING: |\bKASAN: |\bKCSAN: |INFO: (rcu|task|possible|trying)|"
    r"general protection fault|Oops[: ]|kernel BUG at|suspicious RCU usage|"
    r"ODEBUG: |DMA-API: .*(error|device driver)|unreferenced object|"
    r"pagealloc: |refcount_t: |possible circular locking|inconsistent lock state|panicked at"
)


def lines(path):
    """Returns all lines of a log."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in file]


def reports(path):
    """Returns the lines of a log that report a defect."""
    if not os.path.exists(path):
        return []
    return [line for line in lines(path) if REPORT.search(line) or PANIC.search(line)]


def after(path, line, count):
    """Returns a line of a log and what follows it, count lines in all: the whole of a report."""
    text = lines(path)
    start = text.index(line)
    return text[start:start + count]


def tail(path, count):
    """Returns the last lines of a log, count at most."""
    return lines(path)[-count:] if os.path.exists(path) else []
