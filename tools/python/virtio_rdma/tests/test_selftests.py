# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suites uml, qemu and debug: the kselftests inside guests, and what only shows from outside of the guests."""

import contextlib
import os
import re
import signal
import time

import pytest

from virtio_rdma.guests import hostile, judged
from virtio_rdma.tests import features, networks, selftests, tools
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.selftests import ALONE, SLEEPS, Orderly, Program, between, sleeps

# Where other suites run beside this one (--brief), it is brief: emulated guests run some of the programs, each time
# others, and a hostile device does less. In percent, by the VMM; SEED chooses the same programs again.
BRIEF_PROGRAMS = {"uml": 100, "qemu": 12}
BRIEF_HOSTILE = {"uml": 50, "qemu": 20}
# An emulated guest with a debug kernel meets another half of what a device can do wrong in each run. It leaves out
# what measures and what pins a million pages.
SLOW_HOSTILE = 50
TOO_MUCH = ("perftest.sh", "verbs/mr_large.py")
DATA_PATH = ("kverbs.sh", "nvme.sh", "verbs/rc_", "verbs/uc.", "verbs/mcast.", "verbs/mw.", "verbs/cq_moderation.")
ABOUT_EXTENSIONS = DATA_PATH + ("counters.sh", "netdev.sh", "verbs/bad_arguments.", "verbs/dmabuf.", "verbs/events.",
                                "verbs/modify_qp.", "verbs/mr_large.", "verbs/rings_abi.")
ABOUT_RINGS = ("kverbs.sh", "verbs/rc_completion.", "verbs/rc_data.", "verbs/rc_rings.", "verbs/rc_srq.",
               "verbs/rings_")
BETWEEN_HOSTS = ("verbs/rc_hosts.py", "verbs/vlan_hosts.py", "verbs/mcast_hosts.py", "perftest.sh", "connections.sh")
# How many objects a guest can have beside the kernel's own.
ALL_OBJECTS = {"SCALE_QPS": "16384", "SCALE_MRS": "100000"}
# What a driver does while it is judged. A program that takes the driver from its device (verbs/rings_named.py) is not
# here: user-mode Linux passes on no reset, and the driver then takes its buffers back from queues that still run.
JUDGED_BY = {
    "rings": ("verbs/modify_qp.", "verbs/mw.", "verbs/rc_data.", "verbs/rc_rings.", "verbs/rc_srq.", "verbs/rings_abi.",
              "verbs/uc."),
    "virtqueues": ("verbs/modify_qp.", "verbs/rc_data.", "verbs/uc."),
}
# Memory of a guest in huge pages, in MiB, and what it runs.
HUGE_GUEST = 1024
IN_HUGE_PAGES = ("verbs/mr_large.", "verbs/mw.", "verbs/rc_data.", "verbs/rc_rings.")
# Memory of a guest that registers 5 GiB of it, in MiB, and what the machine must have to spare for that.
LARGE = 7 << 10
SPARE = 9 << 10
# Memory that a guest gets while it runs, in MiB, and the size of an MR in it, which is more than the guest has without.
PLUGGABLE = 8 << 10
LARGER = 1 << 10
# How the device says that it cannot map memory of a guest.
NO_MEMORY = "the device does not have this memory"
# The offset of the transport's bit in /sys/bus/virtio/.../features.
F_ORDER_PLATFORM = 36
RINGS = features.RINGS

# virtio_uml takes the end of the file of interrupts for an interrupt, over and over, and warns of each. It warns again
# of each queue that it tells a dead device to disable.
DEAD_TRANSPORT = re.compile(r"WARNING: arch/um/drivers/virtio_uml\.c:\d+ at vu_(interrupt|del_vqs)\+")
# The virtio core warns of a device whose status is not 0 when its driver is gone. That of a device that is not there
# reads as ones.
ABSENT_DEVICE = re.compile(r"WARNING: drivers/virtio/virtio\.c:\d+ at virtio_dev_remove\+")

both_paths = pytest.mark.parametrize("path", ["rings", "virtqueues"], indirect=True, scope="class")
only = pytest.mark.only


def network(title, **options):
    """Marks a class of tests with its guests. The device has two workers, so that those of two guests get into each
    other's way."""
    return pytest.mark.network(title, workers=2, **options)


def starts_with(*kinds):
    """Returns what selects programs of one guest whose paths begin so."""
    return staticmethod(lambda _where, program: program.startswith(kinds) and program not in BETWEEN_HOSTS)


