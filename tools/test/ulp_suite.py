# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite ulp: kernel consumers between two guests, target in guest 1 and
host in guest 2: NVMe over Fabrics, iSER, SRP, RNBD, NFS and RDS. Runs inside the
build root.

Arguments: the guest image, the directory with the selftests and the kernel's
helpers, then for each pair of guests vmm, kernel (plain or debug) and its build
directory.
"""

import os
import re
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vm"))
import guests  # noqa: E402  pylint: disable=wrong-import-position
import guest_suite  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position

HANG_SECONDS = guest_suite.HANG_SECONDS
RECONNECTS = {("uml", "plain"): 20, ("qemu", "plain"): 5, ("qemu", "debug"): 2}
DATAGRAMS = {("uml", "plain"): 2000, ("qemu", "plain"): 200, ("qemu", "debug"): 100}

# isert_create_send_desc() of Linux 7.2.12 syncs a header that isert_init_tx_hdrs() has yet to map; DMA-API debugging
# says so, once.
UNMAPPED = re.compile(r"tries to sync DMA memory it has not allocated \[device address=0x0+\] \[size=76 bytes\]|"
                      r"WARNING: kernel/dma/debug\.c:\d+ at check_sync\+")
# rds_ib_laddr_check_cm() of Linux 7.2.12 makes a cm_id to bind it, and destroys it in the handler of another: two
# handler_mutex of one lock class, which lockdep takes for one.
RECURSION = "WARNING: possible recursive locking detected"
RECURSES = "rds_ib_laddr_check+"


class Stop(Exception):
    """A step failed, without which those behind it say nothing."""


class Ulp(guest_suite.Suite):
    """Each consumer's steps, one after the other, in two guests; every result's name begins with `prefix`."""

    def __init__(self, options, report, prefix):
        super().__init__(options, report)
        self.prefix = prefix
        self.kind = self.env = self.job = None
        self.target = self.host = None

    def is_known(self, guest, line):
        if RECURSION in line:
            return any(RECURSES in after for after in guest.log_after(line, guest_suite.REPORT_LINES))
        return bool(UNMAPPED.search(line))

    def result(self, name, passed=True, skip=None):
        """As Report.result(), with the name of what is under test."""
        return self.report.result(f"{self.prefix}{self.kind}: {name}" if name else self.prefix + self.kind,
                                  passed, skip)

    def begin(self, kind):
        """What follows is of this consumer. Whether both guests have it."""
        self.kind = kind
        self.target, self.host = self.network.guests
        self.env = {"ADDRESS": self.target.address, "CLIENT": self.host.address}
        for guest in self.network.guests:
            status, text = self.step(guest, "missing")
            if status or text.strip():
                self.result("", skip=text.strip().replace("\n", ", "))
                return False
        return True

    def command(self, *words):
        return f"cd /mnt/virtio_rdma && exec ./ulp.sh {self.kind} {' '.join(words)}"

    def step(self, guest, *words):
        """One step in a guest: status and output."""
        return self.start(guest, *words).wait(HANG_SECONDS), self.job.text

    def start(self, guest, *words):
        self.job = guest.start(self.command(*words), self.env)
        return self.job

    def do(self, guest, *words, name=None):
        """A step that must succeed, or nothing that follows makes sense."""
        status, text = self.step(guest, *words)
        if status:
            self.report.note(text)
            self.report.note(guest.run("dmesg | tail -n 40")[1])
        self.result(name or words[0], status == 0)
        if status:
            raise Stop

    def consumer(self, kind, *parts):
        """All that is done with one kind; what a failure leaves behind is not looked at."""
        if not self.begin(kind):
            return
        try:
            for part in parts:
                part()
            self.nothing_left()
        except Stop:
            self.report.note(f"{kind}: the rest was left out")

    def blocks(self):
        """A remote disk: blocks, a file system, and the same after it was connected anew."""
        self.do(self.target, "target_up")
        if self.kind == "srp":
            self.env["GUID"] = self.step(self.target, "guid")[1].strip()
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "raw", name="raw_blocks")
        self.do(self.host, "verify", name="fio_verify")
        self.do(self.host, "write_tree", name="ext4_written")
        self.do(self.host, "read_tree", name="ext4_read")
        self.do(self.host, "disconnect")

    def files(self):
        """A remote file system: files, and the same after it was mounted anew."""
        self.do(self.target, "target_up")
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "write_tree", name="files_written")
        self.do(self.target, "stored")
        self.do(self.host, "read_tree", name="files_read")
        self.do(self.host, "verify_files", name="fio_verify")
        self.do(self.host, "disconnect")

    def reconnects(self):
        """The same bytes each time; nothing of a connection outlives it."""
        for _ in range(RECONNECTS[self.options.vmm, self.options.kernel]):
            for word in ("connect", "read_tree", "disconnect"):
                status, text = self.step(self.host, word)
                if status:
                    self.report.note(f"{word}: {text}")
                    self.report.note(self.host.run("dmesg | tail -n 40")[1])
                    self.result("reconnects", False)
                    raise Stop
        self.result("reconnects")

    def loaded(self, *words):
        """A load that runs until it is told to end."""
        job = self.start(self.host, *words)
        job.shows("running", HANG_SECONDS)
        return job

    def loses_target(self):
        """Under load the target goes away and comes back, and no byte is lost."""
        self.do(self.host, "connect")
        job = self.loaded("load_fs")
        for _ in range(3):
            self.do(self.target, "target_gone")
            self.do(self.host, "wait_for", "is_away", name="host_notices")
            self.do(self.target, "target_back")
            self.do(self.host, "wait_for", "is_live", name="host_reconnects")
        self.do(self.host, "touch", "/tmp/ulp/stop", name="load_told_to_end")
        passed = job.wait(HANG_SECONDS) == 0
        if not passed:
            self.report.note(job.text)
        self.result("load_unharmed", passed)
        self.do(self.host, "check_fs", name="ext4_consistent")
        self.do(self.host, "read_tree", name="ext4_read_again")

    def gives_up(self):
        """The host lets go of a target that is away: its disk is gone, and what used that fails."""
        job = self.loaded("load")
        self.do(self.target, "target_gone", name="target_gone_for_long")
        self.do(self.host, "wait_for", "is_away", name="host_notices_again")
        self.do(self.host, "disconnect", name="host_gives_up")
        self.result("load_fails", job.wait(HANG_SECONDS) != 0)
        self.do(self.target, "target_back", name="target_back_at_last")
        self.do(self.host, "connect", name="connect_again")
        self.do(self.host, "verify", name="fio_verify_again")
        self.do(self.host, "disconnect", name="disconnect_again")

    def ends(self):
        self.do(self.target, "target_down")
        self.do(self.host, "store_down", name="place_gone")

    def nothing_left(self):
        for guest in self.network.guests:
            self.do(guest, "wait_for", "no_connections", name=f"nothing_left_in_guest_{guest.number}")

    def datagrams(self):
        """Reliable Datagram Sockets, there and back.

        rds_rdma stays loaded. Linux 7.2.12 warns when it is unloaded after traffic, over any RDMA device, rxe too
        (rds_ib_recv_exit(), and kmem_cache_destroy() of caches that are in use): rds_ib_unregister_client() flushes
        rds_wq, while connections shut down on work queues of their own (cp_wq), so that rds_ib_destroy_nodev_conns()
        does not find them.
        """
        self.kind = "rds"
        first, second = self.network.guests
        for guest in self.network.guests:
            if guest.run("modprobe -a rds rds_rdma")[0]:
                self.result("", skip="the kernel has no RDS")
                return
        server = first.start(f"exec /mnt/virtio_rdma/rds.py serve {first.address}")
        server.shows("listening", HANG_SECONDS)
        count = DATAGRAMS[self.options.vmm, self.options.kernel]
        status, text = second.run(
            f"timeout {HANG_SECONDS} /mnt/virtio_rdma/rds.py ask {second.address} {first.address} {count}")
        passed = status == 0 and server.wait(HANG_SECONDS) == 0
        if not passed:
            self.report.note(text + server.text)
        self.result("datagrams", passed)

    def everything(self):
        self.consumer("nvme", self.blocks, self.reconnects, self.loses_target, self.gives_up, self.ends)
        self.consumer("iser", self.blocks, self.reconnects, self.ends)
        self.consumer("srp", self.blocks, self.reconnects, self.ends)
        self.consumer("rnbd", self.blocks, self.reconnects, self.ends)
        self.consumer("nfs", self.files, self.reconnects, self.ends)
        self.datagrams()


def main(arguments):
    image, share, *pairs = arguments
    signal.signal(signal.SIGTERM, guest_suite.interrupt)
    report = ktap.Report()
    try:
        for vmm, kernel, kernel_dir in zip(*[iter(pairs)] * 3):
            suite = Ulp(guest_suite.options(vmm, kernel, kernel_dir, image, share), report, vmm + ": ")
            suite.part(vmm, 2, suite.everything, suite.agrees)
    except KeyboardInterrupt:
        return 130
    return report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
