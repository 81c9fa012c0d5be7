# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over the wire, in packets of RoCE v2: guests as on two hosts."""

import pytest

from virtio_rdma.guests.hosts import Hosts
from virtio_rdma.tests import networks
from virtio_rdma.tests.selftests import Program

# Programs that take two hosts.
BETWEEN_HOSTS = ("verbs/rc_hosts.py", "connections.sh")


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