def pytest_generate_tests(metafunc):
    if "program" in metafunc.fixturenames:
        (platform,) = metafunc.config.option.platform
        metafunc.parametrize("program", selftests.programs(platform.share))


@network("one guest")
@both_paths
class TestOneGuest:
    """Each selftest in one guest. Without rings, those that post and poll."""

    brief_percent = BRIEF_PROGRAMS

    @staticmethod
    def selects(where, program):
        if where.platform.is_slow and program in TOO_MUCH:
            return False
        if where.path == "virtqueues":
            return program.startswith(DATA_PATH) and program not in BETWEEN_HOSTS
        return not program.endswith("_hosts.py") and program != SLEEPS

    @only(lambda where: where.path == "rings")
    def test_features(self, guest, results):
        """The default guest has all features of the specification, so no program leaves one out."""
        missing = features.missing(guest)
        if missing:
            results.note("missing: " + "; ".join(missing))
        results.result("the default guest has all features", not missing)

    @only(lambda where: where.path == "rings")
    @pytest.mark.parametrize("command", ["perftest.sh", "verbs/rc_data.py"])
    def test_no_device(self, command, guest, results):
        """A program that cannot open the device under test fails: a skip would pass for a device that works."""
        status, text = guest.run(f"cd /mnt/virtio_rdma && RDMA_DEVICE=absent ./{command}", timeout=HANG_SECONDS)
        results.note(text)
        results.result(f"{command} fails without its device", status == 1 and "not ok 1 has_a_device" in text)

    def test_program(self, program, guest, platform, label, results):
        Program(results, platform, program, guest, ALONE, label).finish()

    def test_objects(self, network, results):
        networks.agree(results, network)


@network("two guests", guests=2)
@both_paths
@only(lambda where: where.path == "rings" or where.platform.vmm == "uml" or not where.brief)
class TestTwoGuests:
    """The selftests that take two hosts, and guests that restart."""

    @staticmethod
    def selects(where, program):
        return program in BETWEEN_HOSTS and not (where.platform.is_slow and program in TOO_MUCH)

    def test_program(self, program, network, platform, label, results):
        """Guest 2's results are what the program finds; guest 1's tell whether it agrees."""
        between(results, platform, program, network.guests, label)

    def test_objects(self, network, results):
        networks.agree(results, network)

    @only(lambda where: where.path == "rings")
    def test_restart_under_traffic(self, network, results):
        second = network.guests[1]
        networks.data_flows(results, network, "two guests before a restart")
        traffic(results, second, "traffic before a restart")
        networks.restart(network, second)
        networks.data_flows(results, network, "guest 2 restarted under its traffic")

    @only(lambda where: where.path == "rings")
    def test_first_connection(self, network, results):
        """A guest is killed with a connection open, and starts again. The other one, which still has that connection,
        does not take the next one for it, and refuse it."""
        first, second = network.guests
        server = first.start(f"exec rping -s -P -a {first.address}")
        first.check(f"until {tools.CM}; do sleep 0.1; done", timeout=HANG_SECONDS)
        client = f"exec rping -c -a {first.address}"
        opens = second.start(f"{client} -v").shows("ping data", HANG_SECONDS)
        results.result("a connection before a guest is killed", opens)
        network.kill_guest(second)
        status, text = second.run(f"{client} -V -C 10", timeout=HANG_SECONDS)
        if status:
            results.note(text)
        results.result("the first connection after that", status == 0)
        server.kill(signal.SIGKILL)
        server.wait(HANG_SECONDS)

    @only(lambda where: where.path == "rings" and not where.platform.is_slow)
    @pytest.mark.parametrize("number", [1, 2])
    def test_restart(self, number, network, results):
        networks.restart(network, network.guests[number - 1])
        networks.data_flows(results, network, f"guest {number} restarted")


def traffic(results, guest, name):
    """Starts a program that uses the device until that is gone, and returns its job once it does."""
    job = guest.start("cd /mnt/virtio_rdma/verbs && exec ./traffic.py")
    runs = job.shows("running", HANG_SECONDS)
    if not runs:
        results.note(job.text)
    results.result(name, runs and job.status is None)
    return job


