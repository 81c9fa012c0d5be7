# SPDX-License-Identifier: GPL-2.0
"""Runs a test on two hosts at once, one side on each host.

PEERS in the environment holds the other host's address, GUEST this host's
number: number 1 listens and is the passive side, the other one is active. A
test gets a Side; side.exchange() trades any value with the other side and is
at the same time the barrier between two steps.
"""

import os
import pickle
import socket
import time

import ktap
import rc  # before pyverbs: it skips where pyverbs is missing
from rc import e
from pyverbs.addr import GID

TCP_PORT = 18600


class Side:
    """This host's side of a test, and the connection to the other side."""

    def __init__(self, device, link, active):
        self.device = device
        self.stream = link.makefile("rwb")
        self.active = active
        self.gid_index = device.gid.gid_index

    def exchange(self, value=None):
        """Trades a value with the other side; returns when both have come here."""
        pickle.dump(value, self.stream)
        self.stream.flush()
        try:
            return pickle.load(self.stream)
        except (EOFError, ConnectionError) as error:
            raise AssertionError("the other host gave up") from error

    def endpoint(self, changes=None, **options):
        """Returns an endpoint that is connected to that of the other side."""
        end = rc.Endpoint(self.device, **options)
        self.connect(end, **(changes or {}))
        return end

    def connect(self, end, **changes):
        """Brings the QP from RESET to RTS, connected to that of the other side."""
        mine = (end.qp.qp_num, str(self.device.context.query_gid(rc.PORT, self.gid_index)))
        number, gid = self.exchange(mine)
        route = rc.GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index, hop_limit=64)
        path = rc.AHAttr(port_num=rc.PORT, is_global=1, gr=route)
        end.connect(number, ah_attr=path, **changes)
        self.exchange()

    def target(self, region):
        """Tells the other side the place of an MR; returns (address, rkey) of the other side's MR."""
        return self.exchange(rc.remote(region))


def links():
    """Yields a new connection to the other host for each test."""
    if os.environ["GUEST"] == "1":
        with socket.create_server(("", TCP_PORT)) as server:
            while True:
                yield server.accept()[0]
    peer = os.environ["PEERS"].split()[0]
    while True:
        try:
            yield socket.create_connection((peer, TCP_PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)  # the other host is still starting


def run(tests):
    """Runs functions that take (Side, random.Random) on both hosts, in step.

    Random numbers differ between the sides of one test only if they draw
    differently: both get the same seed, from the passive side.
    """
    if not os.environ.get("PEERS") or not os.environ.get("GUEST"):
        ktap.skip_all("needs a second host: PEERS and GUEST are not set")
    device = rc.open_device()
    connections = links()
    ktap.run([paired(test, device, connections) for test in tests])


def paired(test, device, connections):
    """Returns a test as ktap.run() wants it, with its own connection."""

    def body(rng):
        # A side that fails closes its connection, and so ends the other's test.
        with next(connections) as link:
            side = Side(device, link, os.environ["GUEST"] != "1")
            theirs = side.exchange(rng.getstate())
            if side.active:
                rng.setstate(theirs)
            with side.stream:
                test(side, rng)

    body.__name__ = test.__name__
    return body


def complete(side, cq, count=1, status=e.IBV_WC_SUCCESS):
    """Does what rc.complete() does, and then waits for the other side."""
    completions = rc.complete(cq, count, status)
    side.exchange()
    return completions
