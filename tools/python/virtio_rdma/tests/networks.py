# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests for the tests of a class: they boot once, and are judged when the last test is over."""

import contextlib
import json
import os
import re
import time

from virtio_rdma.common import Failure
from virtio_rdma.guests import log
from virtio_rdma.tests import rules

# The bound on a program that hangs, in seconds. On a machine with nothing else to do, no program takes a third of it.
HANG_SECONDS = 600
# Lines of a kernel log that are one report, and how many further reports are shown by their first line.
REPORT_LINES = 60
MORE_REPORTS = 20
# Lines of the console of a guest that does not boot.
CONSOLE_LINES = 25
# What "rdma resource" and what the device calls the same objects.
OBJECTS = {"pd": "pds", "cq": "cqs", "qp": "qps", "mr": "mrs", "srq": "srqs"}
PROGRAMS_HAVE = ("qp", "cq", "mr", "pd", "srq", "cm_id", "ctx")
# The warning of is_of_racing_reset(), in a task of reset.sh.
RACING_RESET = re.compile(r"WARNING: drivers/virtio/virtio\.c:\d+ at virtio_dev_remove\+.*: reset\.sh/\d+")

# The warnings of is_of_rxe().
RXE_TASK = re.compile(r"WARNING: .*drivers/infiniband/sw/rxe/rxe_task\.c:\d+ (at )?rxe_sched_task\+")


def is_of_racing_reset(_guest, line):
    """Returns whether a report is of a device whose function is reset while reset.sh unbinds its driver. The virtio
    core acknowledges a device after the reset without the device's lock (virtio_device_restore_priv()), and warns, once
    for each boot, of a device that is acknowledged when its driver has gone."""
    return bool(RACING_RESET.search(line))


def is_of_rxe(guest, line):
    """Returns whether a report is of rxe and a packet that arrives while its QP is destroyed. rxe_comp_queue_pkt() and
    rxe_resp_queue_pkt() put the packet, which has a reference to the QP, into a queue, and use the QP after that. A
    task on another CPU may have taken the packet and dropped the last reference by then. Every peer that sends a packet
    once more leads to that. It was seen once in some 30 boots of guests with rxe."""
    return guest.options.rdma == "rxe" and bool(RXE_TASK.search(line))


def is_of_kernel(guest, line):
    """Returns whether a report is of a known defect of a guest's kernel."""
    return is_of_racing_reset(guest, line) or is_of_rxe(guest, line)


@contextlib.contextmanager
def judged(results, title, network, known=is_of_kernel, links=True, breaks=None):
    """Boots a network, judges it when the context ends, and ends it. A failure names its logs.

    title: names the network in the results. known: tells whether a guest's report in its kernel log is a defect of
    its kernel or VMM, and no result of ours. links: whether to wait for the RDMA links. breaks: which rules are broken
    on purpose, and why (rules.KINDS).
    """
    before, start = results.failed, time.monotonic()
    lost = False
    try:
        boot(results, network, links)
        yield network
        if not results.interrupted:
            judge(results, title, network, known, breaks or {})
    except Exception:
        lost = True
        raise
    finally:
        failed = lost or results.failed > before
        network.close(failed)
        if failed:
            results.note("logs: " + " ".join(network.logs()))
    if results.interrupted:
        return
    status = network.daemon.returncode if network.daemon else None
    results.result(f"{title}: the device ends cleanly", status == 0)
    left = [guest.rdma_socket for guest in network.guests if os.path.exists(guest.rdma_socket)]
    results.result(f"{title}: the device removes its sockets", not left)
    for name, passed, reasons in network.findings():
        for reason in reasons:
            results.note(json.dumps(reason))
        results.result(f"{title}: {name}", passed)
    results.note(f"{title}: {time.monotonic() - start:.0f} s")


def boot(results, network, links):
    """Boots a network. If that fails, the last lines of each guest's console go to the results: a machine of CI keeps
    no logs."""
    try:
        network.boot(links)
    except Failure:
        for guest in network.guests:
            results.note("\n".join([f"guest {guest.number}:", *log.tail(guest.log, CONSOLE_LINES)]))
        raise


def judge(results, title, network, known, breaks):
    """Looks at the kernel logs and at the device, after everything else."""
    for guest in network.guests:
        lines = [line for line in guest.reports() if not known(guest, line)]
        for line in lines[1:MORE_REPORTS]:
            results.note(line)
        for line in guest.log_after(lines[0], REPORT_LINES) if lines else []:
            results.note(line)
        results.result(f"{title}: kernel log of guest {guest.number} has no report", not lines)
    if results.result(f"{title}: the device is alive", network.daemon.poll() is None):
        for guest in network.of_device():
            rules.judge(results, title, guest, breaks)


def agree(results, network, prefix=""):
    """Checks that each guest's kernel and the device count the same objects, and that no program has any."""
    status = network.device_status()
    for guest in network.of_device():
        (kernel,) = json.loads(guest.check("rdma -j resource show"))
        device = {kind: status[guest.name][kind] for kind in OBJECTS.values()}
        device = {kind: len(value) if isinstance(value, list) else value for kind, value in device.items()}
        counts = {name: kernel[kind] for kind, name in OBJECTS.items() if kind in kernel}
        # A PD of the kernel has an MR for all of memory, which is in no list (__ib_alloc_pd()).
        counts["mrs"] += guest.check("rdma resource show pd").count("comm [")
        left = [line for line in guest.check("".join(f"rdma resource show {kind}; " for kind in PROGRAMS_HAVE))
                .splitlines() if " pid " in line]
        differs = any(device[kind] != count for kind, count in counts.items())
        if differs or left:
            results.note(f"kernel: {counts}\ndevice: {device}\n" + "\n".join(left))
        results.result(f"{prefix}guest {guest.number}: nothing is left, and the device agrees",
                       not differs and not left)


def interfaces_were_used(network):
    """Checks that each guest's own interface, which is connected to the device's switch, sent and received frames, of
    which none was refused."""
    for guest in network.device_status().values():
        counters = guest["nic"]
        assert all(counters[name] for name in ("tx_frames", "rx_frames")), counters
        assert not any(counters[name] for name in ("rx_spoofed", "rx_forged", "rx_malformed", "bad_length")), counters


def data_flows(results, network, name):
    """Checks that data flows between two guests."""
    first, second = network.guests
    command = "ibv_rc_pingpong -d {} -g {} -r 100 -c -n 50"
    server = first.start(command.format(*first.link))
    status, text = second.run(
        f"until {command.format(*second.link)} {first.address} >/tmp/pingpong 2>&1; do "
        "grep -q \"Couldn't connect\" /tmp/pingpong || { cat /tmp/pingpong; exit 1; }; sleep 0.1; done",
        timeout=HANG_SECONDS)
    passed = status == 0 and server.wait(HANG_SECONDS) == 0
    if not passed:
        results.note(text + server.text)
    return results.result(name, passed)


def restart(network, guest):
    """Restarts a guest, and waits until it has its device again."""
    guest.reboot()
    network.rdma_up(guest, "virtio")
