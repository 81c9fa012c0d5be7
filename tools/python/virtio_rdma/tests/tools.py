# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Programs of which one side runs in one guest and the other in another: how they are run, and the tools that people
try RDMA with."""

import dataclasses
import re
import signal
import time

from virtio_rdma.common import Failure
from virtio_rdma.tests.networks import HANG_SECONDS

# How the serving side's guest knows that it waits for the other's.
CM = "rdma resource show cm_id | grep -q 'state LISTEN'"
TCP = "grep -Eqi ':{:04X} [^ ]* 0A ' /proc/net/tcp /proc/net/tcp6"
JOINED = "rdma resource show qp -dd | grep -q 'drv_mcast_groups 1'"
# A side that meets no listener. The kernel shows a listener a moment before it listens, and perftest says that it
# will listen before it does, when it is connected once already, and takes a second program for a part of the first.
# The words are of rping, of perftest, which has three ways to say it, of udaddy, and of qperf, which does not say why.
NOT_YET = re.compile(r"REJECTED\W+error\W+8\b|Unexpected CM event bl blka 8\b|UNREACHABLE\W+error\W+1\b|"
                     r"Event rejected\W+expecting: Event established")
# The addresses of guests: with the number of the guest, and as a GID.
FAMILIES = {"IPv4": ("10.0.0.{}", "0000:0000:0000:0000:0000:ffff:0a00:000{}"),
            "IPv6": ("fd00::{}", "fd00:0000:0000:0000:0000:0000:0000:000{}"),
            "a VLAN": ("10.7.0.{}", "0000:0000:0000:0000:0000:ffff:0a07:000{}"),
            "IPv6 in a VLAN": ("fd07::{}", "fd07:0000:0000:0000:0000:0000:0000:000{}")}
# Those with which all tools run.
USUAL = ("IPv4", "IPv6", "a VLAN")
# Both sides begin again so often.
ATTEMPTS = 5
# How many of the tries of a suite may be ones that began again: so many, or this share of them if that is more.
AGAIN, AGAIN_PERCENT = 3, 2
# The bound on the end of a program that was killed, in seconds.
KILLED_SECONDS = 600


@dataclasses.dataclass
class Case:
    """One program: what the serving guest runs, what tells that it is ready, and what the other guest, or the same
    one, runs. Both must end with status 0.

    {d1} {g1} {a1} are device, GID index and address of the guest that serves, {t1} its address of IPv4, {i1} the
    index of a GID that is an IPv6 address; {d2} {g2} {a2} {i2} are those of the other. server may be empty. expect:
    what the client's output must hold. same: a command that must print the same in both. family: which addresses
    {a1} and {g1} are (FAMILIES).
    alone: both run in one guest. stays: the server serves until it is told to end. limit: (pattern, reason): where
    the outputs match over every driver, the program cannot run here.
    """

    name: str
    server: str
    ready: str
    client: str
    expect: str = ""
    same: str = ""
    family: str = "IPv4"
    alone: bool = False
    stays: bool = False
    limit: tuple[str, str] | None = None

    @property
    def kind(self):
        """What it is one of."""
        return self.name.split()[0]

    def __str__(self):
        return self.name + ", within one guest" * (self.alone and bool(self.server))


@dataclasses.dataclass
class Outcome:
    """What a case came to: why it failed, if it did, what both sides said, and how often they began again."""

    failure: str = ""
    text: str = ""
    again: int = 0

    def brief(self):
        """Returns the outcome in some words."""
        line = self.failure.split("\n", maxsplit=1)[0]
        if not line:
            return "passes"
        return "does not end in time" if "does not end" in line else line


class Tries:
    """Counts how often the cases of a suite ran, and how often one of them began again."""

    def __init__(self):
        self.all = self.again = 0

    def add(self, outcome):
        """Counts what a case came to."""
        self.all += 1 + outcome.again
        self.again += outcome.again

    def judge(self, results):
        """Reports whether few cases began again, if there were any: connections that are refused now and then would
        pass for good otherwise."""
        if self.all:
            results.note(f"{self.again} of {self.all} tries began again")
            results.result("few cases begin again", self.again <= max(AGAIN, self.all * AGAIN_PERCENT / 100))


# Those of the suite that runs (conftest.py judges them).
TRIES = Tries()


def names_of(first, second):
    """Returns the names in the command lines of a case, as far as Guest.link has them."""
    (d1, g1), (d2, g2) = first.link, second.link
    return {"d1": d1, "g1": g1, "a1": first.address, "t1": first.address, "d2": d2, "g2": g2, "a2": second.address}


def gid_index(guest, gid):
    """Waits until a guest's port has a GID, and returns its index."""
    path = f"/sys/class/infiniband/{guest.link[0]}/ports/1/gids"
    text = guest.check(f"cd {path} && until grep -lx {gid} *; do sleep 0.05; done", timeout=HANG_SECONDS)
    return int(text.split()[0])


