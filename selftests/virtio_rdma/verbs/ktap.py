# SPDX-License-Identifier: GPL-2.0
"""Runs test functions and reports in KTAP, as kselftests do."""

import os
import random
import signal
import sys
import traceback

KSFT_PASS, KSFT_FAIL, KSFT_SKIP = 0, 1, 4

# A test that waits for a completion that never comes ends after this many
# seconds. It guards the run against a hang and is no measure of speed.
WATCHDOG = 120


class Skip(Exception):
    """Raised by a test that cannot run here; its argument says why."""


class Stuck(BaseException):
    """Raised in a test by the watchdog."""


def skip_all(reason):
    """Ends the program: none of its tests can run."""
    print("TAP version 13\n1..0 # SKIP " + reason, flush=True)
    sys.exit(KSFT_SKIP)


def _bark(_signal, _frame):
    raise Stuck(f"no end within {WATCHDOG} s")


def _seed():
    seed = os.environ.get("SEED")
    return int(seed, 0) if seed else random.SystemRandom().getrandbits(32)


def _diagnose(text):
    for line in text.rstrip().splitlines():
        print("# " + line)


def _sample(tests, seed):
    percent = int(os.environ.get("TESTS_PERCENT", "100"))
    count = -(-len(tests) * percent // 100)
    return [tests[i] for i in sorted(random.Random(f"{seed}/tests").sample(range(len(tests)), count))]


def run(tests):
    """Runs functions that take a random.Random, and exits with the result.

    Each gets a generator of its own, derived from the seed (SEED in the
    environment, else random) and its name, so that one test can be repeated
    alone: name tests on the command line to run only those. Where these are
    too slow for all of them, TESTS_PERCENT of them run, which the seed chooses.
    """
    seed = _seed()
    chosen = [t for t in tests if t.__name__ in sys.argv[1:]] if sys.argv[1:] else _sample(tests, seed)
    count = {"pass": 0, "fail": 0, "skip": 0}
    signal.signal(signal.SIGALRM, _bark)
    print(f"TAP version 13\n1..{len(chosen)}\n# seed {seed:#x}", flush=True)
    for number, test in enumerate(chosen, 1):
        name = test.__name__
        line = f"ok {number} {name}"
        outcome = "pass"
        signal.alarm(WATCHDOG)
        try:
            test(random.Random(f"{seed}/{name}"))
        except Skip as reason:
            outcome, line = "skip", f"{line} # SKIP {reason}"
        except (Exception, Stuck):
            outcome, line = "fail", "not " + line
            _diagnose(traceback.format_exc())
        finally:
            signal.alarm(0)
        count[outcome] += 1
        print(line, flush=True)
    print(f"# Totals: pass:{count['pass']} fail:{count['fail']} xfail:0 xpass:0 "
          f"skip:{count['skip']} error:0", flush=True)
    if count["fail"]:
        sys.exit(KSFT_FAIL)
    sys.exit(KSFT_SKIP if count["skip"] == len(chosen) else KSFT_PASS)


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
