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

# The server waits for each message of an unreliable connection, and the sender does not wait for the server. A message
# of many packets is lost when a queue between them is full.
LOSES = "ib_send_bw -c UC"
# The NIC of user-mode Linux carries no tags of VLANs.
FAMILIES = ("IPv4", "IPv6")
CASES = {str(case): case for case in tools.everything()
         if case.family in FAMILIES and not case.name.startswith(LOSES)}
# rxe has no XRC. The bridge of its guests has room for each path MTU.
RXE_CASES = {name: case for name, case in CASES.items() if "xsrq" not in name} | {
    str(case): case for case in tools.path_mtus()}


@pytest.fixture(scope="class")
def pair(network):
    """The guest that serves, and the other."""
    return network.guests


@pytest.fixture(scope="class")
def names(pair):
    """The names in the command lines of cases, by family."""
    return tools.give_addresses(pair, FAMILIES)


@pytest.mark.network("two hosts", guests=2, workers=2, kind=Hosts)
class TestTwoHosts:
    """Two guests whose messages go over taps and a bridge."""

    @pytest.mark.parametrize("name", BETWEEN_HOSTS)
    def test_program(self, name, network, platform, results):
        both = [Program(results, platform, name, guest, label=f"guest {guest.number} of 2: ")
                for guest in network.guests]
        for each in both:
            each.finish()

    @pytest.mark.parametrize("case", CASES)
    def test_tool(self, case, network, names, results):
        chosen = CASES[case]
        tools.report(results, chosen, network.guests, names[chosen.family], HANG_SECONDS)

    def test_nvme(self, network, results):
        ulp = Ulp(results, network.guests, "nvme")
        ulp.run(ulp.blocks, ulp.ends)

    def test_objects(self, network, results):
        networks.agree(results, network)


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

    @pytest.mark.parametrize("case", RXE_CASES)
    def test_tool(self, case, direction, pair, names, results):
        chosen = RXE_CASES[case]
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
