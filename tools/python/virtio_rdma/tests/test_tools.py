# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite tools: what others wrote to try RDMA, between two guests: the tools of ibverbs-utils and rdmacm-utils,
qperf, and perftest's matrix."""

import signal

import pytest

from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import ALONE, Program

# How many connections of the RDMA CM follow one another: more than there are QPs at a time. An emulated guest with a
# debug kernel makes some a second.
CONNECTIONS = {"plain": "10000", "debug": "1000"}
# What cannot run, and why.
IMPOSSIBLE = {
    # Its address handle has no GRH, which no port of RoCE takes (ds_add_qp_dest() in rsocket.c).
    "udpong": "datagrams of rsockets do not know RoCE",
    # cma_iboe_join_multicast(), ENOTSUPP
    "mckey to an IPv6 group": "the kernel joins no IPv6 group on a port of RoCE v2",
    # Without the RDMA CM it knows LIDs alone: its QPs and address handles have no GRH.
    "qperf uc_*, ud_*": "qperf does not know RoCE",
}
CASES = {str(case): case for case in tools.everything()}

each_guest = pytest.mark.parametrize("number", [1, 2])


@pytest.fixture(scope="class")
def names(network):
    """The names in the command lines of cases, by family."""
    return tools.give_addresses(network.guests, tools.USUAL)


@pytest.mark.network("two guests", guests=2)
class TestTools:
    """The cases, one after the other, in two guests."""

    @each_guest
    @pytest.mark.parametrize("command", ["ibv_devices", "ibv_devinfo -v -d {}", "ibstat {}", "rdma link show"],
                             ids=["ibv_devices", "ibv_devinfo", "ibstat", "rdma link show"])
    def test_shows_the_device(self, number, command, network, results, request):
        guest = network.guests[number - 1]
        device = guest.link[0]
        status, text = guest.run(command.format(device), timeout=HANG_SECONDS)
        passed = status == 0 and device in text
        if not passed:
            results.note(text)
        results.result(f"guest {number}: {command.split(' -')[0].split(' {')[0]}", passed)

    @each_guest
    def test_ibv_asyncwatch(self, number, network, results):
        """It sees the port go down and come up."""
        guest = network.guests[number - 1]
        job = guest.start(f"exec stdbuf -oL ibv_asyncwatch -d {guest.link[0]}")
        passed = job.shows("async event FD", HANG_SECONDS)
        for state, event in (("down", "IBV_EVENT_PORT_ERR"), ("up", "IBV_EVENT_PORT_ACTIVE")):
            guest.check(f"ip link set eth0 {state}")
            passed = passed and job.shows(event, HANG_SECONDS)
        job.kill(signal.SIGTERM)
        if not passed:
            results.note(job.text)
        results.result(f"guest {number}: ibv_asyncwatch", passed)

    @pytest.mark.parametrize("case", CASES)
    def test_tool(self, case, network, names, results):
        chosen = CASES[case]
        if chosen.kind == "qperf" and network.guests[0].run("command -v qperf")[0]:
            pytest.skip("the guests have no qperf")
        tools.report(results, chosen, network.guests, names[chosen.family], HANG_SECONDS)

    @pytest.mark.parametrize("name", IMPOSSIBLE)
    def test_impossible(self, name, results):
        results.result(name, skip=IMPOSSIBLE[name])

    def test_connections(self, network, platform, results):
        env = ALONE | {"CONNECTIONS": CONNECTIONS[platform.kernel]}
        Program(results, platform, "connections.sh", network.guests[0], env).finish()

    def test_objects(self, network, results):
        networks.agree(results, network)
