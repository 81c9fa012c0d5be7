# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over the wire, in packets of RoCE v2: guests as on two hosts, and a guest with the kernel's own RoCE (rxe) as
the peer."""

import dataclasses
import os

import pytest

from virtio_rdma.common import BUILD
from virtio_rdma.guests.hosts import Hosts
from virtio_rdma.tests import capture, networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import Program
from virtio_rdma.tests.ulp import Ulp

# Programs that take two hosts, the last one with the tests that it runs. It has another test, in which a host counts
# what it cannot send to another VLAN; here a host cannot know.
BETWEEN_HOSTS = ("verbs/rc_hosts.py", "verbs/mcast_hosts.py", "connections.sh",
                 "verbs/vlan_hosts.py connection_manager connections_by_hand connections_to_another_vlan "
                 "removed_under_traffic")

# The server waits for each message of an unreliable connection, and the sender does not wait for the server. A message
# of many packets is lost when a queue between them is full.
LOSES = "ib_send_bw -c UC"
# The NIC of user-mode Linux carries no tags of VLANs.
FAMILIES = ("IPv4", "IPv6")
CASES = {str(case): case for case in tools.everything()
         if case.family in FAMILIES and not case.name.startswith(LOSES)}
# rxe has no XRC, and the NIC of its guest loses datagrams when they come as fast as the device sends them. The bridge
# has room for each path MTU. How rxe joins a group is not to be seen in the same place, and as the client it sends no
# packet to one (sent_pkts stays 0, Linux 7.2.12): test_multicast has the rest.
RXE_CASES = {str(case): case for case in (*CASES.values(), *tools.path_mtus())
             if "xsrq" not in case.name and case.ready != tools.JOINED and not case.name.endswith(" -g")
             and not case.name.startswith("ib_send_bw -c UD")}
# rxe maps an IPv4 group to the MAC address of an IPv6 group (rxe_mcast_add()).
RXE_JOINED = "ip maddr show dev eth0 | grep -q 33:33:ef:01:02:03"


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

    def test_multicast(self, network, results):
        """rxe receives what a guest with virtio-rdma sends to a group."""
        ours, theirs = network.guests
        pair = [theirs, ours]
        case = dataclasses.replace(CASES["mckey to an IPv4 group"], ready=RXE_JOINED)
        # Without a route, rxe would join no group.
        theirs.check("ip route replace 224.0.0.0/4 dev eth0")
        tools.report(results, case, pair, tools.names_of(*pair), HANG_SECONDS, "rxe serves: ")

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


# What is sent at least: SENDs and WRITEs of one packet and of several, with immediate data and without, READs, atomics,
# and datagrams.
SENT = {(opcode, 4) for opcode in (*range(0x0b), *range(0x0c, 0x13), 0x14, 0x64)} | {
    (opcode, 6) for opcode in (0x00, 0x01, 0x02, 0x11, 0x64)}
# What the tools of ibverbs-utils send, in bytes. A datagram fits the MTU of the network.
SIZES = {"ibv_rc_pingpong": 4000, "ibv_ud_pingpong": 1000}


@pytest.mark.network("two hosts, captured", guests=2, workers=2, kind=Hosts)
class TestPackets:
    """What the device sends, before a judge that has nothing to do with it."""

    @pytest.fixture(scope="class")
    def packets(self, network):
        """All packets that the hosts send. build/test/roce.pcap has them afterwards, for tcpdump -r or Wireshark."""
        taps = [network.tap(guest) for guest in network.guests]
        with capture.Capture(taps, os.path.join(BUILD, "test", "roce.pcap")) as captured:
            yield captured

    def test_program(self, network, platform, results, packets):  # pylint: disable=unused-argument
        """It sends one of each operation."""
        both = [Program(results, platform, "verbs/rc_hosts.py", guest, label=f"captured: guest {guest.number} of 2: ")
                for guest in network.guests]
        for each in both:
            each.finish()

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("name", SIZES)
    def test_pingpong(self, name, family, names, network, results, packets):
        """It passes, and the PSNs of each connection have no gap."""
        tool = f"{name} -c -n 500 -s {SIZES[name]}"
        first, second = ("i1", "i2") if family == "IPv6" else ("g1", "g2")
        case = tools.Case(name, f"{tool} -d {{d1}} -g {{{first}}}", tools.TCP.format(18515),
                          f"{tool} -d {{d2}} -g {{{second}}} {{t1}}", "bytes in")
        before = packets.settled()
        tools.report(results, case, network.guests, names["IPv4"], HANG_SECONDS, f"{family}: ")
        frames = packets.frames[before:packets.settled()]
        versions = {version for _, version in capture.opcodes(frames)}
        assert versions == {4 if family == "IPv4" else 6}
        assert name == "ibv_ud_pingpong" or not capture.gaps(frames)

    def test_packets(self, packets):
        """scapy finds all packets right."""
        frames = packets.frames[:packets.settled()]
        assert packets.missed() == 0
        assert not SENT - capture.opcodes(frames)
        assert not capture.broken_messages(frames)
        assert not capture.judge(frames)
