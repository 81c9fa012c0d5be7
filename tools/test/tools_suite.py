# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite tools: what others wrote to try RDMA, between two guests: the tools
of ibverbs-utils and rdmacm-utils, and perftest's matrix. Runs inside the build
root.

Arguments: as for guest_suite.py.
"""

import dataclasses
import os
import re
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vm"))
import guests  # noqa: E402  pylint: disable=wrong-import-position
import guest_suite  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position

# The bound on a tool that hangs; none of them takes a tenth of it.
HANG_SECONDS = guest_suite.HANG_SECONDS

# Of the RDMA CM in a row, more than there are QPs at a time; an emulated debug kernel makes some a second.
CONNECTIONS = {"plain": "10000", "debug": "1000"}

# How guest 1 knows that its side waits for guest 2's.
CM = "rdma resource show cm_id | grep -q 'state LISTEN'"
TCP = "grep -Eqi ':{:04X} [^ ]* 0A ' /proc/net/tcp /proc/net/tcp6"
# The kernel shows a listener a moment before it listens. The words are of rping, of perftest, which has two ways to
# say it, and of udaddy.
NOT_YET = re.compile(r"REJECTED\W+error\W+8\b|Unexpected CM event bl blka 8\b|UNREACHABLE, error: 1\b")
ATTEMPTS = 5
# The addresses of the guests in a VLAN.
VLAN = "10.5.0.{}"
JOINED = "rdma resource show qp -dd | grep -q 'drv_mcast_groups 1'"


@dataclasses.dataclass
class Case:
    """One tool: what guest 1 runs, what tells that it is ready, and what guest
    2 runs. Both must end with status 0. {d1} {g1} {a1} are device, GID index
    and address of guest 1, {i1} the index of a GID that is an IPv6 address; {d2}
    {g2} {a2} {i2} those of guest 2. expect: what guest
    2's output must hold. same: a command that must print the same in both. stays:
    guest 1's side serves until it is told to end."""

    name: str
    server: str
    ready: str
    client: str
    expect: str = ""
    same: str = ""
    stays: bool = False


def pingpongs():
    """ibverbs-utils; -c checks the data."""
    port = TCP.format(18515)
    for kind, options in (("rc", "-c"), ("uc", "-c"), ("ud", "-c"), ("srq", "-c")):
        for label, more in (("", ""), (" with events", " -e")):
            tool = f"ibv_{kind}_pingpong {options} -n 500{more}"
            yield Case(f"ibv_{kind}_pingpong{label}", f"{tool} -d {{d1}} -g {{g1}}", port,
                       f"{tool} -d {{d2}} -g {{g2}} {{t1}}", "bytes in")


def connection_managers(label):
    """rdmacm-utils over the addresses of one network."""
    yield Case(f"rping {label}", "rping -s -V -C 50 -S 4096 -a {a1}", CM,
               "rping -c -V -C 50 -S 4096 -a {a1}")
    yield Case(f"ucmatose {label}", "ucmatose -b {a1} -c 20 -C 20 -S 1000", CM,
               "ucmatose -s {a1} -c 20 -C 20 -S 1000", "test complete")
    yield Case(f"udaddy {label}", "udaddy -b {a1} -c 5 -C 10 -S 1000", CM,
               "udaddy -s {a1} -c 5 -C 10 -S 1000", "test complete")
    if "IPv6" not in label:  # cmtime looks up IPv4 addresses only
        yield Case(f"cmtime {label}", "cmtime -b {a1} -c 100", CM, "cmtime -s {a1} -c 100")
    # It compares byte by byte, which takes longer than all else where sizes are large.
    for size, count in ((64, 100), (65536, 20)):
        tool = f"-T v -S {size} -C {count} -I 10"
        yield Case(f"rstream {label}, {size} bytes", f"rstream -b {{a1}} {tool}", CM,
                   f"rstream -s {{a1}} {tool}", "custom")
        yield Case(f"riostream {label}, {size} bytes", f"riostream -b {{a1}} {tool}", CM,
                   f"riostream -s {{a1}} {tool}", "custom")


