# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite ulp-faults: kernel consumers between two guests, while what is below them fails and comes back.

The faults are: the daemon is restarted; the host's link is down; the RDMA device of the target goes and comes back,
then that of the host; the daemon is killed; the host is killed. A consumer that connects again by itself has to, and
its load ends without an error. Where a consumer gives up its disk, the load fails. What a consumer has synced before a
fault is there after it, and nothing hangs.

FAULTS in the environment is how often the daemon is restarted and killed under each load.
"""

import os
import signal
import time

import pytest

from virtio_rdma.common import TOP, Failure
from virtio_rdma.guests.supervised import Supervised, faults
from virtio_rdma.tests import networks, rules
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.ulp import Ulp, is_known, load_driver

# How often a fault comes under one load.
ROUNDS = {("uml", "plain"): 5, ("qemu", "plain"): 3, ("qemu", "debug"): 2}
# The consumers that go on by themselves after a fault. NVMe over Fabrics deletes its controllers if the device goes
# while they are connected, and SRP its disks, whatever they are. 9P and SMC-R never connect again.
RECONNECT = ("nvme", "iser", "srp", "nfs", "smb", "rds")
GO_ON = {"link": RECONNECT, "target": RECONNECT, "goes": ("iser", "nfs", "smb", "rds"),
         "fails": ("nvme", "iser", "nfs", "smb", "rds")}
# The consumers whose target listens at one address, and has to be told to listen again when its RDMA device has gone.
LISTEN_ONCE = ("nvme", "iser", "srp", "9p")
FILE_SYSTEMS = ("nfs", "smb", "9p")
# What has the RDMA device of a guest go, and has it come back (fault.sh).
GOES = {"uml": {"driver unloaded": ("unload_driver", "load_driver"),
                "device unbound": ("unbind_device", "bind_device")},
        "qemu": {"driver unloaded": ("unload_driver", "load_driver"),
                 "PCI function removed": ("remove_function", "find_function")}}
# How long a link is down, in seconds.
DOWN_SECONDS = 10
# How long the driver waits at most for consumers to let go of a device that has failed, in seconds (guest.md).
BACK_SECONDS = 65
# Memory of a host that has little, in MiB.
LITTLE = 160
# Where the script that connects SRP's host to its target is in that guest.
SCRIPT = "/tmp/srp-targets"


class Faulty(Ulp):
    """The steps of one consumer, while faults come. `network` has the guests."""

    # The parameters of the driver. The step that loads it takes them; steps that bring the device back in another way
    # ignore them.
    parameters: tuple[str, ...] = ()

    def __init__(self, results, network, kind, prefix=""):
        super().__init__(results, network.guests, kind, prefix)
        self.network = network
        options = self.host.options
        self.rounds = faults(ROUNDS[options.vmm, options.kernel])
        self.goes = GOES[options.vmm]

    def suffers(self):
        """Returns what happens, one after the other."""
        return (self.is_upgraded, self.link_is_down, self.target_loses_device, self.host_loses_device, self.is_killed)

    def begins(self):
        """The target, and a file system with files whose checksums are known."""
        self.do(self.target, "target_up")
        self.knows_target()
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "write_tree", name="files_written")

    def knows_target(self):
        """The host has what it must know of the target besides its address."""

    def survives(self, name, fault, rounds):
        """A fault comes some times under load: no byte is lost, and the load goes on."""
        job = self.loaded(self.load)
        done = 0
        for _ in range(rounds):
            fault()
            # Two more begin after each fault.
            times = job.text.count("running") + 2
            if not job.shows("running", HANG_SECONDS, times):
                break
            done += 1
        self.result(f"{name}: load_goes_on", done == rounds)
        self.do(self.host, "touch", "/tmp/ulp/stop", name=f"{name}: load_told_to_end")
        passed = job.wait(HANG_SECONDS) == 0
        if not passed:
            self.results.note(job.text)
        self.result(f"{name}: load_unharmed", passed)
        self.reads(name)

    def reads(self, name):
        """The files are as they were written."""
        self.do(self.host, "read_tree", name=f"{name}: files_read")

    def meets(self, what, name, fault, rounds=1):
        """A fault comes, after which the consumer goes on, or does not."""
        if self.kind in GO_ON[what]:
            self.survives(name, fault, rounds)
        else:
            self.breaks(name, fault)

    def breaks(self, name, fault):
        """A fault ends the host's connection under load: the load fails and does not hang, and what was synced before
        is there when the host is connected again."""
        job = self.loaded(self.load)
        fault()
        self.lets_go(name)
        self.result(f"{name}: load_fails", job.wait(HANG_SECONDS) != 0)
        self.connects_again(name)
        self.reads(name)

    def lets_go(self, name):
        """The administrator ends what does not end by itself."""

    def connects_again(self, name):
        """The administrator connects the host again."""
        self.do(self.host, "connect", name=f"{name}: connect_again")

    def is_upgraded(self):
        """The device's process is restarted, and nobody notices."""
        errors = [self.reports(guest) for guest in (self.target, self.host)]
        self.survives("upgrade", self.network.restart, self.rounds)
        self.result("upgrade: nobody notices", errors == [self.reports(guest) for guest in (self.target, self.host)])

    @staticmethod
    def reports(guest):
        """Returns how often the kernel has said that a device failed or a connection was made again."""
        return guest.run("dmesg | grep -ciE 'has failed|reconnect|timeout|error recovery'")[1].strip()

    def is_killed(self):
        """The device's process is killed. The consumer connects again by itself; the target, whose device went as well,
        is made to listen again."""
        self.meets("fails", "kill", self.kill, self.rounds)

    def kill(self):
        """Kills the device's process, and has the target listen again."""
        self.network.crash()
        try:
            self.network.wait_recovered()
        except Failure:
            # What holds the old device.
            for guest in (self.target, self.host):
                self.results.note(guest.run("echo w >/proc/sysrq-trigger; dmesg | tail -n 80")[1])
            raise
        self.has_device()
        self.listens("kill")

    def has_device(self):
        """The host has its device again, and the target does not listen yet."""

    def listens(self, name):
        """Has the target, whose device is another one, listen again."""
        if self.kind in LISTEN_ONCE:
            self.do(self.target, "target_gone", name=f"{name}: target_stops")
            self.do(self.target, "target_back", name=f"{name}: target_listens_again")

    def link_is_down(self):
        """The link of the host is down for a while."""
        words = ("break_link", str(DOWN_SECONDS))
        self.meets("link", "link", lambda: self.fault(self.host, *words, name="link: down and up"))

    def target_loses_device(self):
        """The target's device goes and comes back, in each way that there is."""
        for name, (gone, back) in self.goes.items():
            name = f"target: {name}"

            def fault(name=name, gone=gone, back=back):
                self.fault(self.target, gone, name=f"{name}: device_goes")
                self.fault(self.target, back, *self.parameters, name=f"{name}: device_comes_back")
                self.listens(name)
            self.meets("target", name, fault)

    def host_loses_device(self):
        """The host's device goes and comes back, in each way that there is."""
        for name, (gone, back) in self.goes.items():
            name = f"host: {name}"

            def fault(name=name, gone=gone, back=back):
                self.fault(self.host, gone, name=f"{name}: device_goes")
                self.fault(self.host, back, *self.parameters, name=f"{name}: device_comes_back")
            self.meets("goes", name, fault)

    def host_dies(self):
        """The host is killed under load, and starts again: the target takes it, and what was synced before is there."""
        sums = self.host.check("cat /tmp/ulp/sums")
        self.loaded(self.load)
        self.network.kill_guest(self.host)
        self.do(self.host, "missing", name="host killed: starts_again")
        self.do(self.host, "store_up", name="host killed: place")
        self.host.check(f"mkdir /tmp/ulp/mnt && cat >/tmp/ulp/sums <<'END'\n{sums}END")
        self.do(self.host, "connect", name="host killed: connects")
        self.reads("host killed")

    def finishes(self):
        """Everything is taken down."""
        if self.kind not in FILE_SYSTEMS:
            self.do(self.host, "check_fs", name="ext4_consistent")
        self.do(self.host, "disconnect")
        self.do(self.target, "target_down")
        self.do(self.host, "store_down", name="place_gone")


