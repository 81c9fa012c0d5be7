# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What operators do with a running device: they add guests and remove them, watch them, and count."""

import json
import os
import subprocess
import time

import pytest

from virtio_rdma.common import BUILD
from virtio_rdma.guests.late import Late
from virtio_rdma.guests.supervised import Supervised, faults
from virtio_rdma.guests.upgraded import Upgraded
from virtio_rdma.tests import networks

# The bound on what the device's process notes by itself, in seconds.
SOON = 60
# How many guests a process has at most in these tests.
GUESTS = 300
# The TCP ports of the programs that exchange data, a connection each.
PORTS = (18601, 18602)


@pytest.fixture(scope="class", name="watch")
def watching(network):
    """What "virtio-rdmad watch" prints, as objects, for as long as the tests of a class run."""
    command = [os.path.join(BUILD, "virtio-rdmad"), "watch", "--json",
               "--control", os.path.join(network.dir, "control.sock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout
        events = map(json.loads, process.stdout)
        assert next(events)["event"] == "watching"
        yield events
        process.terminate()


def start_traffic(network):
    """Starts a program in each guest, and waits until data can flow from the second to the first. Returns both."""
    first, second = network.guests
    command = "ib_write_bw -d {} -x {} -D 600 -F"
    server = first.start(command.format(*first.link))
    first.check("until ss -ltn | grep -q :18515; do sleep 0.1; done", timeout=SOON)
    client = second.start(f"{command.format(*second.link)} {first.address}")
    wait_connected(network, 1)
    return server, client


def wait_connected(network, count):
    """Waits until the second guest has this many connections or more."""
    name = network.guests[1].name
    wait_until(lambda: sum(qp["type"] == "RC" and qp["state"] == "RTS"
                           for qp in network.device_status()[name]["qps"]) >= count)


def wait_until(holds):
    """Waits until something holds that the device's process notes by itself."""
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.network("a guest that was added", guests=2, kind=Late)
class TestGuests:
    """Guest 2 is added to the device's process, which serves guest 1 already."""

    def test_data_flows(self, network, results):
        networks.data_flows(results, network, "a guest that was added")

    def test_errors_are_told(self, network, watch):
        """A program whose peer is killed gets an error, and whoever watches is told which QP it was."""
        first, second = network.guests
        jobs = start_traffic(network)
        first.check("pkill -9 ib_write_bw")
        event = next(event for event in watch if event["event"] == "qp_error")
        assert (event["guest"], event["reason"]) == (second.name, "RETRY_EXC_ERR"), event
        for job in jobs:
            assert job.wait(networks.HANG_SECONDS) != 0

    def test_metrics(self, network):
        """The counters of both guests are printed, and only those that are there."""
        status, text = network.operate("metrics")
        assert (status, text.splitlines()[-1]) == (0, "# EOF")
        for guest in network.guests:
            assert f'virtio_rdma_guest_started{{guest="{guest.name}",network="default"}} 1' in text.splitlines()

    def test_limits(self, network):
        """What a guest may have changes while it runs, and the metrics tell what it has and what it may have."""
        guest = network.guests[1]
        assert network.operate("set", guest.name, "mrs=20") == (0, "")
        job = guest.start("exec /mnt/virtio_rdma/verbs/hold.py objects", {"RDMA_DEVICE": guest.link[0]})
        assert job.shows("ENOMEM", SOON), job.text
        status, text = network.operate("metrics")
        labels = f'{{guest="{guest.name}",network="default",kind="mr"}}'
        for name in ("objects", "limits"):
            assert f"virtio_rdma_guest_{name}{labels} 20" in text.splitlines(), (status, text)
        job.kill()
        assert network.operate("set", guest.name, "mrs=default") == (0, "")
        assert job.wait(networks.HANG_SECONDS) == 0

    def test_leaves_and_returns(self, network, watch, results):
        """A guest whose VMM is connected is not removed at once. It is removed when its VMM leaves, and can be added
        once more, while the other guest goes on."""
        guest = network.guests[1]
        status, text = network.operate("remove", guest.name)
        assert status != 0
        assert "GuestConnected" in text
        assert network.operate("remove", "--drain", guest.name)[0] == 0
        networks.data_flows(results, network, "a guest that is to leave")
        guest.stop()
        event = next(event for event in watch if event["event"] == "disconnected")
        assert event["guest"] == guest.name, event
        wait_until(lambda: guest.name not in network.device_status())
        network.add(guest)
        guest.start_process()
        guest.wait_ready(guest.agent.boots + 1)
        network.rdma_up(guest, "virtio")
        networks.data_flows(results, network, "a guest that has returned")

    def test_objects(self, network, results):
        networks.agree(results, network, "a guest that was added: ")
        # Its socket goes with it, not with the process.
        assert network.operate("remove", "--drain", network.guests[1].name)[0] == 0


def under_traffic(network, times, disturb):
    """Calls a function this often while programs exchange data, which they check. No message may be lost, doubled or
    altered, and no QP may end. Data flows before each call, and behind the last one."""
    jobs = [guest.start(f"cd /mnt/virtio_rdma/verbs && exec ./traffic_hosts.py {port}", {"RDMA_DEVICE": guest.link[0]})
            for guest in network.guests for port in PORTS]
    clients = jobs[len(PORTS):]
    go_on(clients)
    for _ in range(times):
        disturb()
        go_on(clients)
    for job in clients:
        job.kill()
    for job in jobs:
        assert job.wait(networks.HANG_SECONDS) == 0, job.text


def go_on(jobs):
    """Waits until data has flowed in each program since this moment."""
    for job, said in [(job, job.text.count("running")) for job in jobs]:
        # What it says first may be of earlier.
        assert job.shows("running", networks.HANG_SECONDS, said + 2), job.text


@pytest.mark.network("a device that is restarted", guests=2, kind=Supervised)
class TestRestart:
    """The device's process is restarted, and its guests do not notice."""

    def test_data(self, network):
        """No message is lost, doubled or altered, and no QP ends."""
        under_traffic(network, faults(20), network.restart)

    def test_connections(self, network):
        """The RDMA CM makes connections meanwhile, and data on them is what was sent."""
        first, second = network.guests
        server = first.start("rping -s -P")
        ping = f"rping -c -a {first.address} -C 10 -V -S 4096 >/tmp/rping 2>&1"
        client = second.start(f"until {ping}; do sleep 0.1; done; while echo connected && [ ! -e /tmp/stop ]; do "
                              f"{ping} || {{ cat /tmp/rping; exit 1; }}; done")
        for number in range(faults(10)):
            assert client.shows("connected", SOON, number + 1), client.text
            network.restart()
        second.check("touch /tmp/stop")
        assert client.wait(networks.HANG_SECONDS) == 0, client.text
        server.kill()
        server.wait(networks.HANG_SECONDS)

    def test_hundreds(self, network):
        """The process has 300 guests, most of which were added while it ran, and has them after each restart."""
        there = len(network.guests)
        names = [f"added{number}" for number in range(GUESTS - there)]
        for name in names:
            # With fewer queues a guest takes fewer descriptors of the process.
            spec = f"name={name},rings=off,max-qp=1,max-cq=1,vhost-user={os.path.join(network.dir, name)}.sock"
            assert network.operate("add", "--guest", spec) == (0, "")
        under_traffic(network, faults(5), network.restart)
        assert len(network.device_status()) == GUESTS
        for name in names:
            assert network.operate("remove", name) == (0, "")
        assert len(network.device_status()) == there

    def test_afterwards(self, network, results):
        networks.data_flows(results, network, "after restarts")
        results.note(f"pauses of guests in ms: {network.pauses()}")
        networks.agree(results, network, "after restarts: ")


@pytest.mark.network("a device that fails to start, and one of another version", guests=2, kind=Upgraded,
                     breaks={"device": "a version that cannot read another's state asks for a reset"})
class TestUpgrade:
    """The device's process fails to start, and is replaced by an earlier version and by this one again."""

    def test_failed_starts(self, network):
        """Twenty processes in a row that cannot start cost the guests nothing."""
        under_traffic(network, 1, lambda: network.fail(20))

    def test_versions(self, network, request, results):
        """Data flows, and is what was sent, after an earlier version has taken over from this one, and this one from
        the earlier one. A device may need a reset in between, which its driver does by itself."""
        earlier = request.config.option.earlier
        if not earlier:
            pytest.skip("this checkout does not have the revision that tools/test/earlier.revision names")
        current = network.command
        before = [identity(guest) for guest in network.guests]
        for command, name in (([earlier], "the earlier version"), (current, "this version"),
                              ([earlier], "the earlier one"), (current[:1], "this one, which withholds nothing")):
            network.change(command)
            network.wait_recovered()
            for guest, names in zip(network.guests, before):
                wait_until(lambda guest=guest, names=names: identity(guest) == names)
            networks.data_flows(results, network, name)

    def test_afterwards(self, network, results):
        networks.agree(results, network, "after upgrades: ")


def identity(guest):
    """Returns the name of a guest's RDMA device, and its GIDs."""
    return guest.check("cd /sys/class/infiniband && ls && grep -hv '^0000:0000:0000:0000:0000:0000:0000:0000$' "
                       "*/node_guid */ports/1/gids/* 2>/dev/null")


@pytest.mark.network("a device that is killed", guests=2, kind=Supervised,
                     breaks={"device": "its process is killed"})
class TestCrash:
    """The device's process is killed. Its guests lose what they had, and get their devices back by themselves."""

    def test_recovers(self, network, results):
        before = [identity(guest) for guest in network.guests]
        for round_ in range(faults(10)):
            jobs = start_traffic(network)
            network.crash()
            for job in jobs:
                assert job.wait(networks.HANG_SECONDS) != 0, job.text
            network.wait_recovered()
            for guest, name in zip(network.guests, before):
                wait_until(lambda guest=guest, name=name: identity(guest) == name)
            networks.data_flows(results, network, f"after kill {round_ + 1}")

    def test_objects(self, network, results):
        networks.agree(results, network, "after kills: ")
