# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite arm64: guests of arm64 with Debian's own kernels, whose pages have 4 KiB and 16 KiB: the selftests that
check data, what others wrote to try RDMA, and NVMe over Fabrics; then one guest of x86-64 and one of arm64, which one
device serves. Runs inside the root stock-arm64.

The platforms are "4k", "16k" and "x86-64". The mixed pair are guests of x86-64 and 16k: pages of two sizes meet.
"""

import pytest

from virtio_rdma.tests import networks, tools, ulp
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import ALONE, Program, between

PAGE_SIZES = {"4k": 4096, "16k": 16384}
# What one guest runs by itself, in loopback.
BY_ITSELF = ("verbs/rc_data.py", "verbs/rc_rings.py", "verbs/rc_srq.py", "verbs/uc.py", "verbs/mw.py",
             "verbs/rings_abi.py", "verbs/bad_arguments.py", "module.sh")
# What two guests run together; it checks each byte.
BETWEEN = ("verbs/rc_hosts.py",)
TOOLS = ("ibv_rc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong", "rping over IPv4", "ucmatose over IPv4",
         "rdma_server and rdma_client", "rcopy", "ib_send_bw -c RC", "ib_write_bw -c RC", "ib_write_lat -c RC -R",
         "ib_read_bw -c RC", "ib_read_lat -c RC", "ib_atomic_lat", "ib_send_lat -c UD")
CASES = {case.name: case for case in tools.everything()}

of_arm64 = pytest.mark.only(lambda where: where.platform.name in PAGE_SIZES)
of_x86_64 = pytest.mark.only(lambda where: where.platform.name not in PAGE_SIZES)


@pytest.fixture(scope="class")
def prefix(platform):
    return f"{platform.name if platform.name in PAGE_SIZES else 'x86-64 and arm64'}: "


class Guests:
    """What one or two guests do."""

    @of_arm64
    def test_architecture(self, network, platform, prefix, results):
        size = PAGE_SIZES[platform.name]
        for guest in network.guests:
            found = guest.check("uname -m").strip(), int(guest.check("getconf PAGESIZE"))
            results.result(f"{prefix}guest {guest.number}: aarch64, pages of {size}", found == ("aarch64", size))

    def test_link(self, network, prefix, results):
        for guest in network.guests:
            status, text = guest.run(f"ibv_devinfo -d {guest.link[0]}", timeout=HANG_SECONDS)
            passed = status == 0 and "PORT_ACTIVE" in text
            if not passed:
                results.note(text)
            results.result(f"{prefix}guest {guest.number}: ibv_devinfo: PORT_ACTIVE", passed)


class Ends:
    """What is looked at in the end."""

    def test_objects(self, network, prefix, results):
        networks.agree(results, network, prefix)

    def test_unload(self, network, prefix, results):
        for guest in network.guests:
            status, text = guest.run("rmmod virtio_rdma && ! grep -qs . /sys/class/infiniband/*/node_type",
                                     timeout=HANG_SECONDS)
            if status:
                results.note(text)
            results.result(f"{prefix}guest {guest.number}: rmmod", status == 0)


class Two:
    """What two guests do with each other."""

    @pytest.mark.parametrize("name", BETWEEN)
    def test_program(self, name, network, platform, prefix, results):
        between(results, platform, name, network.guests, prefix)

    @pytest.mark.parametrize("case", TOOLS)
    def test_tool(self, case, network, prefix, results):
        names = tools.names_of(*network.guests)
        tools.report(results, CASES[case], network.guests, names, HANG_SECONDS, prefix)

    def test_nvme(self, network, prefix, results):
        """A disk of guest 1 in guest 2: its blocks and a file system, written and read back."""
        consumer = ulp.Ulp(results, network.guests, "nvme", prefix)
        consumer.run(consumer.blocks, consumer.ends)


class One:
    """What one guest does by itself."""

    @pytest.mark.parametrize("name", BY_ITSELF)
    def test_program(self, name, guest, platform, prefix, results):
        Program(results, platform, name, guest, ALONE, prefix).finish()


@pytest.mark.network("one guest")
@of_arm64
class TestOneGuest(Ends, One, Guests):
    """One guest of arm64."""


@pytest.mark.network("two guests", guests=2, known=ulp.is_known)
@of_arm64
class TestTwoGuests(Ends, Two, Guests):
    """Two guests of arm64."""


@pytest.mark.network("two guests", guests=2, known=ulp.is_known)
@of_x86_64
class TestMixedGuests(Ends, Two, Guests):
    """A guest of x86-64, and one of arm64 whose pages have another size."""

    @pytest.fixture(scope="class")
    def changes(self, request):
        (other,) = (each for each in request.config.option.platform if each.name == "16k")
        return {"others": {2: {"image": other.image, "kernel_dir": other.kernel_dir}}}