class FaultyRds(Faulty):
    """Datagrams go there and back, while faults come. RDS connects again by itself, and brings each datagram once."""

    def survives(self, name, fault, rounds):
        server = self.start(self.target, "serve")
        server.shows("listening", HANG_SECONDS)
        super().survives(name, fault, rounds)
        self.result(f"{name}: server_ends", server.wait(HANG_SECONDS) == 0)

    def reads(self, name):
        """There are no files."""


class Faulty9p(Faulty):
    """A mount does not outlive its connection, and in Linux 7.2 the requests that were under way then wait for ever
    (recv_done() of net/9p/trans_rdma.c): the administrator kills the programs, and unmounts. The kernel lets go of the
    host's device only then, so no test removes that device while it is mounted."""

    def suffers(self):
        return (self.is_upgraded, self.link_is_down, self.target_loses_device, self.is_killed)

    def lets_go(self, name):
        self.do(self.host, "lets_go", name=f"{name}: lets_go")

    def is_killed(self):
        """The driver takes the device into service again when the administrator has unmounted."""
        job = self.loaded(self.load)
        admin = self.start(self.host, "lets_go_of_failed", self.host.run("dmesg | grep -c 'has failed'")[1].strip())
        self.kill()
        self.result("kill: lets_go", admin.wait(HANG_SECONDS) == 0)
        self.result("kill: load_fails", job.wait(HANG_SECONDS) != 0)
        self.connects_again("kill")
        self.reads("kill")


