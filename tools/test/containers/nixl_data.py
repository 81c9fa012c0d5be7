#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Moves memory between two hosts with NIXL, by its UCX backend, and looks at every byte.

Usage: nixl_data.py target PORT | nixl_data.py initiator PORT ADDRESS

Both exchange what NIXL wants to know of the other by a TCP connection. The initiator writes to the memory of the target
and reads it back. With SYSTEM in the environment, the system's libibverbs looks for devices before NIXL loads its own.
"""

import ctypes
import os
import socket
import sys
import time

from blocks import Blocks
from nixl_cu12._api import nixl_agent, nixl_agent_config

SECONDS = 60


class End(Blocks):
    """One side: an agent, with which the blocks are registered."""

    def __init__(self, name, connection):
        super().__init__(connection)
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        places = [(block.ctypes.data, block.nbytes, 0, "") for block in self.blocks]
        self.agent.register_memory(places, "DRAM")
        self.places = [place[:3] for place in places]

    def transfer(self, kind, theirs, peer, word):
        """Transfers all blocks, and waits for the end."""
        mine = self.agent.get_xfer_descs(self.places, "DRAM")
        handle = self.agent.initialize_xfer(kind, mine, theirs, peer, word)
        state, deadline = self.agent.transfer(handle), time.monotonic() + SECONDS
        while state == "PROC" and time.monotonic() < deadline:
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", f"{kind}: {state}"
        self.agent.release_xfer_handle(handle)


def target(port):
    with socket.create_server(("", port)) as server:
        end = End("target", server.accept()[0])
    places = end.agent.get_serialized_descs(end.agent.get_xfer_descs(end.places, "DRAM"))
    end.tell((end.agent.get_agent_metadata(), places))
    end.agent.add_remote_agent(end.hear())
    end.tell("ready")
    assert end.hear() == "written"
    end.check("written", 1)
    end.fill(100)
    end.tell("changed")
    assert end.hear() == "read"


def initiator(port, address):
    end = End("initiator", socket.create_connection((address, port)))
    metadata, places = end.hear()
    peer, theirs = end.agent.add_remote_agent(metadata), end.agent.deserialize_descs(places)
    end.tell(end.agent.get_agent_metadata())
    assert end.hear() == "ready"
    end.fill(1)
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
