# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite ulp-faults: kernel consumers between two guests, while what is below them fails and comes back.

What a consumer has synced before a fault is there after it, and nothing hangs.
"""

import pytest

from virtio_rdma.common import Failure
from virtio_rdma.guests.supervised import Supervised
from virtio_rdma.tests import networks
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.ulp import Ulp, is_known

# How often a fault comes under one load.
ROUNDS = {("uml", "plain"): 5, ("qemu", "plain"): 3, ("qemu", "debug"): 2}
# The consumers that connect again by themselves when their device has failed. SRP's removes its disks. NFS's keeps the
# old device busy, so that the driver cannot register the new one.
CONNECT_AGAIN = ("nvme", "iser")


class Faulty(Ulp):
    """The steps of one consumer, while faults come. `network` has the guests."""

    def __init__(self, results, network, kind, prefix=""):
        super().__init__(results, network.guests, kind, prefix)
        self.network = network
        options = self.host.options
        self.rounds = ROUNDS[options.vmm, options.kernel]

    def begins(self):
        """The target, and a file system with files whose checksums are known."""
        self.do(self.target, "target_up")
        if self.kind == "srp":
            self.env["GUID"] = self.step(self.target, "guid")[1].strip()
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "write_tree", name="files_written")

    @property
    def load(self):
        """The step that loads the file system."""
        return "load_files" if self.kind == "nfs" else "load_fs"

    def survives(self, name, fault):
        """A fault comes some times under load: no byte is lost, and the load goes on."""
        job = self.loaded(self.load)
        for _ in range(self.rounds):
            fault()
            # Two more begin after each fault.
            times = job.text.count("running") + 2
            if not job.shows("running", HANG_SECONDS, times):
                break
        self.do(self.host, "touch", "/tmp/ulp/stop", name=f"{name}: load_told_to_end")
        passed = job.wait(HANG_SECONDS) == 0
        if not passed:
            self.results.note(job.text)
        self.result(f"{name}: load_unharmed", passed)
        self.do(self.host, "read_tree", name=f"{name}: files_read")

    def is_upgraded(self):
        """The device's process is restarted, and nobody notices."""
        errors = [self.reports(guest) for guest in (self.target, self.host)]
        self.survives("upgrade", self.network.restart)
        self.result("upgrade: nobody notices", errors == [self.reports(guest) for guest in (self.target, self.host)])

    @staticmethod
    def reports(guest):
        """Returns how often the kernel has said that a device failed or a connection was made again."""
        return guest.run("dmesg | grep -ciE 'has failed|reconnect|timeout|error recovery'")[1].strip()

    def is_killed(self):
        """The device's process is killed. The consumer connects again by itself; the target, whose device went as well,
        is made to listen again."""
        self.survives("kill", self.kill)

    def kill(self):
        """Kills the device's process, and has the target listen again."""
        self.network.crash()
        try:
            self.network.wait_recovered()
        except Failure:
            # What holds the old device.
            for guest in (self.target, self.host):
                self.results.note(guest.run("echo w >/proc/sysrq-trigger; dmesg | tail -n 80")[1])
            raise
        self.do(self.target, "target_gone", name="kill: target_stops")
        self.do(self.target, "target_back", name="kill: target_listens_again")

    def finishes(self):
        """Everything is taken down."""
        if self.kind != "nfs":
            self.do(self.host, "check_fs", name="ext4_consistent")
        self.do(self.host, "disconnect")
        self.do(self.target, "target_down")
        self.do(self.host, "store_down", name="place_gone")


@pytest.fixture(scope="class", name="title")
def title_of(platform):
    """What stands in front of the names of results."""
    return platform.vmm


@pytest.mark.network("", guests=2, kind=Supervised, known=is_known)
class TestFaults:
    """Each consumer, and each fault."""

    @pytest.mark.parametrize("kind", ["nvme", "iser", "srp", "nfs"])
    def test_consumer(self, kind, network, title, results):
        ulp = Faulty(results, network, kind, f"{title}: ")
        faults = [ulp.is_upgraded] + [ulp.is_killed] * (kind in CONNECT_AGAIN)
        ulp.run(ulp.begins, *faults, ulp.finishes)

    def test_objects(self, network, results):
        networks.agree(results, network)
