# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Hosts over a network that loses, reorders, delays, duplicates and corrupts packets."""

import pytest

from virtio_rdma.guests.cable import Cabled
from virtio_rdma.tests import networks, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import Program, seed_of

# What the cable does to packets, and what it counts of it (impair/src/faults.rs).
COUNTERS = {"loss": "lost", "duplicate": "duplicated", "corrupt": "corrupted", "reorder": "reordered",
            "delay": "delayed"}
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
}
# The seeds of the cable. The others follow from the seed of the suite.
SEEDS = {name: number for number, name in enumerate(FAULTS) if "random" not in name}


def perftest():
    """Yields messages of 2 bytes to 8 MiB of each operation, and atomics."""
    for tool in ("ib_write_bw -a", "ib_read_bw -a", "ib_send_bw -a", "ib_atomic_bw"):
        count = 5 if "-a" in tool else 500
        command = f"{tool} -F -n {count}"
        yield tools.Case(tool, f"{command} -d {{d1}} -x {{g1}}", tools.TCP.format(18515),
                         f"{command} -d {{d2}} -x {{g2}} {{t1}}", "#bytes")


CASES = {case.name: case for case in perftest()}


@pytest.mark.network("a bad network", guests=2, workers=2, kind=Cabled)
class TestBadNetwork:
    """No effect is lost or doubled, whatever the network does."""

    @pytest.fixture
    def faults(self, request, network, results):
        """Has the cable do something to packets."""
        chosen = request.param
        network.cable.impair(seed=SEEDS.get(chosen, int(seed_of(chosen), 0)), **FAULTS[chosen])
        yield chosen
        results.note(f"{chosen}: {network.cable.impair()}")

    @pytest.mark.parametrize("faults", FAULTS, indirect=True)
    def test_program(self, faults, network, platform, results):
        both = [Program(results, platform, "verbs/bad_network.py", guest,
                        label=f"{faults}: guest {guest.number} of 2: ") for guest in network.guests]
        for each in both:
            each.finish()
        counted = network.cable.impair()
        results.note(f"{faults}: {counted}")
        missed = [name for name in FAULTS[faults] if name in COUNTERS and not counted[COUNTERS[name]]]
        results.result(f"{faults}: packets meet it", not missed)

    @pytest.mark.parametrize("faults", ["1 % loss", "5 % loss", "everything"], indirect=True)
    @pytest.mark.parametrize("case", CASES)
    def test_tool(self, case, faults, network, results):
        tools.report(results, CASES[case], network.guests, tools.names_of(*network.guests), HANG_SECONDS,
                     f"{faults}: ")

    def test_objects(self, network, results):
        networks.agree(results, network)
