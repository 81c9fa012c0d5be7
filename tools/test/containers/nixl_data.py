#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Moves memory between two hosts with NIXL, by its UCX backend, and looks at every byte.

Usage: nixl_data.py target PORT | nixl_data.py initiator PORT ADDRESS

Both exchange what NIXL wants to know of the other by a TCP connection. The initiator writes to the memory of the target
and reads it back. With SYSTEM in the environment, the system's libibverbs looks for devices before NIXL loads its own.
"""

import ctypes
import os
import pickle
import socket
import sys
import time

import numpy
from nixl_cu12._api import nixl_agent, nixl_agent_config

SIZES = (1, 64, 4096, 65537, 4 << 20)
SECONDS = 60


def pattern(number, size):
    """What a block holds: bytes that follow from its number."""
    return ((numpy.arange(size, dtype=numpy.uint64) * 31 + number * 97) & 255).astype(numpy.uint8)


class End:
    """One side: an agent with a block of memory for each size, and a connection to the other side."""

    def __init__(self, name, connection):
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.blocks = [numpy.zeros(size, dtype=numpy.uint8) for size in SIZES]
        places = [(block.ctypes.data, block.nbytes, 0, "") for block in self.blocks]
        self.agent.register_memory(places, "DRAM")
        self.places = [place[:3] for place in places]
        self.stream = connection.makefile("rwb")

    def tell(self, what):
        """Sends an object to the other side."""
        pickle.dump(what, self.stream)
        self.stream.flush()

    def hear(self):
        """Returns what the other side sent."""
        return pickle.load(self.stream)

    def transfer(self, kind, theirs, peer, word):
        """Transfers all blocks, and waits for the end."""
        mine = self.agent.get_xfer_descs(self.places, "DRAM")
        handle = self.agent.initialize_xfer(kind, mine, theirs, peer, word)
        state, deadline = self.agent.transfer(handle), time.monotonic() + SECONDS
        while state == "PROC" and time.monotonic() < deadline:
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", f"{kind}: {state}"
        self.agent.release_xfer_handle(handle)

    def check(self, what, first):
        """Compares each block with its pattern."""
        for number, block in enumerate(self.blocks, first):
            differs = numpy.flatnonzero(block != pattern(number, block.nbytes))
            assert not differs.size, f"{what}: {block.nbytes} bytes: the first that differs is {differs[0]}"


def target(port):
    with socket.create_server(("", port)) as server:
        end = End("target", server.accept()[0])
    places = end.agent.get_serialized_descs(end.agent.get_xfer_descs(end.places, "DRAM"))
    end.tell((end.agent.get_agent_metadata(), places))
    end.agent.add_remote_agent(end.hear())
    end.tell("ready")
    assert end.hear() == "written"
    end.check("written", 1)
    for number, block in enumerate(end.blocks, 100):
        block[:] = pattern(number, block.nbytes)
    end.tell("changed")
    assert end.hear() == "read"


def initiator(port, address):
    end = End("initiator", socket.create_connection((address, port)))
    metadata, places = end.hear()
    peer, theirs = end.agent.add_remote_agent(metadata), end.agent.deserialize_descs(places)
    end.tell(end.agent.get_agent_metadata())
    assert end.hear() == "ready"
    for number, block in enumerate(end.blocks, 1):
        block[:] = pattern(number, block.nbytes)
    end.transfer("WRITE", theirs, peer, b"written")
    end.tell("written")
    assert end.hear() == "changed"
    end.transfer("READ", theirs, peer, b"read")
    end.check("read", 100)
    end.tell("read")


def main():
    if "SYSTEM" in os.environ:
        count = ctypes.c_int()
        ctypes.CDLL("libibverbs.so.1").ibv_get_device_list(ctypes.byref(count))
        assert count.value == 1, f"the system's libibverbs finds {count.value} devices, not 1"
    role, port = sys.argv[1], int(sys.argv[2])
    if role == "target":
        target(port)
    else:
        initiator(port, sys.argv[3])
    with open("/proc/self/maps", encoding="utf-8") as maps:
        copies = {line.split()[-1] for line in maps if "/libibverbs" in line and ".so" in line and "rdmav" not in line}
    print(" ".join(sorted(os.path.basename(path) for path in copies)))
    print(f"{role}: all bytes are right, with {len(copies)} libibverbs", flush=True)


main()