def address_of(guest, family):
    """Returns an address of a guest."""
    return FAMILIES[family][0].format(guest.number)


def give_vlan(guests):
    """Gives each guest a VLAN interface with addresses of IPv4 and IPv6. The neighbours in the VLAN are written down
    where the NIC carries no tags, as that of user-mode Linux."""
    for guest in guests:
        guest.check("ip link add link eth0 name vlan7 type vlan id 7 && ip link set vlan7 up && "
                    f"ip addr add {address_of(guest, 'a VLAN')}/24 dev vlan7 && "
                    f"ip addr add {address_of(guest, 'IPv6 in a VLAN')}/64 dev vlan7 nodad")
        for peer in guests:
            if peer is not guest and guest.options.vmm == "uml":
                guest.check(f"ip neigh replace {address_of(peer, 'a VLAN')} lladdr {peer.mac} "
                            "dev vlan7 nud permanent")


def give_addresses(guests, families):
    """Gives two guests addresses of IPv6 beside those of IPv4, and of a VLAN if it is among the families. Returns the
    names in the command lines of cases by family, with the first guest as the one that serves."""
    for guest in guests:
        guest.check(f"ip -6 addr replace {address_of(guest, 'IPv6')}/64 dev eth0 nodad")
    if any("VLAN" in family for family in families):
        give_vlan(guests)
    return names_by_family(guests, families)


def names_by_family(guests, families):
    """Returns the names in the command lines of cases by family, with the first guest as the one that serves."""
    first, second = guests
    indices = {family: [gid_index(guest, FAMILIES[family][1].format(guest.number)) for guest in guests]
               for family in {*families, "IPv6"}}
    common = names_of(first, second) | dict(zip(("i1", "i2"), indices["IPv6"]))
    return {family: common | dict(zip(("g1", "g2"), indices[family])) |
            {"a1": address_of(first, family), "a2": address_of(second, family)} for family in families}


def ping(results, guest, address, title):
    """Reports whether all of what a guest's own interface sends to an address comes back."""
    status, text = guest.run(f"ping -c 20 -i 0.01 -s 1400 {address}", timeout=HANG_SECONDS)
    results.result(title, status == 0 and " 0% packet loss" in text) or results.note(text)


def run(case, guests, names, seconds, stuck=None):
    """Runs a case, and returns its Outcome. Where a server does not listen yet although it said so, both sides begin
    again. seconds: the bound on each side. stuck: is called when a side does not end."""
    outcome = Outcome()
    for again in range(ATTEMPTS):
        outcome = attempt(case, guests, names, seconds, stuck)
        outcome.again = again
        if not outcome.failure or not NOT_YET.search(outcome.text):
            break
    return outcome


def attempt(case, guests, names, seconds, stuck):
    """Runs both sides once."""
    first = guests[0]
    second = first if case.alone else guests[1]
    jobs = []
    outcome = Outcome()
    try:
        if case.server:
            jobs.append(first.start(case.server.format(**names)))
            listens(first, case, jobs[0], seconds)
        jobs.append(second.start(case.client.format(**names)))
        outcome.failure = judge(case, jobs, seconds)
        if case.same and not outcome.failure and len({guest.check(case.same) for guest in guests}) != 1:
            outcome.failure = f"the guests differ: {case.same}"
    except Failure as failure:
        outcome.failure = str(failure)
        if stuck:
            stuck()
    end(jobs)
    outcome.text = "".join(f"guest {job.guest.number}: {job.what}\n{job.text}\n" for job in jobs)
    return outcome


