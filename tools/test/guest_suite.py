# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suites uml, qemu and debug: the selftests inside guests, and what can
only be seen from outside of them. Runs inside the build root.

Arguments: vmm, kernel (plain, stock or debug), its build directory, the guest image,
the directory with the selftests and the kernel's helpers.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vm"))
import guests  # noqa: E402  pylint: disable=wrong-import-position
import hostile  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position

# The bound on a program that hangs; none of them takes a tenth of it.
HANG_SECONDS = 600
# Who is blocked, and where: user-mode Linux has no SysRq.
WHO_WAITS = "(echo w >/proc/sysrq-trigger) 2>/dev/null; dmesg | tail -n 200; ps -ef | tail -n 60"
# Rounds of abuse in verbs/rings_hostile.py: an emulated guest is a hundred times slower.
ROUNDS = {("uml", "plain"): 200, ("qemu", "stock"): 40, ("qemu", "plain"): 40, ("qemu", "debug"): 12}
# An emulated guest with a debug kernel is slower again by as much as from user-mode Linux to it: it goes round
# fewer loops, leaves out what measures and what pins a million pages, meets another half of what a device can do
# wrong in each run, and restarts only in the middle of traffic.
FEWER_LOOPS = {"LOOPS_PERCENT": "20"}
FEWER_TESTS = 50
# Where other suites run beside this one, it is brief: emulated guests run some of the programs, others each time, a
# hostile device does less, and what takes minutes runs only when the suite runs alone. In percent, by the VMM; SEED
# chooses the same programs again.
IS_BRIEF = bool(os.environ.get("BRIEF"))
BRIEF_PROGRAMS = {"uml": 100, "qemu": 20}
BRIEF_HOSTILE = {"uml": 50, "qemu": 20}
# Lines of a kernel log that are one report.
REPORT_LINES = 60
TOO_MUCH = ("perftest.sh", "verbs/mr_large.py")
DATA_PATH = ("kverbs.sh", "nvme.sh", "verbs/rc_", "verbs/uc.", "verbs/mcast.", "verbs/mw.", "verbs/cq_moderation.")
ABOUT_EXTENSIONS = DATA_PATH + ("counters.sh", "netdev.sh", "verbs/bad_arguments.", "verbs/dmabuf.", "verbs/events.",
                                "verbs/modify_qp.", "verbs/mr_large.", "verbs/rings_abi.")
# What only a guest that nobody needs afterwards can do.
SLEEPS = "suspend.sh"
BETWEEN_HOSTS = ("verbs/rc_hosts.py", "verbs/vlan_hosts.py", "perftest.sh", "connections.sh")
# What a program can have beside the kernel's own.
ALL_OBJECTS = {"SCALE_QPS": "16384", "SCALE_MRS": "100000"}
# Memory of a guest in huge pages, in MiB, and what it runs.
HUGE_GUEST = 1024
IN_HUGE_PAGES = ("verbs/mr_large.", "verbs/mw.", "verbs/rc_data.", "verbs/rc_rings.")
# Memory of a guest that registers 5 GiB of it, in MiB, and what the machine must have to spare for that.
LARGE = 7 << 10
SPARE = 9 << 10
# What "rdma resource" and what the device calls the same objects.
OBJECTS = {"pd": "pds", "cq": "cqs", "qp": "qps", "mr": "mrs", "srq": "srqs"}
PROGRAMS_HAVE = ("qp", "cq", "mr", "pd", "srq", "cm_id", "ctx")


def programs(directory):
    """TEST_PROGS of the selftests' Makefile."""
    with open(os.path.join(directory, "virtio_rdma", "Makefile"), encoding="ascii") as file:
        text = file.read().replace("\\\n", " ")
    return re.search(r"^TEST_PROGS := (.*)$", text, re.MULTILINE)[1].split()

