# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite ulp: kernel consumers between two guests: NVMe over Fabrics, iSER, SRP, RNBD, NFS, SMB Direct, 9P,
SMC-R and RDS."""

import pytest

from virtio_rdma.tests import networks
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.ulp import SideBySide, Ulp, is_known, load_driver

DATAGRAMS = {("uml", "plain"): 2000, ("qemu", "plain"): 200, ("qemu", "debug"): 100}
# Memory of a guest that keeps a file of 1 GiB in half of it, in MiB.
LARGE_MEMORY = 2560


@pytest.fixture(scope="class")
def title(platform):
    return platform.vmm


@pytest.mark.network("", guests=2, known=is_known)
class TestConsumers:
    """Each consumer's steps, one after the other."""

    def test_nvme(self, network, title, results):
        ulp = Ulp(results, network.guests, "nvme", f"{title}: ")
        ulp.run(ulp.blocks, ulp.reconnects, ulp.loses_target, ulp.gives_up, ulp.ends)

    @pytest.mark.parametrize("kind", ["iser", "srp", "rnbd"])
    def test_disk(self, kind, network, title, results):
        ulp = Ulp(results, network.guests, kind, f"{title}: ")
        ulp.run(ulp.blocks, ulp.reconnects, ulp.ends)

    def test_nfs(self, network, title, results):
        ulp = Ulp(results, network.guests, "nfs", f"{title}: ")
        ulp.run(ulp.files, ulp.reconnects, ulp.ends)

    @pytest.mark.parametrize("session", ["guest", "user", "signed"])
    def test_smb(self, session, network, title, results):
        """SMB Direct, by a guest's session, a user's, and one whose messages are signed."""
        ulp = Ulp(results, network.guests, "smb", f"{title}: {session}: ")
        ulp.env["SMB_SESSION"] = session
        ulp.run(ulp.files, ulp.reconnects, ulp.serves_again, ulp.ends)

    def test_9p(self, network, title, results):
        ulp = Ulp(results, network.guests, "9p", f"{title}: ")
        ulp.run(ulp.files, ulp.reconnects, ulp.serves_again, ulp.ends)

    def test_smc(self, network, title, results):
        """SMC-R version 2: connections of TCP whose bytes RDMA carries, and not one of them TCP."""
        ulp = Ulp(results, network.guests, "smc", f"{title}: ")
        ulp.run(ulp.streams)

    # A consumer that waits for the end of every connection when it is taken down is last.
    @pytest.mark.parametrize("kinds", [("nvme", "smb"), ("iser", "nfs", "9p")], ids=" beside ".join)
    def test_side_by_side(self, kinds, network, title, results):
        SideBySide(results, network.guests, kinds, f"{title}: ").run()

    def test_rds(self, network, platform, title, results):
        """Reliable Datagram Sockets, there and back.

        rds_rdma stays loaded. Linux 7.2.12 warns when it is unloaded after traffic, over any RDMA device, rxe too
        (rds_ib_recv_exit(), and kmem_cache_destroy() of caches that are in use): rds_ib_unregister_client() flushes
        rds_wq, while connections shut down on work queues of their own (cp_wq), so that rds_ib_destroy_nodev_conns()
        does not find them.
        """
        first, second = network.guests
        for guest in network.guests:
            if guest.run("modprobe -a rds rds_rdma")[0]:
                results.result(f"{title}: rds", skip="the kernel has no RDS")
                return
        server = first.start(f"exec /mnt/virtio_rdma/rds.py serve {first.address}")
        server.shows("listening", HANG_SECONDS)
        count = DATAGRAMS[platform.vmm, platform.kernel]
        status, text = second.run(
            f"timeout {HANG_SECONDS} /mnt/virtio_rdma/rds.py ask {second.address} {first.address} {count}")
        passed = status == 0 and server.wait(HANG_SECONDS) == 0
        if not passed:
            results.note(text + server.text)
        results.result(f"{title}: rds: datagrams", passed)

    def test_objects(self, network, results):
        networks.agree(results, network)


@pytest.mark.network("large files", guests=2, known=is_known, others={1: {"memory": LARGE_MEMORY}})
@pytest.mark.only(lambda where: where.platform.vmm == "uml")
class TestLargeFiles:
    """A file of 1 GiB, which the server keeps in its memory."""

    @pytest.mark.parametrize("kind", ["nfs", "smb", "9p"])
    def test_file(self, kind, network, title, results):
        ulp = Ulp(results, network.guests, kind, f"{title}: ")
        ulp.run(ulp.large, ulp.ends)


@pytest.mark.network("a device that fails", guests=2, known=is_known,
                     breaks={"device": "it is reset beneath its driver"})
@pytest.mark.only(lambda where: where.platform.vmm == "qemu")
class TestRecovery:
    """The consumers that go on by themselves when the host's device has failed and the driver has taken it into service
    again. SRP removes its disks when an RDMA device goes, and NFS fails operations while there is no RDMA device."""

    @pytest.fixture(scope="class", autouse=True)
    def impatient(self, network):
        """The drivers give a command five seconds."""
        for guest in network.guests:
            load_driver(guest, "command_timeout=5")

    @pytest.mark.parametrize("kind", ["nvme", "iser"])
    def test_recovers(self, kind, network, results):
        ulp = Ulp(results, network.guests, kind, "a device that fails: ")
        ulp.run(ulp.loses_device, ulp.ends)

    def test_unloads(self, network, results):
        """nvmet lets go of a device that has failed when its keep-alive timer expires."""
        ulp = Ulp(results, network.guests, "nvme", "a driver that waits: ")
        ulp.run(ulp.unloads, ulp.ends)

    def test_objects(self, network, results):
        networks.agree(results, network)