def listens(guest, case, server, seconds):
    """Waits until a server is ready. Raises Failure if it ends before, or takes too long."""
    waiter = guest.start(f"until {case.ready}; do sleep 0.05; done")
    deadline = time.monotonic() + seconds
    while not waiter.done.wait(0.05) and server.status is None and time.monotonic() < deadline:
        pass
    if waiter.status is None:
        waiter.kill(signal.SIGKILL)
        raise Failure("the server does not listen" if server.status is None else
                      f"the server ends with status {server.status}")


def judge(case, jobs, seconds):
    """Waits for what runs, and returns why it failed."""
    client = jobs[-1]
    if client.wait(seconds):
        return f"the client ends with status {client.status}"
    if case.expect not in client.text:
        return f"the client does not say \"{case.expect}\""
    for server in jobs[:-1]:
        if case.stays:
            server.kill(signal.SIGTERM)
        status = server.wait(seconds)
        if status not in ((0, 128 + signal.SIGTERM) if case.stays else (0,)):
            return f"the server ends with status {status}"
    return ""


def end(jobs):
    """Kills what still runs."""
    for job in jobs:
        if job.status is None:
            job.kill(signal.SIGKILL)
            job.done.wait(KILLED_SECONDS)


def report(results, case, guests, names, seconds, prefix=""):
    """Runs a case, and reports it with a prefix in front of its name."""
    outcome = run(case, guests, names, seconds)
    TRIES.add(outcome)
    if outcome.again:
        results.note(f"both sides began again, {outcome.again} times")
    if outcome.failure:
        results.note(f"{outcome.failure}\n{outcome.text}")
    results.result(f"{prefix}{case}", not outcome.failure)


def pingpongs():
    """Yields those of ibverbs-utils; -c checks the data, which the one over XRC does not have."""
    port = TCP.format(18515)
    for kind, options, expect in (("rc", "-c", "bytes in"), ("uc", "-c", "bytes in"), ("ud", "-c", "bytes in"),
                                  ("srq", "-c", "bytes in"), ("xsrq", "", "success")):
        for label, more in (("", ""), (" with events", " -e")):
            tool = f"ibv_{kind}_pingpong {options} -n 500{more}"
            yield Case(f"ibv_{kind}_pingpong{label}", f"{tool} -d {{d1}} -g {{g1}}", port,
                       f"{tool} -d {{d2}} -g {{g2}} {{t1}}", expect)


def connection_managers(family):
    """Yields those of rdmacm-utils over the addresses of one family (FAMILIES)."""
    label = f"over {family}"

    def case(name, server, client, expect=""):
        return Case(name, server, CM, client, expect, family=family)

    yield case(f"rping {label}", "rping -s -V -C 50 -S 4096 -a {a1}",
                   "rping -c -V -C 50 -S 4096 -a {a1}")
    yield case(f"ucmatose {label}", "ucmatose -b {a1} -c 20 -C 20 -S 1000",
                   "ucmatose -s {a1} -c 20 -C 20 -S 1000", "test complete")
    yield case(f"udaddy {label}", "udaddy -b {a1} -c 5 -C 10 -S 1000",
                   "udaddy -s {a1} -c 5 -C 10 -S 1000", "test complete")
    if "IPv6" not in family:  # cmtime looks up IPv4 addresses only
        yield case(f"cmtime {label}", "cmtime -b {a1} -c 100", "cmtime -s {a1} -c 100")
    # It compares byte by byte, which takes longer than all else where sizes are large.
    for size, count in ((64, 100), (65536, 20)):
        tool = f"-T v -S {size} -C {count} -I 10"
        yield case(f"rstream {label}, {size} bytes", f"rstream -b {{a1}} {tool}",
                       f"rstream -s {{a1}} {tool}", "custom")
        yield case(f"riostream {label}, {size} bytes", f"riostream -b {{a1}} {tool}",
                       f"riostream -s {{a1}} {tool}", "custom")


def servers():
    """Yields those of rdmacm-utils whose server listens on every address."""
    yield Case("rdma_server and rdma_client", "rdma_server -s {a1}", CM, "rdma_client -s {a1}", "end 0")
    yield Case("rcopy", "rcopy", CM, "head -c 3000001 /dev/urandom >/tmp/rcopy && rcopy /tmp/rcopy {a1}:/tmp/rcopy",
               same="sha256sum </tmp/rcopy", stays=True)


