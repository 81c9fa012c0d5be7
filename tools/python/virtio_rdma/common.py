# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Paths of the checkout, and what every program here needs to start and to end others."""

import contextlib
import ctypes
import os
import signal
import sys

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
BUILD = os.path.join(TOP, "build")
VM_DIR = os.path.join(TOP, "tools", "vm")
# What all checkouts share: build roots, kernels, images.
CACHE = os.environ.get("VR_CACHE", "")

PR_SET_PDEATHSIG = 1


class Failure(Exception):
    """What the user is told, without a traceback: guests or a device do not do what everything after it needs."""


def say(text):
    """Prints one line of progress to standard error."""
    print(f"vm: {text}", file=sys.stderr, flush=True)


def interrupt(*_):
    """Handles a signal as Ctrl-C is handled."""
    raise KeyboardInterrupt


def end_on(*numbers):
    """Lets these signals end the program as Ctrl-C does, so that it ends its guests first."""
    for number in numbers:
        signal.signal(number, interrupt)


def die_with_parent():
    """Makes a child (preexec_fn) die when this program dies, however it dies, and leaves Ctrl-C to this program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)


@contextlib.contextmanager
def uninterrupted():
    """Ignores the signals that end this program, so that it ends first what it started."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