@network("a hostile device", kind=hostile.Hostile)
@both_paths
@only(lambda where: where.path == "rings" or where.platform.vmm == "uml")
class TestHostileDevice:
    """A device that misbehaves."""

    def test_hostile(self, guest, network, platform, label, results, request):
        """The selftest that tells the device what to do wrong."""
        percent = BRIEF_HOSTILE[platform.vmm] if request.config.option.brief else 100
        if platform.is_slow:
            percent = percent * SLOW_HOSTILE // 100
        transport = "vfio-user" if platform.vmm == "qemu" else "vhost-user"
        env = ALONE | {"HOSTILE_TRANSPORT": transport}
        if percent < 100:
            env["TESTS_PERCENT"] = str(percent)
        Orderly(results, platform, "verbs/hostile.py", guest, network, env=env, label=label).finish()


def reserve_huge_pages(count, stack):
    """Has count free huge pages of 2 MiB until the stack ends, or skips the test."""
    path = "/sys/kernel/mm/hugepages/hugepages-2048kB/"

    def value(name):
        with open(path + name, encoding="ascii") as file:
            return int(file.read())

    def want(total):
        with open(path + "nr_hugepages", "w", encoding="ascii") as file:
            file.write(str(total))

    try:
        before, free = value("nr_hugepages"), value("free_hugepages")
        if free < count:
            want(before + count - free)
            stack.callback(want, before)
            free = value("free_hugepages")
    except OSError as error:
        pytest.skip(f"no {count} huge pages of 2 MiB: {error}")
    if free < count:
        pytest.skip(f"there are {free} free huge pages of 2 MiB, and {count} are needed")


