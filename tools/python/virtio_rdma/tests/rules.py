# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Looks at what a device says of its guest while a program runs: whether the guest broke a rule, or the device failed.

A driver that rings a doorbell for a QP that is gone, or tries a command with a wrong length twice, passes a test that
looks at data alone.
"""

import contextlib
import re

from virtio_rdma.guests import log

# Counters of the device (base/counters.rs of the engine) that a right driver and a right provider leave alone, whatever
# programs ask for that is refused.
RULES = ("bad_doorbell", "lost_rings", "command_without_status", "command_length", "command_unsupported",
         "bad_control_chain", "bad_doorbell_chain", "bad_send_chain", "bad_receive_chain", "bad_completion_buffer",
         "bad_event_buffer", "bad_packet", "bad_packet_length", "bad_icrc", "drop_spoofed", "drop_pkey",
         "foreign_address")
# What the driver says of a device that it takes out of service.
FAILED = re.compile(r"virtio_rdma .*: the device has failed")
# Programs that break rules or have the device fail, and why.
MAY_BREAK = {
    "verbs/bad_arguments.py": "posts what is malformed",
    "verbs/rings_hostile.py": "writes anything into its rings",
    "unbind.sh": "resets the device beneath its driver",
    "netns_interface.sh": "resets the device beneath its driver",
}


def of(guest):
    """Returns what breaks rules, by name, and how often it has happened to a guest."""
    counters = guest.network.device_status()[guest.name]["counters"]
    failures = sum(1 for line in log.lines(guest.log) if FAILED.search(line))
    return {name: counters.get(name, 0) for name in RULES} | {"failures of the device": failures}


@contextlib.contextmanager
def kept(results, guest, program, label):
    """Reports it if rules are broken until the context ends. A device that the guest has anew counts from 0."""
    before = of(guest)
    yield
    if program in MAY_BREAK:
        return
    after = of(guest)
    broken = {name: count for name, count in after.items() if count > before[name]}
    if broken:
        results.note(", ".join(f"{name}: {count}, before {before[name]}" for name, count in broken.items()))
        results.result(f"{label}{program}: keeps the device's rules", False)
