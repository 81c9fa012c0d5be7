# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over the wire, in packets of RoCE v2: guests as on two hosts, and a guest with the kernel's own RoCE (rxe) as
the peer."""

import dataclasses
import os
import re
import socket
import time

import pytest
from scapy.utils import RawPcapReader

from virtio_rdma.common import BUILD
from virtio_rdma.guests.daemons import TwoHosts
from virtio_rdma.guests.hosts import Hosts
from virtio_rdma.tests import capture, dissectors, networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import between
from virtio_rdma.tests.ulp import Ulp

# Programs that take two hosts, the last one with the tests that it runs. It has another test, in which a host counts
# what it cannot send to another VLAN; here a host cannot know.
BETWEEN_HOSTS = ("verbs/rc_hosts.py", "verbs/packets_hosts.py", "verbs/mcast_hosts.py", "connections.sh",
                 "verbs/vlan_hosts.py connection_manager connections_by_hand connections_to_another_vlan "
                 "removed_under_traffic")

# The NIC of user-mode Linux carries no tags of VLANs.
FAMILIES = ("IPv4", "IPv6")


def few(case):
    """Returns a case, or what replaces it if its server waits for each message of an unreliable service. The sender
    does not wait for the server, so all messages together fit into the queues between them: 40 of one packet."""
    if not case.name.startswith(("ib_send_bw -c UC", "ib_send_bw -c UD")):
        return case
    server, client = (command.replace(" -n 100", " -n 40 -s 512") for command in (case.server, case.client))
    return dataclasses.replace(case, server=server, client=client)


CASES = {str(case): few(case) for case in tools.everything() if case.family in FAMILIES}
# The bridges have room for each path MTU.
ALL_CASES = CASES | {str(case): case for case in tools.path_mtus()}
# rxe has no XRC. How it joins a group is not to be seen in the same place, and mckey as the client ends before rxe has
# sent anything: test_multicast and test_multicast_of_rxe have the rest. What makes no difference to the packets is left
# out: by which call a program posts; and large messages of rsockets, which rxe takes half a minute for, over IPv6 too.
NOT_WITH_RXE = re.compile("xsrq| -g$|--use_old_post_send|over IPv6, 65536 bytes")
RXE_CASES = {name: case for name, case in ALL_CASES.items()
             if not NOT_WITH_RXE.search(name) and case.ready != tools.JOINED}
# rxe maps an IPv4 group to the MAC address of an IPv6 group (rxe_mcast_add()).
RXE_JOINED = "ip maddr show dev eth0 | grep -q 33:33:ef:01:02:03"


of_uml = pytest.mark.only(lambda where: where.platform.vmm == "uml")
# What of the selftests between hosts runs with rxe, which has no XRC. It has FLUSH, but its ICRC of one covers the
# transport headers twice, so that no other device takes it: FLUSH has no offset of a payload in rxe_opcode[], where
# payload_addr() then finds the BTH (Linux 7.2.12).
WITH_RXE = ("verbs/rc_hosts.py",
            "verbs/packets_hosts.py rc uc ud atomic_write invalidate negative_acknowledgements not_ready")


@pytest.fixture(scope="class")
def pair(network):
    """The guest that serves, and the other."""
    return network.guests


@pytest.fixture(scope="class")
def names(pair):
    """The names in the command lines of cases, by family."""
    return tools.give_addresses(pair, FAMILIES)


@of_uml
@pytest.mark.network("two daemons", guests=2, workers=2, mtu=9000, kind=TwoHosts)
class TestTwoDaemons:
    """Two guests of two daemons, each in a network namespace with a tap and a bridge of its own."""

    @pytest.mark.parametrize("name", BETWEEN_HOSTS)
    def test_program(self, name, network, platform, results):
        between(results, platform, name, network.guests, "two daemons: ")

    @pytest.mark.parametrize("case", ALL_CASES)
    def test_tool(self, case, network, names, results):
        chosen = ALL_CASES[case]
        tools.report(results, chosen, network.guests, names[chosen.family], HANG_SECONDS, "two daemons: ")

    def test_nvme(self, network, results):
        ulp = Ulp(results, network.guests, "nvme", "two daemons: ")
        ulp.run(ulp.blocks, ulp.ends)

    def test_objects(self, network, results):
        networks.agree(results, network, "two daemons: ")


# Who serves, and who is the client.
DIRECTIONS = {"rxe is the client": (0, 1), "rxe serves": (1, 0)}


class BothDirections:
    """Tests between a guest with virtio-rdma and one with rxe, each of which serves."""

    @pytest.fixture(scope="class", params=DIRECTIONS)
    def direction(self, request):
        """Who serves."""
        return request.param

    @pytest.fixture(scope="class")
    def pair(self, network, direction):
        """The guest that serves, and the other."""
        return [network.guests[at] for at in DIRECTIONS[direction]]


@of_uml
@pytest.mark.network("a host with rxe", guests=2, workers=2, mtu=9000, kind=Hosts, others={2: {"rdma": "rxe"}})
class TestRxe(BothDirections):
    """The tools of the suite tools, and kernel consumers, between a guest with virtio-rdma and a guest that has rxe on
    its network interface.

    The rxe of Linux 7.2.12 differs in this, besides what stands above and in verbs/packets_hosts.py: its NAK of a SEND
    that is longer than the receive is that of an error of the responder, so the requester gets REM_OP_ERR and not
    REM_INV_REQ_ERR. It sends nothing of a QP that a program destroys at once, as mckey does."""

    @pytest.mark.parametrize("name", WITH_RXE)
    def test_program(self, name, direction, pair, platform, results):
        between(results, platform, name, pair, f"{direction}: ")

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

    def test_multicast_of_rxe(self, network, results):
        """A guest with virtio-rdma receives what rxe sends to a group. The sender waits for its completions."""
        network.guests[1].check("ip route replace 224.0.0.0/4 dev eth0")
        tools.report(results, CASES["examples/mcast_cm"], network.guests, tools.names_of(*network.guests), HANG_SECONDS,
                     "rxe is the client: ")

    def test_nvme(self, direction, pair, results):
        """The guest that serves has the target."""
        ulp = Ulp(results, pair, "nvme", f"{direction}: ")
        ulp.run(ulp.blocks, ulp.ends)

    def test_iser(self, network, results):
        """The guest with rxe has the target."""
        ours, theirs = network.guests
        ulp = Ulp(results, (theirs, ours), "iser", "rxe serves: ")
        ulp.run(ulp.blocks, ulp.ends)

    def test_nfs(self, network, results):
        """The guest with rxe mounts files of the other."""
        ulp = Ulp(results, network.guests, "nfs", "rxe is the client: ")
        ulp.run(ulp.files, ulp.ends)

    def test_objects(self, network, results):
        networks.agree(results, network)


# Bits 4 to 0 of the opcodes of reliable connections, and of those of unreliable ones.
RELIABLE, UNRELIABLE = range(0x15), range(0x0c)
# The VLAN of verbs/packets_hosts.py.
VLAN = 5
# What is sent over IPv4 and IPv6, and in a VLAN and in none: SENDs, WRITEs, READs and atomics of RC and XRC with what
# answers them, SENDs and WRITEs of UC, and datagrams.
EVERYWHERE = {*RELIABLE, *(0x20 | bits for bits in UNRELIABLE), 0x64, 0x65, *(0xa0 | bits for bits in RELIABLE)}
# What is sent at least once: SENDs that invalidate a key, FLUSH, ATOMIC WRITE, congestion notification, and selective
# acknowledgements.
ONCE = {0x16, 0x17, 0x1c, 0x1d, capture.CNP, 0xb6, 0xb7, capture.SELECTIVE_ACKNOWLEDGE}
# Together these are all opcodes that the device can send: XRC has no FLUSH and no ATOMIC WRITE.
SENT = {(opcode, version, vlan) for opcode in EVERYWHERE for version in (4, 6) for vlan in (None, VLAN)} | {
    (opcode, 4, None) for opcode in ONCE}
# An ACK, an RNR NAK of the shortest timer but one, and the NAKs of a PSN, a request, a key and the responder itself.
SYNDROMES = {0x1f, 0x21, 0x60, 0x61, 0x62, 0x63}
WRITE_MIDDLE, SEND_ONLY = 0x07, 0x04
PATH_MTUS = {256, 512, 1024, 2048, 4096}
# What the tools of ibverbs-utils send, in bytes.
SIZES = {"ibv_rc_pingpong": 4000, "ibv_ud_pingpong": 1000}
CAPTURED = ("verbs/rc_hosts.py", "verbs/packets_hosts.py", "verbs/mcast_hosts.py")


@of_uml
@pytest.mark.network("two hosts, captured", guests=2, workers=2, mtu=9000, kind=Hosts)
class TestPackets:
    """What the device sends, before judges that have nothing to do with it."""

    @pytest.fixture(scope="class")
    def packets(self, network):
        """All packets that the hosts send. build/test/roce.pcap has them afterwards, for tcpdump -r or Wireshark."""
        taps = [network.tap(guest) for guest in network.guests]
        with capture.Capture(taps, os.path.join(BUILD, "test", "roce.pcap")) as captured:
            yield captured

    @pytest.fixture(scope="class")
    def frames(self, packets):
        """The packets, once all have been sent."""
        frames = packets.frames[:packets.settled()]
        assert packets.missed() == 0
        packets.write()
        return frames

    @pytest.mark.parametrize("name", CAPTURED)
    def test_program(self, name, network, platform, results, packets):  # pylint: disable=unused-argument
        """They send each kind of packet but one."""
        between(results, platform, name, network.guests, "captured: ")

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
        versions = {version for _, version, _ in capture.kinds_of(frames)}
        assert versions == {4 if family == "IPv4" else 6}
        assert name == "ibv_ud_pingpong" or not capture.gaps(frames)

    def test_congestion(self, network, names, packets):
        """Packets of a connection that come marked are answered by a congestion notification."""
        first, second = network.guests
        tool = "ibv_rc_pingpong -n 1000000000 -s 64"
        jobs = [first.start(f"{tool} -d {{d1}} -g {{g1}}".format(**names["IPv4"]))]
        first.check(f"until {tools.TCP.format(18515)}; do sleep 0.05; done", timeout=HANG_SECONDS)
        before = len(packets.frames)
        jobs.append(second.start(f"{tool} -d {{d2}} -g {{g2}} {{t1}}".format(**names["IPv4"])))
        try:
            meet_congestion(network, packets, before, time.monotonic() + HANG_SECONDS)
        finally:
            tools.end(jobs)

    def test_scapy(self, frames):
        """All kinds of packets were sent, and scapy finds them right."""
        assert not SENT - capture.kinds_of(frames)
        assert not SYNDROMES - capture.syndromes(frames)
        assert capture.payloads(frames, WRITE_MIDDLE) == PATH_MTUS
        assert not capture.broken_messages(frames)
        assert not capture.judge(frames)

    def test_tshark(self, request, packets, frames):
        """tshark finds nothing wrong, and reads the same in all packets."""
        known = [(frame, capture.base_header(frame)) for frame in frames]
        assert not dissectors.tshark(request.config.option.dissectors, packets.path, known)

    def test_tcpdump(self, request, packets, frames):
        """tcpdump takes all of them for packets of RoCE v2."""
        assert dissectors.tcpdump(request.config.option.dissectors, packets.path) == len(frames)



def brief(case):
    """Returns a case with five messages instead of a hundred. What a capture is told while its reader waits for a
    processor has to fit into the megabyte that the device keeps for it."""
    server, client = (command.replace(" -n 100", " -n 5") for command in (case.server, case.client))
    assert "_bw" not in case.name or client != case.client, case.client
    return dataclasses.replace(case, server=server, client=client)


# What virtio-rdmad capture is given to see: SENDs, WRITEs, READs, atomics and datagrams.
SHOWN_CASES = [brief(case) for name, case in CASES.items()
               if re.match("ibv_(rc|ud)_pingpong|ib_(write|read)_bw -c RC$|ib_atomic_bw$", name)]
# The opcodes that these have for sure: the first, middle and last packets of SENDs, WRITEs and answers of READs,
# requests of READs, acknowledgements, those of atomics, and datagrams.
SHOWN = {0x00, 0x01, 0x02, 0x06, 0x07, 0x08, 0x0c, 0x0d, 0x0e, 0x0f, 0x11, 0x12, 0x64}


class CapturedByDevice:
    """Tests of the frames that virtio-rdmad capture writes, before judges that have nothing to do with it."""

    # The files of frames begin with it.
    kept = ""

    @pytest.fixture(scope="class")
    def files(self, network, names, results):
        """A file of each guest's frames, which build/test keeps."""
        files = [os.path.join(BUILD, "test", f"{self.kept}-{guest.name}.pcapng") for guest in network.guests]
        os.makedirs(os.path.join(BUILD, "test"), exist_ok=True)
        captures = [network.capture(guest, file) for guest, file in zip(network.guests, files)]
        try:
            for case in SHOWN_CASES:
                tools.report(results, case, network.guests, names["IPv4"], HANG_SECONDS, f"{self.kept}: ")
        finally:
            statuses = [network.end_capture(process) for process in captures]
        assert statuses == [0] * len(files)
        return files

    def test_frames(self, request, files):
        """Each end has all kinds of packets, scapy finds them right, and tshark says of them what they say."""
        for file in files:
            frames = [bytes(frame) for frame, _ in RawPcapReader(file)]
            assert not SHOWN - {opcode for opcode, _, _ in capture.kinds_of(frames)}, file
            assert not capture.judge(frames), file
            known = [(frame, capture.base_header(frame)) for frame in frames]
            assert not dissectors.tshark(request.config.option.dissectors, file, known), file


@of_uml
@pytest.mark.network("one host, captured by the device", guests=2, workers=2)
class TestCapturedLocally(CapturedByDevice):
    """Messages between guests of one network, which no packet carries."""

    kept = "local"


@of_uml
@pytest.mark.network("two hosts, captured by the device", guests=2, workers=2, mtu=9000, kind=Hosts)
class TestCapturedOnTheWire(CapturedByDevice):
    """Messages between guests of two networks, in packets."""

    kept = "wire"


def meet_congestion(network, packets, before, deadline):
    """Brings a packet of the connection under way to its receiver once more, marked, until a CNP comes."""
    taps = {f"10.0.0.{guest.number}": network.tap(guest) for guest in network.guests}
    seen: set[int] = set()
    while capture.CNP not in seen:
        assert time.monotonic() < deadline, "no CNP"
        headers = [(frame, capture.base_header(frame)) for frame in packets.frames[before:]]
        before += len(headers)
        seen = {header.opcode for _, header in headers}
        sends = [(frame, header) for frame, header in headers if header.opcode == SEND_ONLY]
        for frame, header in sends[-1:]:
            packets.bring(taps[socket.inet_ntoa(header.addresses[4:])], capture.marked(frame))
        time.sleep(0.01)
