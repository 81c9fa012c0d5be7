# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over the wire, in packets of RoCE v2: guests as on two hosts, and a guest with the kernel's own RoCE (rxe) as
the peer."""

import pytest

from virtio_rdma.guests.hosts import Hosts
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import Program
from virtio_rdma.tests.ulp import Ulp

# Programs that take two hosts.
BETWEEN_HOSTS = ("verbs/rc_hosts.py", "verbs/mcast_hosts.py", "connections.sh")


@pytest.mark.network("two hosts", guests=2, workers=2, kind=Hosts)
class TestTwoHosts:
    """Two guests whose messages go over taps and a bridge."""

    @pytest.mark.parametrize("name", BETWEEN_HOSTS)
    def test_program(self, name, network, platform, results):
        both = [Program(results, platform, name, guest, label=f"guest {guest.number} of 2: ")
                for guest in network.guests]
        for each in both:
            each.finish()

    def test_objects(self, network, results):
        networks.agree(results, network)


# What rxe's port has: no VLAN in the guests of user-mode Linux, whose NIC carries no tags.
FAMILIES = ("IPv4", "IPv6")
CASES = {str(case): case for case in (*tools.everything(), *tools.path_mtus()) if case.family in FAMILIES}
# Who serves, and who is the client.
DIRECTIONS = {"rxe is the client": (0, 1), "rxe serves": (1, 0)}


@pytest.mark.network("a host with rxe", guests=2, workers=2, mtu=9000, kind=Hosts, others={2: {"rdma": "rxe"}})
class TestRxe:
    """The tools of the suite tools, and kernel consumers, between a guest with virtio-rdma and a guest that has rxe on
    its network interface."""

    @pytest.fixture(scope="class", params=DIRECTIONS)
    def direction(self, request):
        """Who serves."""
        return request.param

    @pytest.fixture(scope="class")
    def pair(self, network, direction):
        """The guest that serves, and the other."""
        return [network.guests[at] for at in DIRECTIONS[direction]]

    @pytest.fixture(scope="class")
    def names(self, pair):
        """The names in the command lines of cases, by family."""
        return tools.give_addresses(pair, FAMILIES)

    @pytest.mark.parametrize("case", CASES)
    def test_tool(self, case, direction, pair, names, results):
        chosen = CASES[case]
        tools.report(results, chosen, pair, names[chosen.family], HANG_SECONDS, f"{direction}: ")

    @pytest.mark.parametrize("kind", ["nvme", "iser"])
    def test_disk(self, kind, direction, pair, results):
        """The guest that serves has the target."""
        ulp = Ulp(results, pair, kind, f"{direction}: ")
        ulp.run(ulp.blocks, ulp.ends)

    def test_nfs(self, direction, pair, results):
        """The guest that serves has the files."""
        ulp = Ulp(results, pair, "nfs", f"{direction}: ")
        ulp.run(ulp.files, ulp.ends)

    def test_objects(self, network, results):
        networks.agree(results, network)