@network("one guest in huge pages", memory=HUGE_GUEST, hugetlb=True)
@only(lambda where: where.platform.vmm == "qemu" and where.platform.kernel != "debug")
class TestHugePages:
    """A guest whose memory is in hugetlbfs: QEMU gives the device pieces of it that begin and end within huge pages."""

    brief_percent = BRIEF_PROGRAMS
    selects = starts_with(*IN_HUGE_PAGES)

    @pytest.fixture(scope="class", autouse=True)
    def pages(self):
        with contextlib.ExitStack() as stack:
            reserve_huge_pages(HUGE_GUEST // 2, stack)
            yield

    def test_program(self, program, pages, guest, platform, results):
        Program(results, platform, program, guest, ALONE, "huge pages: ").finish()

    def test_objects(self, network, results):
        networks.agree(results, network)


def became(holds):
    """Waits until something holds that the guest does by itself. Returns whether it does."""
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@network("a guest whose memory is plugged", pluggable=PLUGGABLE)
@only(lambda where: where.platform.vmm == "qemu" and where.platform.kernel == "stock" and not where.brief)
class TestPluggedMemory:
    """A guest gets memory from virtio-mem while it runs, block by block, and gives it back while an MR lies in it."""

    def test_plugged(self, network, guest, results):
        # The kernel's own zone: pinned memory has no other.
        guest.check("modprobe virtio_mem && echo online_kernel >/sys/devices/system/memory/auto_online_blocks")
        guest.plug(PLUGGABLE)
        results.result("memory is plugged", became(lambda: guest.plugged() == PLUGGABLE))
        job = self.start(guest)
        results.result("data flows in an MR that is larger than the memory of the boot",
                       job.shows("running", HANG_SECONDS))
        guest.plug(0)
        results.result("memory that no MR has is unplugged", became(lambda: guest.plugged() < PLUGGABLE // 2))
        results.note(f"{guest.plugged()} MiB stay plugged under an MR of {LARGER} MiB")
        guest.plug(PLUGGABLE)
        results.result("and is plugged again", became(lambda: guest.plugged() == PLUGGABLE))
        self.ends(results, guest, job, "data was what was written")
        guest.plug(0)
        results.result("all memory but what the kernel uses is unplugged",
                       became(lambda: guest.plugged() < LARGER))
        with open(os.path.join(network.dir, "virtio-rdmad.log"), encoding="utf-8") as log:
            results.result("the device took each change of memory", NO_MEMORY not in log.read())

    @staticmethod
    def start(guest):
        """Starts traffic in an MR of LARGER MiB."""
        return guest.start(f"rm -f /tmp/stop; cd /mnt/virtio_rdma/verbs && exec ./plugged.py {LARGER}",
                           {"RDMA_DEVICE": guest.link[0]})

    @staticmethod
    def ends(results, guest, job, name):
        guest.check("touch /tmp/stop")
        status = job.wait(HANG_SECONDS)
        results.note(job.text)
        results.result(name, status == 0)

    def test_objects(self, network, results):
        networks.agree(results, network)


@network("a guest with an IOMMU that does not translate", iommu="intel_iommu=on iommu=pt")
@only(lambda where: where.platform.vmm == "qemu" and where.platform.kernel == "stock" and not where.brief)
class TestIommu:
    """A virtual IOMMU, with identical addresses: the device has the guest's memory as without one."""

    selects = starts_with("verbs/rc_data.", "verbs/mw.")

    def test_program(self, program, guest, platform, results):
        Program(results, platform, program, guest, ALONE, "IOMMU: ").finish()

    def test_objects(self, network, results):
        networks.agree(results, network)


@network("a guest that sleeps", guests=2, serial=True)
@both_paths
@only(lambda where: where.platform.vmm == "qemu" and not where.brief)
class TestSleep:
    """A guest that sleeps in memory, and with rings on disk as well."""

    @pytest.fixture(scope="class")
    def changes(self, path):
        return {"swap": path == "rings"}

    def test_suspend(self, network, platform, label, results):
        sleeps(results, network, platform, label)

    def test_objects(self, network, results):
        networks.agree(results, network)


@network("a device without extensions", kind=hostile.Bare)
@only(lambda where: where.platform.vmm == "uml")
class TestNoExtensions:
    """The selftests of what extensions are about, which skip or see that the driver refuses it."""

    brief_percent = BRIEF_PROGRAMS
    selects = starts_with(*ABOUT_EXTENSIONS)

    def test_program(self, program, guest, platform, results):
        Program(results, platform, program, guest, ALONE, "no extensions: ").finish()


@network("a device with bits that lack what they require", kind=hostile.Groundless)
@only(lambda where: where.platform.vmm == "uml")
class TestGroundless:
    """The driver accepts no feature bit without those that it requires. Virtqueues carry the data."""

    selects = starts_with("verbs/rc_data.py")

    def test_features(self, guest, results):
        agreed = features.accepted(guest)
        dependents = features.dependents(RINGS)
        if agreed & dependents:
            results.note(f"accepted: {sorted(agreed & dependents)}")
        results.result("no rings: nothing that requires them", dependents and not agreed & dependents)
        results.result("no rings: all else", agreed | {RINGS} | dependents == {name for name, _ in features.bits()})

    def test_program(self, program, guest, platform, results):
        Program(results, platform, program, guest, ALONE, "no rings: ").finish()


@network("a device behind a bus", kind=hostile.Bus)
@only(lambda where: where.platform.vmm == "uml")
class TestBehindABus:
    """The driver accepts VIRTIO_F_ORDER_PLATFORM together with VIRTIO_RDMA_F_RINGS. Then kernel and programs execute
    the platform's barriers for devices. This device runs on the same processors, so these tests do not show whether
    the barriers are the right ones."""

    selects = starts_with(*ABOUT_RINGS)

    def test_features(self, guest, results):
        agreed = features.accepted(guest)
        results.result("behind a bus: the driver accepts it", features.negotiated(guest)[F_ORDER_PLATFORM] == "1")
        results.result("behind a bus: rings", RINGS in agreed)
        other = {features.VIRTQUEUES} | features.dependents(features.VIRTQUEUES)
        missing = {name for name, _ in features.bits()} - agreed - other
        if missing:
            results.note(f"missing: {sorted(missing)}")
        results.result("behind a bus: all else", not missing)

    def test_program(self, program, guest, platform, results):
        Program(results, platform, program, guest, ALONE, "behind a bus: ").finish()


@network("a driver that is judged", kind=judged.Judged)
@only(lambda where: where.platform.vmm == "uml")
@both_paths
class TestJudgedDriver:
    """The driver and the provider keep the specification's clauses for drivers, as far as a device sees that by what
    these programs make them do."""

    @staticmethod
    def selects(where, program):
        return program.startswith(JUDGED_BY[where.path])

    def test_program(self, program, guest, platform, results, label):
        Program(results, platform, program, guest, ALONE, f"judged, {label}").finish()


@network("one guest with much memory", memory=LARGE)
@only(lambda where: where.platform.vmm == "uml")
class TestMuchMemory:
    """A guest with more memory than others, where this machine has as much."""

    @pytest.fixture(scope="class", autouse=True)
    def spare(self):
        with open("/proc/meminfo", encoding="ascii") as file:
            values = dict(line.split(":") for line in file)
        if int(values["MemAvailable"].split()[0]) >> 10 < SPARE:
            pytest.skip(f"this machine has less than {SPARE} MiB to spare")

    def test_large_regions(self, spare, guest, platform, results):
        Program(results, platform, "verbs/mr_large.py pages", guest, ALONE, "much memory: ").finish()

    def test_objects(self, spare, network, results):
        networks.agree(results, network)


@network("one guest with all objects")
@only(lambda where: where.platform.vmm == "uml" and not where.brief)
class TestAllObjects:
    """As many QPs, CQs and MRs as a guest is to be able to have."""

    def test_scale(self, guest, platform, results):
        Program(results, platform, "verbs/scale.py", guest, ALONE | ALL_OBJECTS, "all objects: ").finish()

    def test_objects(self, network, results):
        networks.agree(results, network)


def is_of_dead_transport(_guest, line):
    """Returns whether a line of a kernel log is a report of the guest's transport whose device died."""
    return bool(DEAD_TRANSPORT.search(line))


@network("a device that dies", guests=2, known=is_of_dead_transport, breaks={"device": "its process is killed"})
@both_paths
@only(lambda where: where.platform.vmm == "uml")
class TestDeviceDies:
    """The device's process is killed in the middle of traffic. (QEMU lets its guest wait for ever.)"""

    def test_dies(self, network, results):
        jobs = [traffic(results, guest, f"guest {guest.number}: traffic before the device dies")
                for guest in network.guests]
        network.daemon.kill()
        network.daemon.wait()
        for job in jobs:
            name = f"guest {job.guest.number}"
            results.result(f"{name}: traffic ends when the device dies", job.wait(HANG_SECONDS) == 0)
            status, text = job.guest.run("rmmod virtio_rdma", timeout=HANG_SECONDS)
            if status:
                results.note(text)
            results.result(f"{name}: the module unloads after that", status == 0)

    def test_another_device(self, network, results):
        network.start_daemon()
        for guest in network.guests:
            networks.restart(network, guest)
        networks.data_flows(results, network, "two guests and another device")


def is_of_absent_device(_guest, line):
    """Returns whether a line of a kernel log is a report of the virtio core about a device that is not there."""
    return bool(ABSENT_DEVICE.search(line))


@network("a device that is gone", guests=4, known=is_of_absent_device, breaks={"device": "its process is killed"})
@only(lambda where: where.platform.vmm == "qemu" and not where.platform.is_slow)
class TestDeviceGone:
    """The device's process is killed and never comes back. QEMU lets its guests go on, whose driver reads all
    registers of the device as ones. Each guest ends its use of the device in another way."""

    UNBIND = "cd /sys/bus/virtio/drivers/virtio_rdma && for device in virtio*; do echo $device >unbind || exit 1; done"
    # All but the last steps of going to sleep, which takes no wake-up.
    SLEEP = "echo devices >/sys/power/pm_test && echo freeze >/sys/power/state"

    def test_module_unloads(self, network, results):
        network.daemon.kill()
        network.daemon.wait()
        self.does(results, network.guests[0], "rmmod virtio_rdma", "the module unloads from a device that is gone")

    def test_unbinds(self, network, results):
        self.does(results, network.guests[1], self.UNBIND, "a device that is gone is unbound")

    def test_does_not_sleep(self, network, results):
        """The machine does not sleep with the device, and says so at once."""
        status, text = network.guests[2].run(self.SLEEP, timeout=HANG_SECONDS)
        results.note(text)
        results.result("a guest whose device is gone does not sleep", status != 0)

    def test_reboots(self, network, results):
        """The guest resets its machine. That ends QEMU, which cannot tell the device of its memory."""
        guest = network.guests[2]
        guest.agent.send(end="reboot")
        guest.process.wait(HANG_SECONDS)
        with open(guest.log, encoding="utf-8", errors="replace") as file:
            results.result("a guest whose device is gone reboots", "vfio_user_device_reset: " in file.read())

    def test_powers_off(self, network, results):
        guest = network.guests[3]
        guest.agent.send(end="off")
        results.result("a guest whose device is gone powers off", guest.process.wait(HANG_SECONDS) == 0)
        # The daemon of a network is alive when the network is judged.
        network.start_daemon()

    @staticmethod
    def does(results, guest, command, name):
        """Reports whether a command succeeds in a guest."""
        status, text = guest.run(command, timeout=HANG_SECONDS)
        if status:
            results.note(text)
        results.result(name, status == 0)
