# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""RDMA over the wire with the rxe of other releases of Linux, because most hosts have an older one than 7.2: a QEMU
guest with virtio-rdma, and one with a kernel of Debian's and its rxe. A network cable is between their bridges, which
loses packets in the last tests. ATOMIC WRITE is left out with Linux 6.1, whose rxe has neither that nor FLUSH.

--peer NAME=DIR names the kernels: a release of Linux, and its directory (tools/vm/peer-kernel, tools/vm/kernel).
"""

import pytest

from virtio_rdma.guests.cable import Cabled
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import between
from virtio_rdma.tests.test_wire import DIRECTIONS, FAMILIES
from virtio_rdma.tests.test_wire_qemu import few

# Each SEND, WRITE, READ and atomic of each service that rxe has, with each path MTU, over IPv4 and IPv6; what a
# responder refuses, and what it is not ready for. The data is compared.
PROGRAM = "verbs/packets_hosts.py rc uc ud invalidate negative_acknowledgements not_ready"
# What rxe has since Linux 6.2.
NEWER = " atomic_write"
OLDER = ("6.1",)
# Where packets are lost: random operations of both sides at a time, after which all memory is compared; atomics that
# are counted; the order of WRITEs and SENDs.
LOSSY = "verbs/bad_network.py both_hosts_at_once atomics_are_counted writes_in_order sends_behind_writes"
LOSS = {"seed": 1, "loss": 0.01}


def cases():
    """Yields tools over each family of addresses."""
    for family in FAMILIES:
        yield from few(family)
        tool = "ib_send_bw -F -n 100"
        yield tools.Case(f"ib_send_bw over {family}", f"{tool} -d {{d1}} -x {{g1}}", tools.TCP.format(18515),
                         f"{tool} -d {{d2}} -x {{g2}} {{t1}}", "#bytes", family=family)


CASES = {str(case): case for case in cases()}
# What runs where packets are lost.
LOSSY_CASES = [name for name in CASES if name in ("ib_write_bw over IPv4", "ib_read_bw over IPv4",
                                                  "ib_send_bw over IPv4", "rping over IPv4")]


def in_order(network, who):
    """Returns the guests of a network, first the one that serves."""
    return [network.guests[at] for at in DIRECTIONS[who]]


def pytest_generate_tests(metafunc):
    if "peer" in metafunc.fixturenames:
        peers = [tuple(text.split("=", 1)) for text in metafunc.config.option.peer]
        metafunc.parametrize("peer", peers, ids=[name for name, _ in peers], scope="class")


@pytest.mark.only(lambda where: where.platform.vmm == "qemu")
@pytest.mark.network("a cable", guests=2, workers=2, mtu=9000, kind=Cabled)
class TestPeers:
    """A guest with virtio-rdma, and one with rxe on its network interface. Either serves."""

    @pytest.fixture(scope="class")
    def changes(self, peer):
        """The second guest's kernel."""
        return {"others": {2: {"rdma": "rxe", "kernel_dir": peer[1]}}}

    @pytest.fixture(scope="class")
    def prefix(self, peer):
        return f"rxe of Linux {peer[0]}: "

    @pytest.fixture(scope="class")
    def names(self, network):
        """The names in the command lines of cases, by who serves and by family."""
        tools.give_addresses(network.guests, FAMILIES)
        return {who: tools.names_by_family(in_order(network, who), FAMILIES) for who in DIRECTIONS}

    @pytest.fixture(scope="class")
    def lossy(self, network, results, prefix):
        """Has the cable lose packets, until the last test of the class is over. Some must have been lost then."""
        network.cable.impair(**LOSS)
        yield network
        counted = network.cable.impair()
        results.note(f"{prefix}{counted}")
        results.result(f"{prefix}packets are lost", counted["lost"] > 0)

    def test_release(self, peer, network, prefix, results):
        """It is that kernel."""
        release = network.guests[1].check("uname -r").strip()
        results.note(f"{prefix}{release}")
        results.result(f"{prefix}guest 2 has this kernel", release.startswith(f"{peer[0]}."))

    @pytest.mark.parametrize("who", DIRECTIONS)
    def test_program(self, who, peer, network, platform, prefix, results):
        pair = in_order(network, who)
        between(results, platform, PROGRAM + NEWER * (peer[0] not in OLDER), pair, f"{prefix}{who}: ")

    @pytest.mark.parametrize("who", DIRECTIONS)
    @pytest.mark.parametrize("case", CASES)
    def test_tool(self, case, who, network, names, prefix, results):
        pair = in_order(network, who)
        chosen = CASES[case]
        tools.report(results, chosen, pair, names[who][chosen.family], HANG_SECONDS, f"{prefix}{who}: ")

    @pytest.mark.parametrize("who", DIRECTIONS)
    def test_lossy_program(self, who, lossy, platform, prefix, results):
        pair = in_order(lossy, who)
        between(results, platform, LOSSY, pair, f"{prefix}1 % loss: {who}: ")

    @pytest.mark.parametrize("who", DIRECTIONS)
    @pytest.mark.parametrize("case", LOSSY_CASES)
    def test_lossy_tool(self, case, who, lossy, names, prefix, results):
        pair = in_order(lossy, who)
        chosen = CASES[case]
        tools.report(results, chosen, pair, names[who][chosen.family], HANG_SECONDS, f"{prefix}1 % loss: {who}: ")

    def test_objects(self, network, prefix, results):
        networks.agree(results, network, prefix)
