# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA through packet sockets on network interfaces of the host."""

import pytest

from virtio_rdma.guests.interfaces import Interfaces
from virtio_rdma.tests.test_tunnel import Tunnel

# What comes for a group without members is nobody's (rx_unclaimed).
LOST = ("tx_lost", "tx_too_long", "rx_lost", "rx_error")


@pytest.mark.network("packet sockets", guests=2, workers=2, kind=Interfaces)
class TestInterface(Tunnel):
    """What runs over a tunnel runs here too. The device's process has CAP_NET_RAW when it starts, and nothing else."""

    def test_counters(self, network, results):  # pylint: disable=unused-argument
        """Everything went through the sockets, and nothing was lost."""
        for counters in network.uplink_status().values():
            assert all(counters[name] for name in ("tx_frames", "rx_frames")), counters
            assert not {name: counters[name] for name in LOST if counters[name]}
