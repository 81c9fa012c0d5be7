# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite stock: what users of a distribution have. The selftests on the newest of Debian's own kernels that the
driver builds for, and guests of a cloud that get the packages of this project and nothing else of it. On an older
kernel of Debian's, data flows between two guests; the suite qemu runs all selftests there.

The platforms are "cloud", "older" and "newest". --before names files with the results of what ran before, outside of
the build root; --packages the directory with the packages.
"""

import glob
import os
import re
import shutil
import signal
import subprocess

import pytest

from virtio_rdma.common import TOP
from virtio_rdma.guests.cloud import CloudNetwork
from virtio_rdma.tests import examples, ktap, networks, selftests
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.quick_start import step
from virtio_rdma.tests.selftests import ALONE, Program, sleeps

# What says whether the driver and this kernel go together: data, each way in which an object comes and goes, the end
# of a device and of the module.
EVERYDAY = ("counters.sh", "netdev.sh", "verbs/bad_arguments.", "verbs/events.", "verbs/mw.", "verbs/rc_data.",
            "verbs/rc_killed.", "verbs/rc_rings.", "verbs/rc_srq.", "verbs/rc_xrc.", "verbs/rings_abi.",
            "verbs/tracepoints.", "verbs/uc.", "reset.sh", "unbind.sh", "module.sh")
# The user that cloud-init makes.
USER = "debian"
# Lists files that belong to the packages by their names, beside those that cloud-init was given.
FILES = r"find / -xdev \( -name '*virtio_rdma*' -o -name '*virtio-rdma*' \) -not -path '/var/lib/cloud/*'"
README = os.path.join(TOP, "README.md")
GUEST_PAGE = os.path.join(TOP, "Documentation/guest.md")
# The name that the driver gives the first device, and the file with the rule by which rdma-core renames it.
FIRST_NAME = "virtio_rdma0"
NAMING_RULE = "/etc/udev/rules.d/60-rdma-persistent-naming.rules"
# Waits until the port is active and has the GID of its IPv4 address, and udev has given the device its name. Prints
# this name and the GID's index.
WAIT_FOR_LINK = (
    "for try in $(seq 300); do for gid in /sys/class/infiniband/*/ports/1/gids/*; do "
    "grep -qs '^0000:0000:0000:0000:0000:ffff:' $gid && rdma link show | grep -q ACTIVE && udevadm settle && "
    "[ -e $gid ] && { device=${gid%/ports/*}; echo ${device##*/} ${gid##*/}; exit 0; }; done; sleep 0.2; done; "
    "rdma link show; exit 1")

only = pytest.mark.only


def pytest_generate_tests(metafunc):
    if "before" in metafunc.fixturenames:
        metafunc.parametrize("before", metafunc.config.option.before, ids=label_of)
    if "program" in metafunc.fixturenames:
        (newest,) = (each for each in metafunc.config.option.platform if each.name == "newest")
        metafunc.parametrize("program", selftests.programs(newest.share))


def label_of(path):
    """Returns what the results in a file are called: stock-LABEL.ktap."""
    return os.path.splitext(os.path.basename(path))[0].removeprefix("stock-")


def test_before(before, results):
    """What ran before, outside of the build root."""
    with open(before, encoding="utf-8") as file:
        ktap.report(results, label_of(before), file.read(), ktap.KSFT_PASS)


def recipe():
    """Returns the lines of runcmd in the README's recipe for cloud-init."""
    with open(README, encoding="utf-8") as file:
        text = file.read()
    lines = re.search(r"^ *runcmd:\n((?: *- .*\n)+)", text, re.MULTILINE)
    assert lines, f"{README}: no recipe"
    return [line.strip().removeprefix("- ") for line in lines[1].splitlines()]


def naming_rule():
    """Returns the lines of guest.md that keep the name of the driver."""
    with open(GUEST_PAGE, encoding="utf-8") as file:
        lines = re.search(r"^ +(echo 'ACTION==(?:.*\n)+? +udevadm control --reload)$", file.read(), re.MULTILINE)
    assert lines, f"{GUEST_PAGE}: no rule"
    return lines[1]


def of_guest(guest, lines):
    """Returns lines of the quick start's guest 1 as this guest has them, with its address."""
    return lines.replace("10.0.0.1", guest.address)


