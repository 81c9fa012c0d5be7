#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Writes to a target of NVMe over Fabrics with the initiator of the Python package nvmeof, reads it back, and looks at
every byte.

Usage: nvmeof_data.py ADDRESS PORT SUBSYSTEM SOURCE; SOURCE is the address of this host.
"""

import random
import sys

import nvmeof

# Which block a part begins at, and how many blocks it has. The longest takes several commands.
PARTS = ((0, 1), (7, 129), (1000, 4096), (9999, 1))


def contents(number, size):
    """Returns what a part holds."""
    return random.Random(number).randbytes(size)


def write(controller):
    """Writes all parts."""
    disk = controller.namespace(1)
    for number, (first, count) in enumerate(PARTS):
        data = contents(number, count * disk.lba_size)
        with controller.allocate(len(data)) as buffer:
            buffer.write(data)
            disk.write(buffer, first)
    disk.flush()


def read(controller):
    """Reads all parts, and compares them."""
    disk = controller.namespace(1)
    for number, (first, count) in enumerate(PARTS):
        with controller.allocate(count * disk.lba_size) as buffer:
            disk.read(buffer, first)
            got = bytes(buffer.read())
        pairs = enumerate(zip(got, contents(number, count * disk.lba_size), strict=True))
        differs = next((at for at, (mine, wanted) in pairs if mine != wanted), None)
        assert differs is None, f"{count} blocks at block {first}: the first byte that differs is {differs}"


def main():
    address, port, subsystem, source = sys.argv[1:]
    for action in (write, read):
        with nvmeof.Controller.connect(address, subsystem, port=int(port), source=source) as controller:
            action(controller)
    print(f"{len(PARTS)} parts of the disk are right", flush=True)


main()