def servers():
    """rdmacm-utils whose server listens on every address."""
    yield Case("rdma_server and rdma_client", "rdma_server -s {a1}", CM, "rdma_client -s {a1}", "end 0")
    yield Case("rcopy", "rcopy", CM, "head -c 3000001 /dev/urandom >/tmp/rcopy && rcopy /tmp/rcopy {a1}:/tmp/rcopy",
               same="sha256sum </tmp/rcopy", stays=True)


def examples():
    """The programs that every course starts with, from the selftests."""
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
    """One second each; the server serves until it is told to end."""
    for test in QPERF:
        yield Case(f"qperf {test}", f"qperf --listen_port {QPERF_PORT}", TCP.format(QPERF_PORT),
                   f"qperf --listen_port {QPERF_PORT} -t 1 -cm 1 {{t1}} {test}", " =  ", stays=True)


def multicast(label, group):
    """A sender in guest 2, a member in guest 1. To IPv4 groups alone: the kernel
    joins no IPv6 group on a port of RoCE v2 (cma_iboe_join_multicast(), ENOTSUPP)."""
    yield Case(f"mckey {label}", f"mckey -m {group} -b {{a1}} -C 10", JOINED,
               f"mckey -m {group} -b {{a2}} -s -C 10", "test complete")


def perftest():
    """{send, write, read, atomic} x {bw, lat} x {RC, UC, UD} x {plain, ibv_post_send()
    instead of ibv_wr_*(), -R, -e, --use-srq, -g}, as far as perftest has them."""
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


def skipped(operation, measure, kind, option):
    """What perftest does not have."""
    return (option == "-g" and kind != "UD"  # multicast is for datagrams
            or option == "-e" and operation == "write"  # nobody waits for a WRITE's event
            or option == "--use-srq" and (operation != "send" or kind == "UC")  # nothing else receives from one
            or option == "-R" and kind == "UC")  # the RDMA CM connects RC and UD


