# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite tools: what others wrote to try RDMA, between two guests: the tools
of ibverbs-utils and rdmacm-utils, and perftest's matrix. Runs inside the build
root.

Arguments: as for guest_suite.py.
"""

import dataclasses
import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vm"))
import guests  # noqa: E402  pylint: disable=wrong-import-position
import guest_suite  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position

# The bound on a tool that hangs; none of them takes a tenth of it.
HANG_SECONDS = 120

# How guest 1 knows that its side waits for guest 2's.
CM = "rdma resource show cm_id | grep -q 'state LISTEN'"
TCP = "grep -Eqi ':{:04X} [^ ]* 0A ' /proc/net/tcp /proc/net/tcp6"
JOINED = "rdma resource show qp -dd | grep -q 'drv_mcast_groups 1'"


@dataclasses.dataclass
class Case:
    """One tool: what guest 1 runs, what tells that it is ready, and what guest
    2 runs. Both must end with status 0. {d1} {g1} {a1} are device, GID index
    and address of guest 1; {d2} {g2} {a2} those of guest 2. expect: what guest
    2's output must hold."""

    name: str
    server: str
    ready: str
    client: str
    expect: str = ""


def pingpongs():
    """ibverbs-utils; -c checks the data."""
    port = TCP.format(18515)
    for kind, options in (("rc", "-c"), ("uc", "-c"), ("ud", "-c")):
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


def multicast(label, group):
    """A sender in guest 2, a member in guest 1."""
    yield Case(f"mckey {label}", f"mckey -m {group} -b {{a1}} -C 10", JOINED,
               f"mckey -m {group} -b {{a2}} -s -C 10", "test complete")


def perftest():
    """{send, write, read, atomic} x {bw, lat} x {RC, UC, UD} x {plain, -R, -e, -g},
    as far as perftest has them."""
    services = {"send": ("RC", "UC", "UD"), "write": ("RC", "UC"), "read": ("RC",), "atomic": ("RC",)}
    for operation, kinds in services.items():
        for measure in ("bw", "lat"):
            for kind in kinds:
                for option in ("", "-R", "-e", "-g"):
                    if skipped(operation, measure, kind, option):
                        continue
                    connection = f" -c {kind}" if operation != "atomic" else ""
                    tool = f"ib_{operation}_{measure}{connection} -F -n 100 {option}".rstrip()
                    yield Case(tool.replace(" -F -n 100", ""), f"{tool} -d {{d1}} -x {{g1}}",
                               CM if option == "-R" else TCP.format(18515),
                               f"{tool} -d {{d2}} -x {{g2}} {{t1}}", "#bytes")


def skipped(operation, measure, kind, option):
    """What perftest does not have."""
    return (option == "-g" and kind != "UD"  # multicast is for datagrams
            # events are of CQs that receive or complete one by one
            or option == "-e" and operation == "write" and measure == "lat"
            or option == "-R" and kind == "UC")  # the RDMA CM connects RC and UD


class Tools(guest_suite.Suite):
    """The cases, one after the other, in two guests."""

    def prepare(self):
        """Addresses of IPv6 beside those of IPv4."""
        for guest in self.network.guests:
            guest.check(f"ip -6 addr add fd00::{guest.number}/64 dev eth0 nodad")

    def gids(self, pattern):
        """Waits until each guest's port has the GIDs of an address."""
        for guest in self.network.guests:
            wanted = pattern.format(guest.number)
            guest.check(f"until grep -qx {wanted} /sys/class/infiniband/{guest.link[0]}/ports/1/gids/*; "
                        "do sleep 0.05; done", timeout=HANG_SECONDS)

    def case(self, case, addresses):
        """Runs one; guest 1's side is waited for, and ended if guest 2's failed."""
        first, second = self.network.guests
        (d1, g1), (d2, g2) = first.link, second.link
        names = {"d1": d1, "g1": g1, "d2": d2, "g2": g2, "t1": first.address,
                 "a1": addresses[0], "a2": addresses[1]}
        server = first.start(case.server.format(**names))
        job, text = None, ""
        try:
            first.check(f"until {case.ready}; do sleep 0.05; done", timeout=HANG_SECONDS)
            job = second.start(case.client.format(**names))
            status = job.wait(HANG_SECONDS)
            text = job.text
            passed = status == 0 and case.expect in text and server.wait(HANG_SECONDS) == 0
        except guests.Failure as failure:
            self.report.note(str(failure))
            passed = False
        if not passed:
            self.report.note(f"guest 1: {case.server.format(**names)}\n{server.text}")
            self.report.note(f"guest 2: {case.client.format(**names)}\n{text}")
            for running in (server, job):
                if running and running.status is None:
                    running.kill(signal.SIGKILL)
                    running.done.wait(HANG_SECONDS)
        self.report.result(case.name, passed)

    def cases(self, cases, addresses=("10.0.0.1", "10.0.0.2")):
        for case in cases:
            self.case(case, addresses)

    def everything(self):
        self.prepare()
        self.gids("fd00:0000:0000:0000:0000:0000:0000:000{}")
        self.cases(pingpongs())
        self.cases(connection_managers("over IPv4"))
        self.cases(connection_managers("over IPv6"), ("fd00::1", "fd00::2"))
        for case in connection_managers("over a VLAN"):
            self.report.result(case.name, skip="no completion tells the VLAN, and the RDMA CM drops the request")
        self.cases(multicast("to an IPv4 group", "239.1.2.3"))
        self.cases(multicast("to an IPv6 group", "ff0e::1234"), ("fd00::1", "fd00::2"))
        self.cases(perftest())
        self.nothing_left()

    def nothing_left(self):
        """No object of a tool has outlived it."""
        for guest in self.network.guests:
            text = guest.check("rdma resource show qp; rdma resource show cm_id; rdma resource show mr")
            left = [line for line in text.splitlines() if " pid " in line]
            for line in left:
                self.report.note(line)
            self.report.result(f"guest {guest.number}: nothing is left", not left)


def main(arguments):
    vmm, kernel, kernel_dir, image, share = arguments
    signal.signal(signal.SIGTERM, guest_suite.interrupt)
    suite = Tools(guests.Options(vmm=vmm, kernel=kernel, kernel_dir=kernel_dir, image=image, share=share,
                                 rdma="virtio", memory=1024), ktap.Report())
    try:
        suite.part("two guests", 2, suite.everything)
    except KeyboardInterrupt:
        return 130
    return suite.report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
