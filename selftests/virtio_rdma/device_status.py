#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
#
# Usage: device_status.py FUNCTION STATUS
#
# Writes STATUS, a number, to the device_status of the virtio device of a PCI function, beneath its driver: 0 resets the
# device. It uses the capability that reaches BARs by configuration space (VIRTIO 1.3, 4.1.4.9). FUNCTION is the
# function's directory in sysfs.

import os
import struct
import sys

STATUS = 0x06
STATUS_CAPABILITIES = 1 << 4
CAPABILITIES = 0x34
ID_VENDOR = 0x09
# Kinds of virtio's capabilities (VIRTIO 1.3, 4.1.4), and their members behind the kind: bar, id, padding, offset, length.
COMMON, ACCESS = 1, 5
MEMBERS = struct.Struct("<BB2xII")
# The member device_status of struct virtio_pci_common_cfg.
DEVICE_STATUS = 20


def capabilities(config):
    """Yields where each capability of virtio begins, by its kind."""
    if not config[STATUS] & STATUS_CAPABILITIES:
        return
    at = config[CAPABILITIES] & ~3
    while at:
        if config[at] == ID_VENDOR:
            yield config[at + 3], at
        at = config[at + 1] & ~3


def main():
    """Writes the status."""
    file = os.open(os.path.join(sys.argv[1], "config"), os.O_RDWR)
    config = os.pread(file, 256, 0)
    places = dict(capabilities(config))
    bar, _, offset, _ = MEMBERS.unpack_from(config, places[COMMON] + 4)
    access = places[ACCESS]
    os.pwrite(file, bytes([bar]), access + 4)
    os.pwrite(file, struct.pack("<I", offset + DEVICE_STATUS), access + 8)
    os.pwrite(file, struct.pack("<I", 1), access + 12)
    os.pwrite(file, bytes([int(sys.argv[2], 0)]), access + 16)


main()