class FaultySmc(Faulty):
    """Streams, each of which breaks when its RDMA device or the link goes. The next ones go by RDMA again, but for the
    first one, from which the server learns that the host has lost what the server still has (smc_lib.sh)."""

    def begins(self):
        for guest in (self.target, self.host):
            self.do(guest, "up", name=f"group_of_guest_{guest.number}")
        server = self.start(self.target, "serve")
        server.shows("listening", HANG_SECONDS)
        self.server = server

    def connects_again(self, name):
        self.do(self.target, "note_groups", name=f"{name}: notes_groups_of_server")
        self.do(self.host, "once", name=f"{name}: connects_again")
        self.do(self.target, "wait_for", "given_up", name=f"{name}: server_gives_them_up")

    def reads(self, name):
        self.do(self.host, "ask", "4", name=f"{name}: streams")

    def finishes(self):
        self.server.kill(signal.SIGTERM)
        self.server.wait(HANG_SECONDS)
        for guest in (self.target, self.host):
            self.do(guest, "down_after_aborts", name=f"ends_in_guest_{guest.number}")


class FaultySrp(Faulty):
    """SRP never lets go of a device that has failed, and removes its disks when the driver does not wait for it any
    more, here after 30 s. udev starts tools/srp/srp-targets when there is a device again, and that connects to the
    target as soon as it listens."""

    parameters = ("release_timeout=30",)
    job = None

    def begins(self):
        for guest in (self.target, self.host):
            load_driver(guest, *self.parameters)
        super().begins()
        # On a busy machine a target is away for longer than ib_srp waits if it is not told to.
        self.do(self.host, "fail_after", "60", name="waits_a_minute")

    def host_loses_device(self):
        # ib_srp must give up before the driver does.
        self.do(self.host, "fail_after", "15", name="waits_15_s")
        super().host_loses_device()

    def is_killed(self):
        # What ib_srp looks for in freed requests (ulp.REPORTS) is poison there, and the host's kernel ends.
        if self.host.options.kernel == "debug":
            self.results.result(f"{self.name}: kill", skip="ib_srp of Linux 7.2 uses freed memory")
        else:
            super().is_killed()

    def finishes(self):
        super().finishes()
        for guest in (self.target, self.host):
            load_driver(guest)

    def knows_target(self):
        self.env["GUID"] = self.step(self.target, "guid")[1].strip()
        with open(os.path.join(TOP, "tools/srp/srp-targets"), encoding="ascii") as script:
            self.host.check(f"cat >{SCRIPT} <<'END'\n{script.read()}END\nchmod +x {SCRIPT}")

    def has_device(self):
        self.job = self.start(self.host, "connect_by", SCRIPT)

    def connects_again(self, name):
        job = self.job or self.start(self.host, "connect_by", SCRIPT)
        self.job = None
        connected = job.wait(HANG_SECONDS) == 0
        if not connected:
            self.results.note(job.text)
        self.result(f"{name}: connects_again", connected)
        # A script that finds the target connected has nothing to do.
        self.do(self.host, "connect_by", SCRIPT, name=f"{name}: stays_connected")