# virtio_uml takes the end of the file of interrupts for an interrupt, over and
# over, and warns of each, and again of each queue that it tells a dead device
# to disable.
DEAD_TRANSPORT = re.compile(r"WARNING: arch/um/drivers/virtio_uml\.c:\d+ at vu_(interrupt|del_vqs)\+")


def options(vmm, kernel, kernel_dir, image, share):
    """The options of guests with virtio-rdma; a debug kernel wants more memory."""
    return guests.Options(vmm=vmm, kernel=kernel, kernel_dir=kernel_dir, image=image, share=share, rdma="virtio",
                          memory=2048 if kernel == "debug" else 1024)


def reserve_huge_pages(count, stack):
    """Has so many huge pages of 2 MiB free until stack ends; why not, if it cannot."""
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
        return f"no {count} huge pages of 2 MiB: {error}"
    return None if free >= count else f"{free} huge pages of 2 MiB can be had, {count} are needed"


class Suite:
    def __init__(self, options, report):
        self.options = options
        self.report = report
        self.network = None
        self.is_slow = (options.vmm, options.kernel) == ("qemu", "debug")
        seed = int(os.environ.get("SEED", "0"), 0) or random.getrandbits(32) | 1
        self.random = random.Random(seed)
        self.programs_percent = BRIEF_PROGRAMS[options.vmm] if IS_BRIEF else 100
        self.hostile_percent = BRIEF_HOSTILE[options.vmm] if IS_BRIEF else 100
        if self.is_slow:
            self.hostile_percent = self.hostile_percent * FEWER_TESTS // 100
        if IS_BRIEF:
            self.report.note(f"{self.programs_percent} % of the programs, by the seed {seed:#x}")

    def some(self, paths, label):
        """The programs that run this time."""
        chosen = self.random.sample(paths, -(-len(paths) * self.programs_percent // 100))
        for path in paths:
            if path not in chosen:
                self.report.result(f"{label}{path}", True, "not this time: alone, the suite runs all")
        return [path for path in paths if path in chosen]

    def programs(self):
        """The selftests that these guests run."""
        left_out = TOO_MUCH if self.is_slow else ()
        return [path for path in programs(self.options.share) if path not in left_out]

    def boot(self, count, kind, rings, **changes):
        """A fresh network of guests with virtio-rdma up."""
        no_rings = () if rings else tuple(range(1, count + 1))
        options = guests.dataclasses.replace(self.options, guests=count, no_rings=no_rings, **changes)
        self.network = kind(options)
        self.network.boot()

    def program(self, path, guest, env, label):
        """Start a selftest in a guest; its results go to the report."""
        relay = ktap.Relay(self.report, f"{label}{path}")
        env = {"ROUNDS": str(ROUNDS[self.options.vmm, self.options.kernel]), **env}
        if self.is_slow:
            env |= FEWER_LOOPS
        # No PEERS is one host by itself.
        job = guest.start(f"cd /mnt/virtio_rdma && exec ./{path}", env, relay.feed)
        return job, relay

    def finish(self, job, relay):
        try:
            relay.end(job.wait(HANG_SECONDS))
        except guests.Failure as failure:
            relay.report.note(str(failure))
            relay.report.note(job.guest.run(WHO_WAITS)[1])
            job.kill(signal.SIGKILL)
            relay.end("hangs")

    def alone(self):
        """Every selftest in guest 1, one after the other."""
        guest = self.network.guests[0]
        paths = [path for path in self.programs() if not path.endswith("_hosts.py") and path != SLEEPS]
        for path in self.some(paths, ""):
            self.finish(*self.program(path, guest, {"PEERS": ""}, ""))

    def data_path(self):
        """The selftests that post and poll, in guest 1, one after the other."""
        self.those_of(DATA_PATH, "virtqueues: ")

    def without_extensions(self):
        """The selftests of what extensions are about, which skip or see that it is refused."""
        self.those_of(ABOUT_EXTENSIONS, "no extensions: ")

    def behind_a_bus(self):
        """The driver accepts VIRTIO_F_ORDER_PLATFORM and leaves VIRTIO_RDMA_F_RINGS, whose barriers are those of
        processors; virtqueues carry the data."""
        (guest,) = self.network.guests
        features = guest.check("cat /sys/bus/virtio/drivers/virtio_rdma/virtio*/features").strip()
        order_platform, rings = features[36], features[2]
        self.report.result("behind a bus: no rings", (order_platform, rings) == ("1", "0"))
        self.those_of(("verbs/rc_data.",), "behind a bus: ")

    def those_of(self, kinds, label):
        """The selftests whose paths begin so, in guest 1, one after the other."""
        (guest,) = self.network.guests
        paths = [path for path in self.programs() if path.startswith(kinds) and path not in BETWEEN_HOSTS]
        for path in self.some(paths, label):
            self.finish(*self.program(path, guest, {"PEERS": ""}, label))

    def large_regions(self):
        """The selftest that wants more memory than other guests have."""
        (guest,) = self.network.guests
        self.finish(*self.program("verbs/mr_large.py pages", guest, {"PEERS": ""}, "much memory: "))

    def all_objects(self):
        """As many QPs, CQs and MRs as a guest is to be able to have."""
        (guest,) = self.network.guests
        self.finish(*self.program("verbs/scale.py", guest, {"PEERS": "", **ALL_OBJECTS}, "all objects: "))

    def sleeps(self):
        """The selftest that lets its machine sleep, with a disk of the other guest."""
        target, guest = self.network.guests
        target_step = "cd /mnt/virtio_rdma && ADDRESS={} ./ulp.sh nvme {}"
        for word in ("missing", "target_up"):
            target.check(target_step.format(target.address, word), timeout=HANG_SECONDS)
        label = "virtqueues: " if self.network.options.no_rings else ""
        env = {"PEERS": "", "SLEEPS": "1", "ADDRESS": target.address}
        if self.network.options.swap:
            env["SWAP"] = "/dev/vdb"
        self.finish(*self.program(SLEEPS, guest, env, label))
        target.check(target_step.format(target.address, "target_down"), timeout=HANG_SECONDS)

    def misbehaves(self):
        """The selftest that tells the device what to do wrong."""
        (guest,) = self.network.guests
        label = "virtqueues: " if self.network.options.no_rings else ""
        relay = ktap.Relay(self.report, f"{label}verbs/hostile.py")
        orders = hostile.Orders(self.network, relay.feed)
        transport = "vfio-user" if self.options.vmm == "qemu" else "vhost-user"
        env = {"PEERS": "", "HOSTILE_TRANSPORT": transport}
        if self.hostile_percent < 100:
            env["TESTS_PERCENT"] = str(self.hostile_percent)
        orders.job = guest.start("cd /mnt/virtio_rdma && exec ./verbs/hostile.py", env, orders.feed, typed=True)
        self.finish(orders.job, relay)

    def together(self):
        """The selftests that take two hosts; guest 2's results are counted,
        guest 1's tell whether it agrees."""
        for path in (path for path in BETWEEN_HOSTS if path in self.programs()):
            path_of = "virtqueues: " if self.network.options.no_rings else ""
            both = [self.program(path, guest, {}, f"{path_of}guest {guest.number} of 2: ")
                    for guest in self.network.guests]
            for job, relay in both:
                self.finish(job, relay)

    def works(self, name):
        """Data flows between the two guests."""
        first, second = self.network.guests
        command = "ibv_rc_pingpong -d {} -g {} -r 100 -c -n 50"
        server = first.start(command.format(*first.link))
        status, text = second.run(
            f"until {command.format(*second.link)} {first.address} >/tmp/pingpong 2>&1; do "
            "grep -q \"Couldn't connect\" /tmp/pingpong || { cat /tmp/pingpong; exit 1; }; sleep 0.1; done",
            timeout=HANG_SECONDS)
        passed = status == 0 and server.wait(HANG_SECONDS) == 0
        if not passed:
            self.report.note(text + server.text)
        return self.report.result(name, passed)

    def traffic(self, guest, name):
        """A program that uses the device until that is gone, under way."""
        job = guest.start("cd /mnt/virtio_rdma/verbs && exec ./traffic.py")
        while "running" not in job.text and job.status is None:
            job.done.wait(0.1)
        if job.status is not None:
            self.report.note(job.text)
        self.report.result(name, job.status is None)
        return job

    def dies(self):
        """The device's process is killed in the middle of traffic."""
        jobs = [self.traffic(guest, f"guest {guest.number}: traffic before the device dies")
                for guest in self.network.guests]
        self.network.daemon.kill()
        self.network.daemon.wait()
        for job in jobs:
            label = f"guest {job.guest.number}"
            self.report.result(f"{label}: traffic ends when the device dies", job.wait(HANG_SECONDS) == 0)
            status, text = job.guest.run("rmmod virtio_rdma", timeout=HANG_SECONDS)
            if status:
                self.report.note(text)
            self.report.result(f"{label}: the module unloads after that", status == 0)
        self.network.start_daemon()
        for guest in self.network.guests:
            self.restart(guest)
        self.works("two guests and another device")

    def reboots(self):
        """A guest restarts, in the middle of traffic and idle."""
        second = self.network.guests[1]
        self.works("two guests before a restart")
        self.traffic(second, "traffic before a restart")
        self.restart(second)
        self.works("guest 2 restarted under its traffic")
        if self.is_slow:
            return
        for guest in self.network.guests:
            self.restart(guest)
            self.works(f"guest {guest.number} restarted")

    def restart(self, guest):
        """A guest restarts and has its device again."""
        guest.reboot()
        self.network.rdma_up(guest, "virtio")

    def agrees(self):
        """Each guest's kernel and the device count the same objects, and no program has any."""
        status = self.network.device_status()
        for guest in self.network.guests:
            (kernel,) = json.loads(guest.check("rdma -j resource show"))
            device = {kind: status[guest.name][kind] for kind in OBJECTS.values()}
            device = {kind: len(value) if isinstance(value, list) else value for kind, value in device.items()}
            counts = {name: kernel[kind] for kind, name in OBJECTS.items() if kind in kernel}
            # A PD of the kernel has an MR for all of memory, which is in no list (__ib_alloc_pd()).
            counts["mrs"] += guest.check("rdma resource show pd").count("comm [")
            left = [line for line in guest.check("".join(f"rdma resource show {kind}; " for kind in PROGRAMS_HAVE))
                    .splitlines() if " pid " in line]
            differs = any(device[kind] != count for kind, count in counts.items())
            if differs or left:
                self.report.note(f"kernel: {counts}\ndevice: {device}\n" + "\n".join(left))
            self.report.result(f"guest {guest.number}: nothing is left, and the device agrees",
                               not differs and not left)

    def is_known(self, _guest, _line):
        """Whether a report is of a defect that is the guest's kernel's own."""
        return False

    def verdict(self, title, transport):
        """The kernel logs and the device, after everything else."""
        for guest in self.network.guests:
            lines = [line for line in guest.reports()
                     if not (transport and transport.search(line)) and not self.is_known(guest, line)]
            for line in lines[1:20]:
                self.report.note(line)
            for line in guest.log_after(lines[0], REPORT_LINES) if lines else []:
                self.report.note(line)
            self.report.result(f"{title}: kernel log of guest {guest.number} has no report", not lines)
        alive = self.network.daemon.poll() is None
        self.report.result(f"{title}: the device is alive", alive)

    def part(self, title, count, *actions, kind=guests.Network, rings=True, transport=None, **changes):
        """Boot, act, judge, end; a failure names its logs. Lines that match
        transport are reports of a defect of the guest's transport. changes: options
        of the guests that others do not have."""
        before, start = self.report.failed, time.monotonic()
        try:
            self.boot(count, kind, rings, **changes)
            for action in actions:
                action()
            self.verdict(title, transport)
        except guests.Failure as failure:
            self.report.note(str(failure))
            self.report.result(title, False)
        finally:
            failed = self.report.failed > before
            self.network.close(failed)
            if failed:
                self.report.note("logs: " + " ".join(self.network.logs()))
        status = self.network.daemon.returncode if self.network.daemon else None
        self.report.result(f"{title}: the device ends cleanly", status == 0)
        left = [guest.rdma_socket for guest in self.network.guests if os.path.exists(guest.rdma_socket)]
        self.report.result(f"{title}: the device removes its sockets", not left)
        self.report.note(f"{title}: {time.monotonic() - start:.0f} s")

    def much_memory(self):
        """A guest with more memory than others, where this machine has as much."""
        with open("/proc/meminfo", encoding="ascii") as file:
            values = dict(line.split(":") for line in file)
        if int(values["MemAvailable"].split()[0]) >> 10 < SPARE:
            self.report.note(f"no guest with {LARGE} MiB: this machine has less than {SPARE} MiB to spare")
            return
        self.part("one guest with much memory", 1, self.large_regions, self.agrees, memory=LARGE)

    def in_huge_pages(self):
        """A guest whose memory is in hugetlbfs: what QEMU gives out of it begins and ends within huge pages."""
        label = "one guest in huge pages"
        with contextlib.ExitStack() as stack:
            reason = reserve_huge_pages(HUGE_GUEST // 2, stack)
            if reason:
                self.report.result(label, True, reason)
                return
            self.part(label, 1, lambda: self.those_of(IN_HUGE_PAGES, "huge pages: "), self.agrees,
                      memory=HUGE_GUEST, hugetlb=True)

    def run(self):
        """Every part that these guests are for."""
        self.part("one guest", 1, self.alone, self.agrees)
        self.part("two guests", 2, self.together, self.agrees, self.reboots)
        self.part("one guest, virtqueues", 1, self.data_path, self.agrees, rings=False)
        if self.options.vmm == "uml" or not IS_BRIEF:
            self.part("two guests, virtqueues", 2, self.together, self.agrees, rings=False)
        self.part("a hostile device", 1, self.misbehaves, kind=hostile.Network)
        if self.options.vmm == "qemu" and self.options.kernel != "debug":
            self.in_huge_pages()
        if self.options.vmm == "qemu" and not IS_BRIEF:
            self.part("a guest that sleeps", 2, self.sleeps, self.agrees, swap=True, serial=True)
            self.part("a guest that sleeps, virtqueues", 2, self.sleeps, self.agrees, rings=False, serial=True)
        if self.options.vmm == "uml":
            self.part("a hostile device, virtqueues", 1, self.misbehaves, kind=hostile.Network, rings=False)
            self.part("a device without extensions", 1, self.without_extensions, kind=hostile.Bare)
            self.part("a device behind a bus", 1, self.behind_a_bus, kind=hostile.Bus)
            self.much_memory()
            if not IS_BRIEF:
                self.part("one guest with all objects", 1, self.all_objects, self.agrees)
            # QEMU lets its guest wait for ever.
            self.part("a device that dies", 2, self.dies, transport=DEAD_TRANSPORT)
            self.part("a device that dies, virtqueues", 2, self.dies, transport=DEAD_TRANSPORT, rings=False)


def interrupt(*_):
    raise KeyboardInterrupt


def main(arguments):
    signal.signal(signal.SIGTERM, interrupt)
    report = ktap.Report()
    try:
        # A worker a guest, of which there are two: they are to get into each other's way.
        Suite(guests.dataclasses.replace(options(*arguments), workers=2), report).run()
    except KeyboardInterrupt:
        return 130
    return report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
