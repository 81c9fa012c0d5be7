#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Moves memory between two hosts with the transfer engine of Mooncake, and looks at every byte.

Usage: mooncake_data.py target DEVICE PORT ADDRESS | mooncake_data.py initiator DEVICE PORT ADDRESS TARGET

ADDRESS is the host's own. Both exchange what the engine wants to know of the other by a TCP connection. The initiator
writes to the memory of the target and reads it back.
"""

import socket
import sys

from blocks import SIZES, Blocks
from mooncake.engine import TransferEngine


class End(Blocks):
    """One side: an engine, with which the blocks are registered."""

    def __init__(self, device, address, connection):
        super().__init__(connection)
        self.engine = TransferEngine()
        assert self.engine.initialize(address, "P2PHANDSHAKE", "rdma", device) == 0, "the engine does not start"
        self.name = f"{address}:{self.engine.get_rpc_port()}"
        self.places = [block.ctypes.data for block in self.blocks]
        for place, block in zip(self.places, self.blocks):
            assert self.engine.register_memory(place, block.nbytes) == 0, f"{block.nbytes} bytes are not registered"


def target(device, port, address):
    with socket.create_server(("", port)) as server:
        end = End(device, address, server.accept()[0])
    end.tell((end.name, end.places))
    assert end.hear() == "written"
    end.check("written", 1)
    end.fill(100)
    end.tell("changed")
    assert end.hear() == "read"


def initiator(device, port, address, peer):
    end = End(device, address, socket.create_connection((peer, port)))
    name, theirs = end.hear()
    end.fill(1)
    for mine, place, size in zip(end.places, theirs, SIZES):
        assert end.engine.transfer_sync_write(name, mine, place, size) == 0, f"a WRITE of {size} bytes fails"
    end.tell("written")
    assert end.hear() == "changed"
    for mine, place, size in zip(end.places, theirs, SIZES):
        assert end.engine.transfer_sync_read(name, mine, place, size) == 0, f"a READ of {size} bytes fails"
    end.check("read", 100)
    end.tell("read")


def main():
    role, device, port, *addresses = sys.argv[1:]
    {"target": target, "initiator": initiator}[role](device, int(port), *addresses)
    print(f"{role}: all bytes are right", flush=True)


main()
