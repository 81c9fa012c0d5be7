# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over VXLAN tunnels between two networks of guests."""

import pytest

from virtio_rdma.guests.tunnel import Tunnelled
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import Program
from virtio_rdma.tests.test_wire import BETWEEN_HOSTS, CASES

# The kinds of tools that run over a tunnel, and what is lost on its way must not be.
KINDS = ("rping", "ucmatose", "mckey", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong",
         "ibv_xsrq_pingpong", "ib_write_bw", "ib_read_bw", "ib_send_lat", "ib_atomic_bw")
TUNNEL_CASES = [name for name, case in CASES.items() if case.kind in KINDS]
LOST = ("tx_lost", "tx_too_long", "rx_stranger", "rx_malformed", "rx_other_vni", "rx_congested", "table_full",
        "rx_group_source")


@pytest.mark.network("two ends of a tunnel", guests=2, workers=2, kind=Tunnelled)
class TestTunnel:
    """Two guests whose messages go over a VXLAN tunnel."""

    @pytest.fixture(scope="class")
    def names(self, network):
        """The names in the command lines of cases, by family."""
        return tools.give_addresses(network.guests, ("IPv4", "IPv6"))

    @pytest.mark.parametrize("name", BETWEEN_HOSTS)
    def test_program(self, name, network, platform, results):
        both = [Program(results, platform, name, guest, label=f"tunnel: guest {guest.number} of 2: ")
                for guest in network.guests]
        for each in both:
            each.finish()

    @pytest.mark.parametrize("case", TUNNEL_CASES)
    def test_tool(self, case, network, names, results):
        chosen = CASES[case]
        tools.report(results, chosen, network.guests, names[chosen.family], HANG_SECONDS, "tunnel: ")

    def test_counters(self, network, results):  # pylint: disable=unused-argument
        """Everything went through the tunnel, nothing of it was refused, and the ends have learnt where the guests
        are."""
        for counters in network.uplink_status().values():
            assert counters["tx_frames"], counters
            assert counters["rx_frames"], counters
            assert counters["tx_flooded"] * 10 < counters["tx_frames"], counters
            assert not any(counters[name] for name in LOST), counters

    def test_objects(self, network, results):
        networks.agree(results, network)