# What the lines of the quick start do not find where they are typed: cloud-init has mounted the packages, and given the
# interface its address.
AS_NEW = "cd /; umount /mnt; ip -4 addr flush dev eth0\n"
# A disk over SRP is there, and gets a file.
FIRST_DISK = """
until [ -b /dev/sda ]; do sleep 0.1; done; mkfs.ext4 -q -L srp /dev/sda; mount /dev/sda /media
cd /media; head -c 20000000 /dev/urandom >file; sha256sum file >/tmp/sums; cd /; umount /media
"""
# The function of the device that has this name is reset. It keeps the name, and udev leaves it alone.
KEEPS_NAME = """
old=$(rdma dev show given | cut -d: -f1)
echo 1 2>/dev/null >/sys/class/infiniband/given/device/reset || true
until new=$(rdma dev show given 2>/dev/null | cut -d: -f1) && [ -n "$new" ] && [ "$new" != "$old" ]; do sleep 0.1; done
udevadm settle; [ -e /sys/class/infiniband/given ]
"""
# The driver is loaded again, and udev gives the device a name as when it appears for the first time.
RELOAD = "modprobe -r virtio_rdma; modprobe virtio_rdma; udevadm settle"
# The disk goes with the RDMA device and comes back with it, and so does the file.
DISK_AGAIN = """
modprobe -r virtio_rdma; while [ -b /dev/disk/by-label/srp ]; do sleep 0.1; done; modprobe virtio_rdma
until mount /dev/disk/by-label/srp /media; do sleep 1; done; cd /media; sha256sum --quiet -c /tmp/sums
cd /; umount /media; modprobe -r ib_srp
"""


