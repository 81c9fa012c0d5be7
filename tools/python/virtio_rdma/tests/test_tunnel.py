# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over VXLAN tunnels between two networks of guests."""

import pytest

from virtio_rdma.guests.tunnel import Switched, Tunnelled
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import between
from virtio_rdma.tests.test_wire import BETWEEN_HOSTS, CASES, of_uml

# The kinds of tools that run over a tunnel, and what is lost on its way must not be.
KINDS = ("rping", "ucmatose", "mckey", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong",
         "ibv_xsrq_pingpong", "ib_write_bw", "ib_read_bw", "ib_send_lat", "ib_atomic_bw")
TUNNEL_CASES = [name for name, case in CASES.items() if case.kind in KINDS]
LOST = ("tx_lost", "tx_too_long", "rx_stranger", "rx_malformed", "rx_other_vni", "rx_congested", "table_full",
        "rx_group_source")


class Tunnel:
    """What runs between two guests whose messages go over a VXLAN tunnel."""

    @pytest.fixture(scope="class")
    def names(self, network):
        """The names in the command lines of cases, by family."""
        return tools.give_addresses(network.guests, ("IPv4", "IPv6"))

    @pytest.mark.parametrize("name", BETWEEN_HOSTS)
    def test_program(self, name, network, platform, title, results):
        between(results, platform, name, network.guests, f"{title}: ")

    @pytest.mark.parametrize("case", TUNNEL_CASES)
    def test_tool(self, case, network, names, title, results):
        chosen = CASES[case]
        tools.report(results, chosen, network.guests, names[chosen.family], HANG_SECONDS, f"{title}: ")

    def test_counters(self, network, results):  # pylint: disable=unused-argument
        """Everything went through the tunnel, nothing of it was refused, and the ends have learnt where the guests
        are."""
        for counters in network.uplink_status().values():
            assert all(counters[name] for name in ("tx_frames", "rx_frames")), counters
            assert counters["tx_flooded"] * 10 < counters["tx_frames"], counters
            assert not any(counters[name] for name in LOST), counters

    def test_objects(self, network, results):
        networks.agree(results, network)


@of_uml
@pytest.mark.network("two ends of a tunnel", guests=2, workers=2, kind=Tunnelled)
class TestTunnel(Tunnel):
    """The guests' own interfaces are on a bridge."""


@of_uml
@pytest.mark.network("switches and a tunnel", guests=2, workers=2, kind=Switched)
class TestSwitch(Tunnel):
    """The guests' own interfaces are connected to the device's switches, and their frames go over the tunnel too."""

    def test_ip(self, network, results):
        """The guests' kernels find each other, and what they exchange comes."""
        first, second = network.guests
        for address in (second.address, f"fd00::{second.number}"):
            status, text = first.run(f"ping -c 20 -i 0.01 -s 1400 {address}", timeout=HANG_SECONDS)
            results.result(f"switch: ping {address}", status == 0 and " 0% packet loss" in text) or results.note(text)
        for guest in network.device_status().values():
            counters = guest["nic"]
            assert all(counters[name] for name in ("tx_frames", "rx_frames")), counters
            assert not any(counters[name] for name in ("rx_spoofed", "rx_malformed", "bad_length")), counters