class Tools(guest_suite.Suite):
    """The cases, one after the other, in two guests."""

    ipv6 = ()  # each guest's index of the GID that prepare() gave it

    def prepare(self):
        """Addresses of IPv6 beside those of IPv4, and a VLAN interface with addresses of its own.
        Its neighbours are written down: the NIC of user-mode Linux does not carry tags."""
        for guest in self.network.guests:
            guest.check(f"ip -6 addr add fd00::{guest.number}/64 dev eth0 nodad; "
                        f"ip link add link eth0 name vlan5 type vlan id 5 && ip link set vlan5 up && "
                        f"ip addr add {VLAN.format(guest.number)}/24 dev vlan5")
            for peer in self.network.guests:
                if peer is not guest:
                    guest.check(f"ip neigh replace {VLAN.format(peer.number)} lladdr {peer.mac} dev vlan5 "
                                "nud permanent")

    def gids(self, pattern):
        """Waits until each guest's port has the GIDs of an address; their indices."""
        return [self.gid(guest, pattern.format(guest.number)) for guest in self.network.guests]

    @staticmethod
    def gid(guest, gid):
        path = f"/sys/class/infiniband/{guest.link[0]}/ports/1/gids"
        text = guest.check(f"cd {path} && until grep -lx {gid} *; do sleep 0.05; done", timeout=HANG_SECONDS)
        return int(text.split()[0])

    def case(self, case, addresses):
        """Runs one. Who meets nobody that listens begins anew with both sides: perftest's says that it
        will listen before it does, when it is connected once already, and takes a second program for a
        part of the first."""
        (d1, g1), (d2, g2) = (guest.link for guest in self.network.guests)
        names = {"d1": d1, "g1": g1, "d2": d2, "g2": g2, "t1": self.network.guests[0].address,
                 "a1": addresses[0], "a2": addresses[1], "i1": self.ipv6[0], "i2": self.ipv6[1]}
        for _ in range(ATTEMPTS):
            passed, text = self.attempt(case, names)
            if passed or not NOT_YET.search(text):
                break
        self.report.result(case.name, passed)

    def attempt(self, case, names):
        """Runs both sides: whether they passed, and what guest 2's said. Guest 1's is waited for, and ended
        if guest 2's failed."""
        first, second = self.network.guests
        server = first.start(case.server.format(**names))
        job, passed = None, False
        try:
            first.check(f"until {case.ready}; do sleep 0.05; done", timeout=HANG_SECONDS)
            job = second.start(case.client.format(**names))
            status = job.wait(HANG_SECONDS)
            if status == 0:
                if case.stays:
                    server.kill(signal.SIGTERM)
                ended = server.wait(HANG_SECONDS) in ((0, 128 + signal.SIGTERM) if case.stays else (0,))
                passed = case.expect in job.text and ended and self.same(case.same)
        except guests.Failure as failure:
            self.report.note(str(failure))
        text = job.text if job else ""
        if not passed:
            self.report.note(f"guest 1: {case.server.format(**names)}\n{server.text}")
            self.report.note(f"guest 2: {case.client.format(**names)}\n{text}")
            for running in (server, job):
                if running and running.status is None:
                    running.kill(signal.SIGKILL)
                    running.done.wait(HANG_SECONDS)
        return passed, text

    def same(self, command):
        """Whether a command prints the same in both guests."""
        return not command or len({guest.check(command) for guest in self.network.guests}) == 1

    def cases(self, cases, addresses=("10.0.0.1", "10.0.0.2")):
        for case in cases:
            self.case(case, addresses)

    def everything(self):
        self.looks()
        self.prepare()
        self.gids("0000:0000:0000:0000:0000:ffff:0a00:000{}")
        self.gids("0000:0000:0000:0000:0000:ffff:0a05:000{}")
        self.ipv6 = self.gids("fd00:0000:0000:0000:0000:0000:0000:000{}")
        self.cases(pingpongs())
        self.cases(connection_managers("over IPv4"))
        self.cases(connection_managers("over IPv6"), ("fd00::1", "fd00::2"))
        self.cases(connection_managers("over a VLAN"), (VLAN.format(1), VLAN.format(2)))
        self.cases(servers())
        # Its address handle has no GRH, which no port of RoCE takes (ds_add_qp_dest() in rsocket.c).
        self.report.result("udpong", skip="datagrams of rsockets do not know RoCE")
        self.cases(multicast("to an IPv4 group", "239.1.2.3"))
        for case in multicast("to an IPv6 group", "ff0e::1234"):
            self.report.result(case.name, skip="the kernel joins no IPv6 group on a port of RoCE v2")
        self.cases(examples())
        if all(guest.run("command -v qperf")[0] == 0 for guest in self.network.guests):
            self.cases(qperf())
            # Without the RDMA CM it knows LIDs alone: its QPs and address handles have no GRH.
            self.report.result("qperf uc_*, ud_*", skip="qperf does not know RoCE")
        else:
            self.report.result("qperf", skip="the guests have no qperf")
        self.cases(perftest())
        self.finish(*self.program("connections.sh", self.network.guests[0],
                                  {"PEERS": "", "CONNECTIONS": CONNECTIONS[self.options.kernel]}, ""))

    def looks(self):
        """What shows a device, in each guest."""
        for guest in self.network.guests:
            device = guest.link[0]
            for command in ("ibv_devices", f"ibv_devinfo -v -d {device}", f"ibstat {device}", "rdma link show"):
                status, text = guest.run(command, timeout=HANG_SECONDS)
                passed = status == 0 and device in text
                if not passed:
                    self.report.note(text)
                self.report.result(f"guest {guest.number}: {command.split(' -')[0].split(' virtio')[0]}", passed)
            self.watches(guest)

    def watches(self, guest):
        """ibv_asyncwatch sees the port go down and come up."""
        job = guest.start(f"exec stdbuf -oL ibv_asyncwatch -d {guest.link[0]}")
        passed = job.shows("async event FD", HANG_SECONDS)
        for state, event in (("down", "IBV_EVENT_PORT_ERR"), ("up", "IBV_EVENT_PORT_ACTIVE")):
            guest.check(f"ip link set eth0 {state}")
            passed = passed and job.shows(event, HANG_SECONDS)
        job.kill(signal.SIGTERM)
        if not passed:
            self.report.note(job.text)
        self.report.result(f"guest {guest.number}: ibv_asyncwatch", passed)


def main(arguments):
    signal.signal(signal.SIGTERM, guest_suite.interrupt)
    suite = Tools(guest_suite.options(*arguments), ktap.Report())
    try:
        suite.part("two guests", 2, suite.everything, suite.agrees)
    except KeyboardInterrupt:
        return 130
    return suite.report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