def examples():
    """Yields the programs that every course starts with, from the selftests."""
    path = "/mnt/virtio_rdma/examples"
    yield Case("examples/rc_tcp", f"{path}/rc_tcp {{d1}} {{g1}}", TCP.format(18710),
               f"{path}/rc_tcp {{d2}} {{g2}} {{t1}}", "by RDMA READ")
    yield Case("examples/mcast_cm", f"{path}/mcast_cm receive 239.1.2.4 {{a1}} 100", JOINED,
               f"{path}/mcast_cm send 239.1.2.4 {{a2}} 100", "100 datagrams sent")
    yield Case("examples/srq_cm", f"{path}/srq_cm server 20 100", CM, f"{path}/srq_cm client {{a1}} 20 100",
               "100 messages on each of 20 connections")


# qperf's port of TCP, and its tests that the RDMA CM connects.
QPERF_PORT = 19765
QPERF = ("rc_bw", "rc_bi_bw", "rc_lat", "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_bw", "rc_rdma_write_lat",
         "rc_rdma_write_poll_lat", "rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap", "ver_rc_fetch_add")


def qperf():
    """Yields the tests of qperf, one second each. The server serves until it is told to end."""
    for test in QPERF:
        yield Case(f"qperf {test}", f"qperf --listen_port {QPERF_PORT}", TCP.format(QPERF_PORT),
                   f"qperf --listen_port {QPERF_PORT} -t 1 -cm 1 {{t1}} {test}", " =  ", stays=True)


def multicast():
    """Yields a sender in guest 2 with a member in guest 1."""
    tool = "mckey -m 239.1.2.3 -C 10"
    yield Case("mckey to an IPv4 group", f"{tool} -b {{a1}}", JOINED, f"{tool} -b {{a2}} -s", "test complete")


def perftest():
    """Yields {send, write, read, atomic} x {bw, lat} x {RC, UC, UD} x {plain, ibv_post_send() instead of ibv_wr_*(),
    -R, -e, --use-srq, -g}, as far as perftest has them."""
    services = {"send": ("RC", "UC", "UD"), "write": ("RC", "UC"), "read": ("RC",), "atomic": ("RC",)}
    for operation, kinds in services.items():
        for measure in ("bw", "lat"):
            for kind in kinds:
                for option in ("", "--use_old_post_send", "-R", "-e", "--use-srq", "-g"):
                    if skipped(operation, measure, kind, option):
                        continue
                    connection = f" -c {kind}" if operation != "atomic" else ""
                    tool = f"ib_{operation}_{measure}{connection} -F -n 100 {option}".rstrip()
                    # A group's GID counts as one of IPv6, and perftest wants both ends' to be of a kind.
                    gid = "i" if option == "-g" else "g"
                    yield Case(tool.replace(" -F -n 100", ""), f"{tool} -d {{d1}} -x {{{gid}1}}",
                               CM if option == "-R" else TCP.format(18515),
                               f"{tool} -d {{d2}} -x {{{gid}2}} {{t1}}", "#bytes")


def path_mtus():
    """Yields {send, write, read}_bw over IPv4 and IPv6 with each path MTU, of messages with a last packet that is not
    full."""
    for operation in ("send", "write", "read"):
        for mtu in (256, 512, 1024, 2048, 4096):
            for label, gid in (("", "g"), (" over IPv6", "i")):
                tool = f"ib_{operation}_bw -F -n 100 -s 65521 -m {mtu}"
                yield Case(f"ib_{operation}_bw with path MTU {mtu}{label}", f"{tool} -d {{d1}} -x {{{gid}1}}",
                           TCP.format(18515), f"{tool} -d {{d2}} -x {{{gid}2}} {{t1}}", "#bytes")



def skipped(operation, measure, kind, option):
    """Returns whether perftest does not have a test."""
    return (option == "-g" and kind != "UD"  # multicast is for datagrams
            or option == "-e" and operation == "write"  # a WRITE has no event to wait for
            or option == "--use-srq" and (operation != "send" or kind == "UC")  # nothing else receives from one
            or option == "-R" and kind == "UC")  # the RDMA CM connects RC and UD


def everything():
    """Yields all of the above, in the order in which they run."""
    yield from pingpongs()
    for family in USUAL:
        yield from connection_managers(family)
    yield from servers()
    yield from multicast()
    yield from examples()
    yield from qperf()
    yield from perftest()
