# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over VXLAN tunnels between two networks of guests."""

import pytest

from virtio_rdma.guests.tunnel import KernelTunnel, Switched, Tunnelled
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import between
from virtio_rdma.tests.test_wire import BETWEEN_HOSTS, CASES, RXE_CASES, BothDirections, of_uml

# The kinds of tools that run over a tunnel, and those that are enough to show that one works.
KINDS = ("rping", "ucmatose", "mckey", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong",
         "ibv_xsrq_pingpong", "ib_write_bw", "ib_read_bw", "ib_send_lat", "ib_atomic_bw")
FEW = ("rping", "ibv_rc_pingpong", "ibv_ud_pingpong", "ib_write_bw", "ib_read_bw")
TO_RXE = [name for name, case in RXE_CASES.items() if case.kind in FEW and "MTU" not in name]
# The counters of what is lost at the ends of a tunnel.
LOST = ("tx_lost", "tx_too_long", "rx_stranger", "rx_malformed", "rx_other_vni", "rx_congested", "table_full",
        "rx_group_source")


def went_through(network):
    """Checks that everything went through the tunnel, nothing of it was refused, and the ends have learnt where the
    guests are."""
    for counters in network.uplink_status().values():
        assert all(counters[name] for name in ("tx_frames", "rx_frames")), counters
        assert counters["tx_flooded"] * 10 < counters["tx_frames"], counters
        assert not any(counters[name] for name in LOST), counters


class Tunnel:
    """What runs between two guests whose messages go over a VXLAN tunnel."""

    # The selftests and the tools.
    programs: tuple[str, ...] = BETWEEN_HOSTS
    kinds: tuple[str, ...] = KINDS

    @classmethod
    def selects(cls, _where, program):
        """Returns whether a selftest or a tool runs."""
        return program in cls.programs or (program in CASES and CASES[program].kind in cls.kinds)

    @pytest.fixture(scope="class")
    def names(self, network):
        """The names in the command lines of cases, by family."""
        return tools.give_addresses(network.guests, ("IPv4", "IPv6"))

    @pytest.mark.parametrize("program", BETWEEN_HOSTS)
    def test_program(self, program, network, platform, title, results):
        between(results, platform, program, network.guests, f"{title}: ")

    @pytest.mark.parametrize("program", CASES)
    def test_tool(self, program, network, names, title, results):
        chosen = CASES[program]
        tools.report(results, chosen, network.guests, names[chosen.family], HANG_SECONDS, f"{title}: ")

    def test_counters(self, network):
        went_through(network)

    def test_objects(self, network, results):
        networks.agree(results, network)


@of_uml
@pytest.mark.network("two ends of a tunnel", guests=2, workers=2, kind=Tunnelled)
class TestTunnel(Tunnel):
    """The guests' own interfaces are on a bridge. The tunnel carries the same packets of RoCE v2 as between switches,
    so a few tools are enough."""

    programs = ("verbs/rc_hosts.py", "verbs/mcast_hosts.py")
    kinds = FEW


@of_uml
@pytest.mark.network("switches and a tunnel", guests=2, workers=2, kind=Switched)
class TestSwitch(Tunnel):
    """The guests' own interfaces are connected to the device's switches, and their frames go over the tunnel too."""

    def test_ip(self, network, names, results):
        """The guests' kernels find each other, and what they exchange comes."""
        first, second = network.guests
        for family in ("IPv4", "IPv6"):
            tools.ping(results, first, tools.address_of(second, family), f"switch: ping over {family}")
        networks.interfaces_were_used(network)


@of_uml
@pytest.mark.network("a tunnel of the kernel's", guests=2, mtu=1450, kind=KernelTunnel)
class TestKernelTunnel(BothDirections):
    """The other end is the kernel's vxlan device, and behind it a guest with rxe. Guest and daemon on this side have
    nothing of the host but a route."""

    @pytest.fixture(scope="class")
    def names(self, pair):
        """The names in the command lines of cases, by family."""
        return tools.give_addresses(pair, ("IPv4", "IPv6"))

    @pytest.mark.parametrize("case", TO_RXE)
    def test_tool(self, case, direction, pair, names, results):
        chosen = RXE_CASES[case]
        tools.report(results, chosen, pair, names[chosen.family], HANG_SECONDS, f"vxlan: {direction}: ")

    def test_counters(self, network):
        went_through(network)

    def test_objects(self, network, results):
        networks.agree(results, network, "vxlan: ")
