# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA through packet sockets on network interfaces of the host."""

import pytest

from virtio_rdma.guests.interfaces import Interfaces, InterfaceToRxe
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.test_tunnel import FEW, TO_RXE, Tunnel
from virtio_rdma.tests.test_wire import DIRECTIONS, RXE_CASES, of_uml

# What comes for a group without members is nobody's (rx_unclaimed).
LOST = ("tx_lost", "tx_too_long", "rx_lost", "rx_error")


def went_through(network):
    """Checks that everything went through the sockets, and that nothing was lost."""
    for counters in network.uplink_status().values():
        assert all(counters[name] for name in ("tx_frames", "rx_frames")), counters
        assert not {name: counters[name] for name in LOST if counters[name]}


@of_uml
@pytest.mark.network("packet sockets", guests=2, workers=2, kind=Interfaces)
class TestInterface(Tunnel):
    """The selftests show that each kind of packet comes through, those in VLANs too, so a few tools are enough. The
    device's process has CAP_NET_RAW when it starts, and nothing else."""

    kinds = FEW

    def test_counters(self, network):
        went_through(network)


@of_uml
@pytest.mark.network("a packet socket and rxe", guests=2, kind=InterfaceToRxe, others={2: {"rdma": "rxe"}})
class TestInterfaceToRxe:
    """The kernel takes trains apart for rxe, whose ICRCs judge how."""

    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize("case", TO_RXE)
    def test_tool(self, case, direction, network, results):
        pair = [network.guests[at] for at in DIRECTIONS[direction]]
        chosen = RXE_CASES[case]
        names = tools.give_addresses(pair, ("IPv4", "IPv6"))[chosen.family]
        tools.report(results, chosen, pair, names, HANG_SECONDS, f"packet socket, {direction}: ")

    def test_counters(self, network):
        went_through(network)

    def test_objects(self, network, results):
        networks.agree(results, network, "packet socket and rxe: ")