class Files:
    """The packages for these guests, sorted by who gets them: `share` for the guests, `host` unpacked."""

    def __init__(self, built, directory):
        self.share = os.path.join(directory, "debs")
        self.host = os.path.join(directory, "host")
        upgrade = os.path.join(self.share, "upgrade")
        os.makedirs(upgrade)
        for pattern in ("virtio-rdma-modules-*_*.deb", "ibverbs-provider-virtio-rdma_*.deb"):
            for path in glob.glob(os.path.join(built, pattern)):
                shutil.copy(path, self.share)
                self.make_newer(path, upgrade, os.path.join(directory, "unpacked"))
        (device,) = glob.glob(os.path.join(built, "virtio-rdmad_*.deb"))
        for_a_host = os.path.join(self.share, "host")
        os.makedirs(for_a_host)
        for path in (device, os.path.join(TOP, "tools/deb/test-confined")):
            shutil.copy(path, for_a_host)
        subprocess.run(["dpkg-deb", "-x", device, self.host], check=True)
        shutil.copytree(os.path.join(TOP, "tools/srp"), os.path.join(self.share, "tools/srp"))

    @staticmethod
    def make_newer(path, directory, unpacked):
        """Makes the same package with a higher version."""
        subprocess.run(["dpkg-deb", "-R", path, unpacked], check=True)
        control = os.path.join(unpacked, "DEBIAN/control")
        with open(control, encoding="utf-8") as file:
            text = re.sub(r"^(Version: .*)$", r"\1+upgrade", file.read(), flags=re.MULTILINE)
        with open(control, "w", encoding="utf-8") as file:
            file.write(text)
        subprocess.run(["dpkg-deb", "-b", unpacked, directory], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(unpacked)


class Cloud:
    """Two guests of a cloud, and how they are used."""

    def __init__(self, results, network):
        self.results = results
        self.guests = network.guests

    def in_each(self, name, command):
        """Runs a command in all guests at a time, and reports whether each ended with 0."""
        jobs = [guest.start(command) for guest in self.guests]
        passed = True
        for job in jobs:
            if job.wait(HANG_SECONDS):
                self.results.note(f"guest {job.guest.number}: {command}\n{job.text}")
                passed = False
        return self.results.result(name, passed)

    def links(self):
        """Checks that the port of each guest is active and has the GID of its IPv4 address, and keeps the name of the
        device and the index of the GID."""
        for guest in self.guests:
            status, text = guest.run(WAIT_FOR_LINK, timeout=HANG_SECONDS)
            guest.link = tuple(text.split()) if status == 0 else (FIRST_NAME, "0")
            if status:
                self.results.note(text + guest.run("dmesg | tail -n 30; lsmod | grep -E 'rdma|ib_'")[1])
            self.results.result(f"guest {guest.number}: the link is active", status == 0)

    def as_user(self, name):
        """Runs ibv_rc_pingpong, which checks the data, between the guests as a user who is not root."""
        server, client = self.guests
        command = f"runuser -u {USER} -- ibv_rc_pingpong -d {{}} -g {{}} -c -n 200 -r 100"
        job = server.start(command.format(*server.link))
        status, text = client.run(
            f"until {command.format(*client.link)} {server.address} >/tmp/out 2>&1; do "
            "grep -q \"Couldn't connect\" /tmp/out || { cat /tmp/out; exit 1; }; sleep 0.2; done", timeout=HANG_SECONDS)
        passed = status == 0 and job.wait(HANG_SECONDS) == 0
        if not passed:
            self.results.note(text + job.text)
        self.results.result(name, passed)


@only(lambda where: where.platform.name == "cloud")
class TestPackages:
    """Two guests of a cloud with the packages of this project."""

    @pytest.fixture(scope="class")
    def cloud(self, request, platform, results, tmp_path_factory):
        files = Files(request.config.option.packages, str(tmp_path_factory.mktemp("packages")))
        # The image of a cloud has no more of this project than its packages.
        options = platform.options(guests=2, share=files.share)
        network = CloudNetwork(options, os.path.join(files.host, "usr/sbin/virtio-rdmad"), recipe())
        with networks.judged(results, "packages: two guests of a cloud", network, links=False):
            yield Cloud(results, network)

    def test_first_use(self, cloud):
        """What the recipe leads to."""
        cloud.in_each("cloud-init runs the recipe without an error", "cloud-init status --long | grep -v '^ *$'; "
                      "! grep -iE 'failed|error' /var/log/cloud-init-output.log")
        cloud.in_each("the guest has no compiler, and nothing of the checkout",
                      "! command -v gcc rustc && ! ls /run/vr 2>/dev/null")
        cloud.links()
        cloud.as_user("a user's ibv_rc_pingpong")
        name = cloud.guests[0].link[0]
        cloud.in_each("the provider is loaded by itself", f"runuser -u {USER} -- ibv_devinfo -d {name}")

    def test_quick_start(self, cloud, results):
        """The lines of steps 3 and 4 of the quick start. The guests have the newer kernel already, and no ping."""
        (install,) = re.findall(r"^(mount(?:.*\n)*)ping", step(3), re.MULTILINE)
        jobs = [examples.start(guest, AS_NEW + of_guest(guest, install)) for guest in cloud.guests]
        failure = "".join(job.text for job in jobs if job.wait(HANG_SECONDS))
        results.result("quick start: both guests install the packages and have their addresses", not failure)
        cloud.links()
        look, *pairs = re.split(r"^(?=.*# guest 1$)", step(4), flags=re.MULTILINE)
        job = examples.start(cloud.guests[0], look)
        shows = job.wait(HANG_SECONDS) == 0 and re.search(r"ACTIVE(.|\n)*GID\[ +1\]:\s+::ffff:10\.0\.0\.1\b", job.text)
        failure = failure or ("" if shows else job.text)
        results.result("quick start: the link is active, and GID 1 is that of the address", bool(shows))
        for pair in pairs:
            first, second = (line.partition("  ")[0] + "\n" for line in pair.splitlines()[:2])
            said = examples.Example("quick start", first, second).run(*cloud.guests)
            results.result(f"quick start: {first.strip()}", not said)
            failure += said
        if failure:
            results.note(failure)

    def test_names(self, cloud, results):
        """udev names the device after its PCI function, as others, and not if the rule of guest.md says so."""
        guest = cloud.guests[0]
        name = guest.link[0]
        path = guest.run(f"readlink -f /sys/class/infiniband/{name}/device")[1].strip()
        bus, slot = (int(number, 16) for number in re.findall(r":(..)", path)[-2:])
        results.note(f"{name}: {path}")
        results.result("names: the device has that of its PCI function", name == f"rocep{bus}s{slot}")
        for what, lines in (
                ("one that was given stays when the device comes back",
                 f"rdma dev set {name} name given\n{KEEPS_NAME}"),
                ("the rule of guest.md keeps that of the driver",
                 f"{naming_rule()}\n{RELOAD}; [ -e /sys/class/infiniband/{FIRST_NAME} ]"),
                ("rdma-core's rule is in force again",
                 f"rm {NAMING_RULE}; udevadm control --reload; {RELOAD}; [ -e /sys/class/infiniband/{name} ]")):
            status, text = guest.run(["bash", "-exc", lines], timeout=HANG_SECONDS)
            if status:
                results.note(text)
            results.result(f"names: {what}", status == 0)
        cloud.links()

    def test_upgrade(self, cloud, results):
        """The packages are upgraded under a program, with the old module loaded."""
        programs = [guest.start(f"runuser -u {USER} -- ibv_rc_pingpong -d {guest.link[0]} -g {guest.link[1]} -p 18600")
                    for guest in cloud.guests]
        cloud.in_each("upgrade: apt installs it with the old module loaded",
                      "apt-get install -y /mnt/upgrade/ibverbs-*.deb /mnt/upgrade/*-$(uname -r)_*.deb && "
                      "lsmod | grep -q ^virtio_rdma")
        cloud.in_each("upgrade: the packages have the new version",
                      "dpkg-query -f '${Version}\\n' -W 'virtio-rdma-modules-*' ibverbs-provider-virtio-rdma | "
                      "grep -v '+upgrade' && exit 1 || exit 0")
        cloud.as_user("upgrade: the new provider with the old module")
        waits = all(job.status is None for job in programs)
        for job in programs:
            job.kill(signal.SIGKILL)
            job.wait(HANG_SECONDS)
        results.result("upgrade: a program that ran before it still runs", waits)
        cloud.in_each("upgrade: the new module takes the old one's place",
                      "modprobe -r virtio_rdma && modprobe virtio_rdma")
        cloud.links()
        cloud.as_user("upgrade: ibv_rc_pingpong with the new module")

    def test_restart(self, cloud):
        """After a restart, nothing has to be loaded by hand."""
        # The disk's changes stay for as long as QEMU lives.
        cloud.guests[1].reboot()
        cloud.links()
        cloud.as_user("a restarted guest: ibv_rc_pingpong")

    def test_srp(self, cloud, results):
        """A guest has a disk over SRP, loses its RDMA device and has it again, and has the disk again by itself."""
        target, host = cloud.guests
        (example,) = (example for example in examples.examples() if example.title == "SRP")
        again = "modprobe sd_mod; cd /mnt\n" + examples.blocks()["SRP that connects again"]
        failure = examples.run(target, example.of_first)
        guid = {"GUID": target.run(examples.GUID)[1].strip()}
        for name, lines in (("udev and systemd connect ib_srp when it has a port", again + FIRST_DISK),
                            ("the disk is back when the RDMA device is", DISK_AGAIN)):
            failure = failure or examples.run(host, lines, guid)
            if failure:
                results.note(failure + host.run("journalctl -u 'srp-targets@*'; dmesg | tail -n 30")[1])
            results.result(f"srp-targets: {name}", not failure)
        cloud.links()

    def test_confined(self, cloud, results):
        """A guest can be a host, whose kernel enforces the profile of AppArmor."""
        status, text = cloud.guests[1].run("/mnt/host/test-confined /mnt/host/virtio-rdmad_*.deb", timeout=HANG_SECONDS)
        if status:
            results.note(text)
        results.result("virtio-rdmad: AppArmor's profile is in force, and refuses nothing that it needs", status == 0)

    def test_purge(self, cloud):
        """The packages leave nothing behind."""
        cloud.in_each("purge: apt removes the packages, and the module can go",
                      "apt-get purge -y 'virtio-rdma-modules-*' ibverbs-provider-virtio-rdma && rmmod virtio_rdma")
        cloud.in_each("purge: nothing is left", f"! {FILES} | grep .")
        cloud.in_each("purge: no RDMA device is left", "! rdma link show | grep .")


@pytest.fixture(scope="class")
def prefix(platform):
    return f"{platform.release}: "


@pytest.mark.network("two guests", guests=2, workers=2)
@only(lambda where: where.platform.name != "cloud")
class TestTwoGuests:
    """Data flows between two guests."""

    def test_data_flows(self, network, title, results):
        networks.data_flows(results, network, title)

    def test_objects(self, network, prefix, results):
        networks.agree(results, network, prefix)


@pytest.mark.network("one guest", workers=2)
@only(lambda where: where.platform.name == "newest")
class TestOneGuest:
    """The selftests on the newest kernel."""

    @staticmethod
    def selects(_where, program):
        return program.startswith(EVERYDAY)

    def test_program(self, program, guest, platform, label, results):
        Program(results, platform, program, guest, ALONE, label).finish()

    def test_objects(self, network, prefix, results):
        networks.agree(results, network, prefix)


@pytest.mark.network("a guest that sleeps", guests=2, swap=True, serial=True, workers=2)
@only(lambda where: where.platform.name == "newest" and not where.brief)
class TestSleep:
    """A guest that sleeps, in memory and on disk. This takes a third of the time of the suite's guests."""

    def test_suspend(self, network, platform, label, results):
        sleeps(results, network, platform, label)

    def test_objects(self, network, prefix, results):
        networks.agree(results, network, prefix)
