# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""In a guest: run one module of rdma-core's tests.

Usage: run_module.py DIRECTORY MODULE [--to DEVICE] [--dev X --port N --gid N]

DIRECTORY holds the package "tests" of an rdma-core source, unchanged. Prints a
line of JSON when a test begins and one when it is over: its name, what it came
to (ok, skip, fail) and why.

Client and server of a test have the same device. With --to, the server has
another one, DEVICE, whose GIDs have the same places in their table.
"""

import gc
import importlib
import json
import os
import sys
import types
import unittest
import unittest.mock


def say(**fields):
    # The tests fork: nothing may stay in a buffer.
    print(json.dumps(fields), flush=True)


def name_of(test):
    """Module, class and method; what fails outside of a test has a name, too."""
    return test.id().removeprefix("tests.")


class Lines(unittest.TestResult):
    """Says what each test comes to; the worst of it counts."""

    def startTest(self, test):
        super().startTest(test)
        say(test=name_of(test))

    def addSuccess(self, test):
        super().addSuccess(test)
        say(test=name_of(test), outcome="ok")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        say(test=name_of(test), outcome="skip", why=reason)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        say(test=name_of(test), outcome="fail", why=self.failures[-1][1])

    def addError(self, test, err):
        super().addError(test, err)
        say(test=name_of(test), outcome="fail", why=self.errors[-1][1])

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err:
            say(test=name_of(test), outcome="fail", why=f"{subtest}: {err[1]}")

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        say(test=name_of(test), outcome="ok")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        say(test=name_of(test), outcome="fail", why="unexpected success")


def part(base, names):
    """Has the server of each test use the second of two devices.

    A test takes the GID of the other side for its own: both are on one device. So
    a side's context tells the GID of the other side's device for its own.
    """
    contexts = {name: base.Context(name=name) for name in names}
    others = dict(zip(names, reversed(names)))

    class Side(base.Context):
        """A context of one side."""

        def query_gid(self, port_num, index):
            return contexts[others[self.name]].query_gid(port_num, index)

    def create_players(self, resource, sync_attrs=True, **resource_arg):
        """Does what RDMATestCase.create_players() does, with two devices."""
        with unittest.mock.patch.object(base, "Context", Side):
            create(self, Sides(resource), sync_attrs, **resource_arg)

    class Sides:
        """Makes the client, and then the server."""

        def __init__(self, resource):
            self.resource, self.__name__ = resource, resource.__name__
            self.names = iter(names)

        def __call__(self, **arguments):
            return self.resource(**(arguments | {"dev_name": next(self.names)}))

    create = base.RDMATestCase.create_players
    base.RDMATestCase.create_players = create_players


def main():
    directory, module = sys.argv[1:3]
    del sys.argv[1:3]
    other = sys.argv[2] if sys.argv[1:2] == ["--to"] else None
    if other:
        del sys.argv[1:3]
    tests = os.path.join(directory, "tests")
    sys.path[:1] = [directory, tests]
    # The package loads all its modules, some of which need other devices.
    package = types.ModuleType("tests")
    package.__path__ = [tests]
    sys.modules["tests"] = package
    parser = importlib.import_module("args_parser").parser
    parser.parse_args()
    if other:
        part(importlib.import_module("tests.base"), (parser.get_config()["dev"], other))
    suite = unittest.defaultTestLoader.loadTestsFromName(f"tests.{module}")
    suite.run(Lines())
    # A crash at collection belongs to the module whose objects are collected.
    gc.collect()
    # What a test that skips half-way leaves behind belongs to a reference cycle,
    # and the interpreter's end would free it in an order that pyverbs does not
    # bear: a CQ after the functions that its memory came from.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
