#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""The trace events of the driver: what the kernel's CM posts and polls for a program that
connects, the commands of the driver, and why it refuses a verb."""

import contextlib
import errno
import ipaddress
import os
import re
import subprocess

import ktap
from rc import PORT, Endpoint, PyverbsError, e, open_device

TRACING = "/sys/kernel/tracing"
INSTANCE = os.path.join(TRACING, "instances", f"virtio_rdma_{os.getpid()}")
# NAME: WHAT, behind the program, the CPU, flags and the time.
EVENT = re.compile(r"\d+\.\d+: (\w+): (.*)")
FIELD = re.compile(r"(\w+)=(\S+)")
# The QP of the kernel's CM, which has datagrams for its peer.
GSI = "1"

DEVICE = open_device()


def write(path, text):
    """Writes a file of the trace."""
    with open(os.path.join(INSTANCE, path), "w", encoding="ascii") as file:
        file.write(text)


@contextlib.contextmanager
def traced():
    """Switches the events on meanwhile. At the end, the list that this gives has the name of each event, its fields
    and its whole text."""
    events = []
    os.mkdir(INSTANCE)
    try:
        write("events/virtio_rdma/enable", "1")
        yield events
        write("events/virtio_rdma/enable", "0")
        with open(os.path.join(INSTANCE, "trace"), encoding="ascii") as file:
            for match in filter(None, map(EVENT.search, file)):
                events.append((match[1], dict(FIELD.findall(match[2])), match[2]))
    finally:
        os.rmdir(INSTANCE)


def named(events, name, **fields):
    """Returns the events with a name and with these fields."""
    return [event for event in events if event[0] == name and fields.items() <= event[1].items()]


def address():
    """Returns the IPv4 address of the port."""
    gid = DEVICE.context.query_gid(PORT, DEVICE.gid.gid_index)
    mapped = ipaddress.IPv6Address(str(gid)).ipv4_mapped
    if mapped is None:
        raise ktap.Skip("the port has no GID of an IPv4 address")
    return str(mapped)


def consumer_in_the_kernel(_rng):
    # Nobody listens: the CM sends a request to itself, and rejects it.
    connect = ["rping", "-c", "-C", "1", "-a", address()]
    with traced() as events:
        ended = subprocess.run(connect, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    assert ended.returncode and "REJECTED" in ended.stdout.upper(), ended.stdout
    for name in ("post_send", "post_recv", "complete"):
        found = named(events, name, qpn=GSI)
        assert found, f"no {name} of QP 1 among {len(events)} events"
        for _name, fields, text in found:
            assert text.startswith(f"{DEVICE.name} "), text
            assert int(fields["wr_id"], 16), text
    sent = {fields["wr_id"] for _name, fields, _text in named(events, "post_send", qpn=GSI)}
    # IB_WC_SEND is 0.
    completed = named(events, "complete", qpn=GSI, opcode="0")
    assert completed, "no completion of a send of QP 1"
    for _name, fields, text in completed:
        ktap.equal(fields["status"], "SUCCESS", text)
        assert fields["wr_id"] in sent, f"completed, and not posted: {text}"


def commands(_rng):
    with traced() as events:
        end = Endpoint(DEVICE, depth=4)
        qpn = end.qp.qp_num
        end.connect(qpn)
        end.close()
    text = " ".join(text for _name, _fields, text in named(events, "command"))
    for command in ("CREATE(_RING)?_QP", "MODIFY_QP", "DESTROY_QP"):
        found = re.search(rf"\b{command} error=0 nsecs=(\d+)", text)
        assert found and int(found[found.lastindex]), f"no {command} among {text}"
    # A program's own posts do not enter the kernel.
    ktap.equal(named(events, "post_send", qpn=str(qpn)), [], "posts")


def refusals(_rng):
    end = Endpoint(DEVICE, depth=4)
    with traced() as events:
        attr = end.attributes(end.qp.qp_num)
        attr.qp_state = e.IBV_QPS_RTS
        try:
            end.qp.modify(attr, e.IBV_QP_STATE)
            raise AssertionError("a QP went from RESET to RTS")
        except PyverbsError as error:
            ktap.equal(error.error_code, errno.EINVAL, "the error")
    end.close()
    # From RESET, 0, to RTS, 3.
    found = named(events, "refuse", error=f"-{errno.EINVAL}", number="3", limit="0:")
    ktap.equal(len(found), 1, f"refusals among {events}")
    assert "a QP to a state" in found[0][2], found
    ktap.equal(named(events, "command"), [], "commands")


if not os.path.isdir(os.path.join(TRACING, "events")):
    subprocess.run(["mount", "-t", "tracefs", "nodev", TRACING], check=False, stderr=subprocess.DEVNULL)
if not os.path.isdir(os.path.join(TRACING, "events")):
    ktap.skip_all("a kernel without CONFIG_EVENT_TRACING")
ktap.run([consumer_in_the_kernel, commands, refusals])
