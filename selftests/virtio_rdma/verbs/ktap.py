# SPDX-License-Identifier: GPL-2.0
"""Runs test functions and reports in KTAP with kselftest's own ksft.py, which is beside the selftests."""

import os
import random
import signal
import sys
import traceback

sys.path.append(os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../kselftest"))
import ksft  # noqa: E402  pylint: disable=wrong-import-position

# A test that waits for a completion that never comes ends after this many
# seconds. This bounds a hang, and says nothing of speed.
WATCHDOG = 120


class Skip(Exception):
    """Raised by a test that cannot run here; its argument says why."""


class Stuck(BaseException):
    """Raised in a test by the watchdog."""


def skip_all(reason):
    """Ends the program, whose tests cannot run here."""
    ksft.print_header()
    print("1..0 # SKIP " + reason, flush=True)
    sys.exit(ksft.KSFT_SKIP)


def fail_all(reason):
    """Ends the program, whose tests cannot run although they must."""
    ksft.print_header()
    ksft.set_plan(1)
    ksft.print_msg(reason)
    ksft.test_result_fail("has_a_device")
    ksft.finished()


def _bark(_signal, _frame):
    raise Stuck(f"no end within {WATCHDOG} s")


def _seed():
    seed = os.environ.get("SEED")
    return int(seed, 0) if seed else random.SystemRandom().getrandbits(32)


def _sample(tests, seed):
    percent = int(os.environ.get("TESTS_PERCENT", "100"))
    count = -(-len(tests) * percent // 100)
    return [tests[i] for i in sorted(random.Random(f"{seed}/tests").sample(range(len(tests)), count))]


def _result_skip(name, reason):
    """Reports a test that was skipped. ksft.test_result_skip() takes no reason."""
    ksft._test_print("ok", name, f"SKIP {reason}")  # pylint: disable=protected-access
    ksft.ksft_cnt["skip"] += 1


def _run_one(test, seed):
    """Runs a test and reports its result."""
    name = test.__name__
    signal.alarm(WATCHDOG)
    try:
        test(random.Random(f"{seed}/{name}"))
    except Skip as reason:
        _result_skip(name, reason)
    except (Exception, Stuck):
        for line in traceback.format_exc().rstrip().splitlines():
            ksft.print_msg(line)
        ksft.test_result_fail(name)
    else:
        ksft.test_result_pass(name)
    finally:
        signal.alarm(0)


def run(tests):
    """Runs functions that take a random.Random, and exits with the result.

    Each gets a generator of its own, derived from the seed (SEED in the
    environment, else random) and its name, so that one test can be repeated
    alone: only tests named on the command line run, if there are any. With
    TESTS_PERCENT in the environment, only so many percent run, which the seed
    chooses.
    """
    seed = _seed()
    chosen = [t for t in tests if t.__name__ in sys.argv[1:]] if sys.argv[1:] else _sample(tests, seed)
    signal.signal(signal.SIGALRM, _bark)
    # Each result is printed at once, also into a pipe.
    sys.stdout.reconfigure(line_buffering=True)
    ksft.print_header()
    ksft.set_plan(len(chosen))
    ksft.print_msg(f"seed {seed:#x}")
    for test in chosen:
        _run_one(test, seed)
    if ksft.ksft_cnt["skip"] == len(chosen):
        ksft.print_cnts()
        sys.exit(ksft.KSFT_SKIP)
    ksft.finished()


def equal(got, expected, what=""):
    """Fails the test unless two values are equal."""
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


def same_bytes(got, expected, what=""):
    """Fails the test unless two byte strings are equal; says where they differ."""
    if got == expected:
        return
    equal(len(got), len(expected), what + ": length")
    first = next(i for i, (a, b) in enumerate(zip(got, expected)) if a != b)
    wrong = sum(a != b for a, b in zip(got, expected))
    raise AssertionError(f"{what}: {wrong} of {len(got)} bytes differ, first at {first}: "
                         f"got {got[first:first + 8].hex()}, expected {expected[first:first + 8].hex()}")