class FaultyDirty(Faulty):
    """The host has little memory, and much of it in dirty pages of a file on its disk, while the daemon is killed. What
    the driver needs to take the device into service again must not wait for that disk."""

    # The longest time from the end of a daemon to a device that the drivers have in service, in seconds.
    longest = 0.0

    def __init__(self, *args):
        super().__init__(*args)
        self.load = "load_dirty"

    def suffers(self):
        return (self.is_killed, self.has_enough)

    def kill(self):
        start = time.monotonic()
        super().kill()
        self.longest = max(self.longest, time.monotonic() - start)

    def has_enough(self):
        """The device came back each time, at the first try, and as soon as guest.md says."""
        self.results.note(f"{self.name}: the device was away for up to {self.longest:.1f} s")
        self.result(f"back within {BACK_SECONDS} s", self.longest < BACK_SECONDS)
        self.do(self.host, "memory_sufficed")
        failures = rules.broken(self.host)[rules.FAILURES]
        self.result("fails_no_more_often_than_it_was_killed", failures == self.rounds)


@pytest.fixture(scope="class", name="title")
def title_of(platform, request):
    """What stands in front of the names of results."""
    (guests,) = request.node.get_closest_marker("network").args
    return f"{platform.vmm}, {guests}" if guests else platform.vmm


@pytest.mark.network("", guests=2, kind=Supervised, known=is_known,
                     breaks={"device": "its process is killed, and its PCI function removed"})
class TestFaults:
    """Each consumer, and each fault."""

    @pytest.mark.parametrize("kind", ["nvme", "iser", "srp", "nfs", "smb", "9p"])
    def test_consumer(self, kind, network, title, results):
        ulp = {"srp": FaultySrp, "9p": Faulty9p}.get(kind, Faulty)(results, network, kind, f"{title}: ")
        ulp.run(ulp.begins, *ulp.suffers(), ulp.host_dies, ulp.finishes)

    @pytest.mark.only(lambda where: where.platform.vmm == "uml")
    def test_srq(self, network, title, results):
        """A target with SRQs loses its host, and serves the next one. (RDS keeps connections, and is last.)"""
        ulp = Faulty(results, network, "nvme", f"{title}, SRQs: ")
        ulp.do(ulp.target, "load_target", "use_srq=1")

        def shares():
            ulp.do(ulp.target, "has_srqs")
        ulp.run(ulp.begins, ulp.host_dies, shares, ulp.finishes)
        ulp.do(ulp.target, "load_target")

    def test_smc(self, network, title, results):
        ulp = FaultySmc(results, network, "smc", f"{title}: ")
        ulp.run(ulp.begins, *ulp.suffers(), ulp.finishes)

    def test_rds(self, network, title, results):
        ulp = FaultyRds(results, network, "rds", f"{title}: ")
        ulp.run(*ulp.suffers())

    def test_objects(self, network, results):
        networks.agree(results, network)


@pytest.mark.network("little memory", guests=2, kind=Supervised, known=is_known, others={2: {"memory": LITTLE}},
                     breaks={"device": "its process is killed"})
@pytest.mark.only(lambda where: where.platform.vmm == "uml")
class TestLittleMemory:
    """The host has little memory, and reclaims it by writes to a disk behind the device."""

    def test_dirty(self, network, title, results):
        ulp = FaultyDirty(results, network, "nvme", f"{title}: ")
        ulp.run(ulp.begins, *ulp.suffers(), ulp.finishes)

    def test_objects(self, network, title, results):
        networks.agree(results, network, f"{title}: ")
