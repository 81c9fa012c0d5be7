# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over the wire between QEMU guests with Debian's own kernel: with a network interface that carries tags of
VLANs, which user-mode Linux does not have, and with one on the device's switch."""

import pytest

from virtio_rdma.guests.hosts import Hosts
from virtio_rdma.guests.tunnel import SwitchedPair
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import between
from virtio_rdma.tests.test_wire import DIRECTIONS

VLANS = ("a VLAN", "IPv6 in a VLAN")

pytestmark = pytest.mark.only(lambda where: where.platform.vmm == "qemu")


def few(family):
    """Yields a few tools over the addresses of a family."""
    port = tools.TCP.format(18515)
    for command, gid, expect in (("ibv_rc_pingpong -c -n 200", "-g", "bytes in"),
                                 ("ibv_ud_pingpong -c -n 100 -s 1000", "-g", "bytes in"),
                                 ("ib_write_bw -F -n 100", "-x", "#bytes"), ("ib_read_bw -F -n 50", "-x", "#bytes")):
        yield tools.Case(f"{command.split()[0]} over {family}", f"{command} -d {{d1}} {gid} {{g1}}", port,
                         f"{command} -d {{d2}} {gid} {{g2}} {{t1}}", expect, family=family)
    tool = "rping -V -C 10 -S 4096 -a {a1}"
    yield tools.Case(f"rping over {family}", f"{tool} -s", tools.CM, f"{tool} -c", family=family)


# What the device's counters of packets that it refuses begin with.
REFUSED = ("bad_icrc", "bad_packet", "drop_")
# rxe has no XRC.
PROGRAM = "verbs/packets_hosts.py rc_in_a_vlan uc_in_a_vlan ud_in_a_vlan"
IN_A_VLAN = {str(case): case for family in VLANS for case in few(family)}
SWITCHED = {str(case): case for family in ("IPv4", "IPv6") for case in few(family)}


@pytest.mark.network("a VLAN with rxe", guests=2, workers=2, mtu=9000, kind=Hosts, others={2: {"rdma": "rxe"}})
class TestVlan:
    """A guest with virtio-rdma and a guest with rxe, both in a VLAN. Tools find the other guest by ARP and neighbour
    discovery."""

    @pytest.mark.parametrize("who", DIRECTIONS)
    def test_program(self, who, network, platform, results):
        """Each operation of each service, with each path MTU. The program makes the interfaces of the VLAN itself."""
        pair = [network.guests[at] for at in DIRECTIONS[who]]
        between(results, platform, PROGRAM, pair, f"{who}: ")

    @pytest.fixture(scope="class")
    def tagged(self, network):
        """The guests, once they have interfaces in the VLAN."""
        tools.give_addresses(network.guests, VLANS)
        return network.guests

    @pytest.fixture(scope="class", params=DIRECTIONS)
    def direction(self, request):
        """Who serves."""
        return request.param

    @pytest.fixture(scope="class")
    def pair(self, tagged, direction):
        """The guest that serves, and the other."""
        return [tagged[at] for at in DIRECTIONS[direction]]

    @pytest.fixture(scope="class")
    def names(self, pair):
        """The names in the command lines of cases, by family."""
        return tools.names_by_family(pair, VLANS)

    @pytest.mark.parametrize("case", IN_A_VLAN)
    def test_tool(self, case, direction, pair, names, results):
        chosen = IN_A_VLAN[case]
        tools.report(results, chosen, pair, names[chosen.family], HANG_SECONDS, f"{direction}: ")

    def test_packets(self, network):
        """No packet was refused."""
        (status,) = network.device_status().values()
        refused = {name: count for name, count in status["counters"].items() if name.startswith(REFUSED) and count}
        assert not refused

    def test_objects(self, network, results):
        networks.agree(results, network, "VLAN: ")


@pytest.mark.network("QEMU's switches", guests=3, workers=2, kind=SwitchedPair)
class TestQemuSwitch:
    """Guests whose interfaces are connected to the device's switches (-netdev stream): two on one switch, and one
    behind a tunnel."""

    @pytest.fixture(scope="class", params=["one switch", "a tunnel"])
    def way(self, request):
        """What is between the guests."""
        return request.param

    @pytest.fixture(scope="class")
    def pair(self, network, way):
        """The guest that serves, and the other."""
        first, same, other = network.guests
        return [first, same if way == "one switch" else other]

    @pytest.fixture(scope="class")
    def names(self, pair):
        """The names in the command lines of cases, by family."""
        return tools.give_addresses(pair, ("IPv4", "IPv6"))

    def test_ip(self, pair, names, way, results):
        """The guests' kernels find each other, and what they exchange comes."""
        first, second = pair
        for family in names:
            tools.ping(results, first, tools.address_of(second, family), f"{way}: ping over {family}")

    @pytest.mark.parametrize("case", SWITCHED)
    def test_tool(self, case, way, pair, names, results):
        chosen = SWITCHED[case]
        tools.report(results, chosen, pair, names[chosen.family], HANG_SECONDS, f"{way}: ")

    def test_counters(self, network):
        """Frames of all interfaces went through the switches, and none was refused."""
        networks.interfaces_were_used(network)

    def test_objects(self, network, results):
        networks.agree(results, network, "switches: ")
