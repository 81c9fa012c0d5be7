# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Hosts over a network that loses, reorders, delays, duplicates and corrupts packets."""

import pytest

from virtio_rdma.guests.cable import Cabled
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import between, seed_of
from virtio_rdma.tests.test_wire import DIRECTIONS, of_uml

# What the cable does to packets, and what it counts of it (impair/src/faults.rs).
COUNTERS = {"loss": "lost", "duplicate": "duplicated", "corrupt": "corrupted", "reorder": "reordered",
            "delay": "delayed", "mark": "marked"}
# Longer than the time-out of the QPs' retries, 67 ms: what is late then comes behind its repetition.
DELAY_MS = 100
EVERYTHING = {"loss": 0.01, "duplicate": 0.01, "corrupt": 0.01, "reorder": 0.01, "delay": 0.005, "delay_ms": DELAY_MS}
FAULTS = {
    "0.1 % loss": {"loss": 0.001},
    "1 % loss": {"loss": 0.01},
    "5 % loss": {"loss": 0.05},
    "reordering": {"reorder": 0.05},
    "duplication": {"duplicate": 0.05, "delay": 0.005, "delay_ms": DELAY_MS},
    "corruption": {"corrupt": 0.02},
    "everything": EVERYTHING,
    "everything, again": EVERYTHING,
    "everything, random": EVERYTHING,
    "marks of congestion": {"mark": 0.05},
}
# What the device counts of marked packets, and of its answers.
ANSWERS = ("np_ecn_marked_roce_packets", "np_cnp_sent")
# The seeds of the cable. The others follow from the seed of the suite.
SEEDS = {name: number for number, name in enumerate(FAULTS) if "random" not in name}


def perftest(count, *options):
    """Yields messages of each operation, and atomics."""
    for tool in ("ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_atomic_bw"):
        chosen = ("-n 500",) if tool == "ib_atomic_bw" else (*options, f"-n {count}")
        command = " ".join((tool, "-F", *chosen))
        yield tools.Case(" ".join((tool, *chosen)), f"{command} -d {{d1}} -x {{g1}}", tools.TCP.format(18515),
                         f"{command} -d {{d2}} -x {{g2}} {{t1}}", "#bytes")


# Messages of all sizes, from 2 bytes to 8 MiB, and of one size.
ALL_SIZES, ONE_SIZE = [{case.name: case for case in perftest(*how)} for how in ((5, "-a"), (50, "-s 65536"))]
CASES = ALL_SIZES | ONE_SIZE
# Where 5 % are lost, all sizes would take minutes.
UNDER = [*((case, faults) for faults in ("1 % loss", "everything") for case in ALL_SIZES),
         *((case, "5 % loss") for case in ONE_SIZE)]


@pytest.fixture
def faults(request, network, results):
    """Has the cable do something to packets."""
    chosen = request.param
    network.cable.impair(seed=SEEDS.get(chosen, int(seed_of(chosen), 0)), **FAULTS[chosen])
    yield chosen
    network.cable.impair()


def run_program(faults, network, pair, platform, results, prefix=""):
    """Runs the selftest between both guests, and checks that the cable had something to do."""
    between(results, platform, "verbs/bad_network.py", pair, f"{prefix}{faults}: ")
    counted = network.cable.impair(**FAULTS[faults])
    results.note(f"{prefix}{faults}: {counted}")
    missed = [name for name in FAULTS[faults] if name in COUNTERS and not counted[COUNTERS[name]]]
    results.result(f"{prefix}{faults}: packets meet it", not missed)


@of_uml
@pytest.mark.network("a bad network", guests=2, workers=2, kind=Cabled, breaks={"packets": "the cable spoils some"})
class TestBadNetwork:
    """No effect is lost or doubled, whatever the network does."""

    @pytest.mark.parametrize("faults", FAULTS, indirect=True)
    def test_program(self, faults, network, platform, results):
        run_program(faults, network, network.guests, platform, results)

    @pytest.mark.parametrize(("case", "faults"), UNDER, indirect=["faults"])
    def test_tool(self, case, faults, network, results):
        tools.report(results, CASES[case], network.guests, tools.names_of(*network.guests), HANG_SECONDS,
                     f"{faults}: ")

    @pytest.mark.parametrize("faults", ["marks of congestion"], indirect=True)
    def test_answers(self, faults, network, results):
        """Who gets marked packets counts them, and tells their sender; both sides get some."""
        for case in ("ib_write_bw -s 65536 -n 50", "ib_read_bw -s 65536 -n 50"):
            tools.report(results, CASES[case], network.guests, tools.names_of(*network.guests), HANG_SECONDS,
                         f"{faults}: ")
        for name, guest in network.device_status().items():
            results.result(f"{faults}: {name} counts them, and answers", all(guest["counters"][key] for key in ANSWERS))

    def test_objects(self, network, results):
        networks.agree(results, network)


@of_uml
@pytest.mark.network("a bad network and rxe", guests=2, workers=2, kind=Cabled, others={2: {"rdma": "rxe"}},
                     breaks={"packets": "the cable spoils some"})
class TestBadNetworkWithRxe:
    """The same with the kernel's rxe at the other end, which loses packets, or drops them because they are corrupt. An
    ACK that comes late, in the middle of the response to a READ, has rxe complete the READ without its data
    (check_psn() and check_ack() in rxe_comp.c, Linux 7.2.12), so it does not survive a network that duplicates or
    reorders packets."""

    @pytest.mark.parametrize("faults", ["0.1 % loss", "1 % loss", "5 % loss", "corruption"], indirect=True)
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_program(self, faults, direction, network, platform, results):
        pair = [network.guests[at] for at in DIRECTIONS[direction]]
        run_program(faults, network, pair, platform, results, f"{direction}: ")

    @pytest.mark.parametrize("faults", ["1 % loss"], indirect=True)
    @pytest.mark.parametrize("case", ONE_SIZE)
    def test_tool(self, case, faults, network, results):
        tools.report(results, CASES[case], network.guests, tools.names_of(*network.guests), HANG_SECONDS,
                     f"rxe: {faults}: ")

    def test_objects(self, network, results):
        networks.agree(results, network, "rxe: ")
