# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite arm64: guests of arm64 with Debian's own kernels, whose pages have 4 KiB and
16 KiB: the selftests that check data, what others wrote to try RDMA, and NVMe over
Fabrics; then one guest of x86-64 and one of arm64, which one device serves. Runs inside
the root stock-arm64.

Arguments: the directory with the selftests and the kernel's helpers; image and build
directory of the kernel of x86-64; the image for arm64; the build directories of its
kernels with pages of 4 KiB and of 16 KiB.
"""

import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vm"))
import guest_suite  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position
import tools_suite  # noqa: E402  pylint: disable=wrong-import-position
import ulp_suite  # noqa: E402  pylint: disable=wrong-import-position

HANG_SECONDS = guest_suite.HANG_SECONDS
# What one guest runs by itself, in loopback.
ALONE = ("verbs/rc_data.py", "verbs/rc_rings.py", "verbs/rc_srq.py", "verbs/uc.py", "verbs/mw.py",
         "verbs/rings_abi.py", "verbs/bad_arguments.py", "module.sh")
# What two guests run together; it checks each byte.
BETWEEN = ("verbs/rc_hosts.py",)
TOOLS = ("ibv_rc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong", "rping over IPv4", "ucmatose over IPv4",
         "rdma_server and rdma_client", "rcopy", "ib_send_bw -c RC", "ib_write_bw -c RC", "ib_write_lat -c RC -R",
         "ib_read_bw -c RC", "ib_read_lat -c RC", "ib_atomic_lat", "ib_send_lat -c UD")


class Named:
    """A report whose results begin with the same words."""

    def __init__(self, report, prefix):
        self.report = report
        self.prefix = prefix

    @property
    def failed(self):
        return self.report.failed

    def result(self, name, passed=True, skip=None):
        return self.report.result(self.prefix + name, passed, skip)

    def note(self, text):
        self.report.note(text)


class Arm64(ulp_suite.Ulp, tools_suite.Tools):
    """What guests of one kernel do."""

    ipv6 = (0, 0)  # no tool here asks for it

    def __init__(self, options, report, prefix, page_size=None):
        super().__init__(options, Named(report, prefix), "")
        self.page_size = page_size

    def looks_active(self):
        """The pages of the kernel, and what ibv_devinfo says."""
        for guest in self.network.guests:
            name = f"guest {guest.number}: "
            if self.page_size:
                size = int(guest.check("getconf PAGESIZE"))
                self.report.result(f"{name}aarch64, pages of {self.page_size}",
                                   guest.check("uname -m").strip() == "aarch64" and size == self.page_size)
            status, text = guest.run(f"ibv_devinfo -d {guest.link[0]}", timeout=HANG_SECONDS)
            passed = status == 0 and "PORT_ACTIVE" in text
            if not passed:
                self.report.note(text)
            self.report.result(f"{name}ibv_devinfo: PORT_ACTIVE", passed)

    def selftests(self):
        guest = self.network.guests[0]
        for path in ALONE:
            self.finish(*self.program(path, guest, {"PEERS": ""}, ""))

    def between(self):
        for path in BETWEEN:
            both = [self.program(path, guest, {}, f"guest {guest.number} of 2: ") for guest in self.network.guests]
            for job, relay in both:
                self.finish(job, relay)

    def tools(self):
        cases = {case.name: case for kind in (
            tools_suite.pingpongs(), tools_suite.connection_managers("over IPv4"), tools_suite.servers(),
            tools_suite.perftest()) for case in kind}
        self.cases(cases[name] for name in TOOLS)

    def nvme(self):
        """A disk of guest 1 in guest 2: its blocks and a file system, written and read back."""
        self.consumer("nvme", self.blocks, self.ends)

    def unloads(self):
        for guest in self.network.guests:
            status, text = guest.run("rmmod virtio_rdma && ! grep -qs . /sys/class/infiniband/*/node_type",
                                     timeout=HANG_SECONDS)
            if status:
                self.report.note(text)
            self.report.result(f"guest {guest.number}: rmmod", status == 0)


def main(arguments):
    share, x86_image, x86_kernel, image, *kernels = arguments
    signal.signal(signal.SIGTERM, guest_suite.interrupt)
    report = ktap.Report()
    try:
        for size, kernel in zip((4096, 16384), kernels):
            options = guest_suite.options("qemu", "stock", kernel, image, share)
            suite = Arm64(options, report, f"{size >> 10}k: ", size)
            suite.part("one guest", 1, suite.looks_active, suite.selftests, suite.agrees, suite.unloads)
            suite.part("two guests", 2, suite.looks_active, suite.between, suite.tools, suite.nvme, suite.agrees,
                       suite.unloads)
        # The kernel whose pages have another size than those of x86-64.
        options = guest_suite.options("qemu", "stock", x86_kernel, x86_image, share)
        options.others = {2: {"image": image, "kernel_dir": kernels[-1]}}
        suite = Arm64(options, report, "x86-64 and arm64: ")
        suite.part("two guests", 2, suite.looks_active, suite.between, suite.tools, suite.nvme, suite.agrees,
                   suite.unloads)
    except KeyboardInterrupt:
        return 130
    return report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
