# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Looks at what a device says of its guest: whether the guest or a packet broke a rule, or the device failed.

A driver that rings a doorbell for a QP that is gone, or tries a command with a wrong length twice, passes a test that
looks at data alone.
"""

import collections
import os
import re

from virtio_rdma.guests import log

# Counters of the device (base/counters.rs of the engine) that a right driver and a right provider leave alone, whatever
# programs ask for that is refused.
OF_GUEST = ("bad_doorbell", "lost_rings", "command_without_status", "command_length", "command_unsupported",
            "bad_control_chain", "bad_doorbell_chain", "bad_send_chain", "bad_receive_chain", "bad_completion_buffer",
            "bad_event_buffer", "foreign_address")
# Those that right hosts and a right network leave alone.
OF_PACKETS = ("bad_packet", "bad_packet_length", "bad_icrc", "drop_spoofed", "drop_pkey")
# How often the driver took the device out of service.
FAILURES = "failures of the device"
# What a class of tests may break, by the words of its marker.
KINDS = {"guest": frozenset(OF_GUEST), "packets": frozenset(OF_PACKETS), "device": frozenset({FAILURES}),
         "queues": frozenset({"bad_control_chain", "bad_doorbell_chain", "bad_completion_buffer", "bad_event_buffer"})}
# What the driver says of a device that it takes out of service.
FAILED = re.compile(r"virtio_rdma .*: the device has failed")
# What the device's process says when it counts something for the first time.
COUNTED = re.compile(r'WARN .* guest="(\w+)" kind="(\w+)"')
# Programs that break rules or have the device fail: which of KINDS, and why.
MAY_BREAK = {
    "verbs/bad_arguments.py": {"guest": "posts what is malformed"},
    "verbs/bad_network.py": {"packets": "is there for a network that spoils packets"},
    "verbs/hostile.py": {"device": "has the device misbehave"},
    "verbs/rings_hostile.py": {"guest": "writes anything into its rings"},
    # virtio-pci tells nobody of a reset in the middle of a probe, which may leave a queue with half of an address.
    "reset.sh": {"device": "resets the device beneath its driver", "queues": "resets it in the middle of a probe"},
    "suspend.sh": {"device": "goes to sleep while the driver recovers from a failure"},
    "netns_interface.sh": {"device": "resets the device beneath its driver"},
}


def broken(guest):
    """Returns how often a guest's device saw each of KINDS: as its counters say, which begin anew with the device, and
    as the log of its process says, which tells of each counter once for each device."""
    if guest.options.rdma != "virtio":
        return collections.Counter()
    found = collections.Counter(guest.network.device_status().get(guest.name, {}).get("counters", {}))
    for match in map(COUNTED.search, lines(os.path.join(guest.network.dir, "virtio-rdmad.log"))):
        if match and match[1] == guest.name:
            found[f"{match[2]} in the log"] += 1
    found[FAILURES] = sum(1 for line in lines(guest.log) if FAILED.search(line))
    rules = frozenset.union(*KINDS.values())
    return collections.Counter({name: count for name, count in found.items() if rule_of(name) in rules})


def rule_of(name):
    """Returns the rule that a name of broken() is about."""
    return name.removesuffix(" in the log")


def lines(path):
    """Returns the lines of a log, if there is one."""
    return log.lines(path) if os.path.exists(path) else []


def judge_program(results, label, program, guest, before):
    """Reports it if a program has broken rules since broken() was `before`. What it may break is known from then on."""
    found = broken(guest) - before
    guest.known_to_break += found
    found = without(found, MAY_BREAK.get(program, {}))
    if found:
        results.note(describe(found))
        results.result(f"{label}: keeps the device's rules", False)


def judge(results, title, guest, breaks):
    """Reports whether a guest, its peers and its device have kept the rules but for what is known. breaks: which of
    KINDS the tests break, and why."""
    found = without(broken(guest) - guest.known_to_break, breaks)
    if found:
        results.note(describe(found))
    results.result(f"{title}: the rules of guest {guest.number}'s device are kept", not found)


def without(found, breaks):
    """Returns what is not of these KINDS."""
    assert breaks.keys() <= KINDS.keys(), breaks
    may = frozenset().union(*(KINDS[kind] for kind in breaks))
    return collections.Counter({name: count for name, count in found.items() if rule_of(name) not in may})


def describe(found):
    """Returns what broken() has found, in words."""
    return ", ".join(f"{name}: {count}" for name, count in sorted(found.items()))
