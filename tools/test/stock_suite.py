# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suite stock: what users of a distribution have. The selftests on the newest of
Debian's own kernels that the driver builds for, and guests of a cloud that get the
packages of this project and nothing else of it. On an older kernel of Debian's, data flows
between two guests; the suite qemu runs all selftests there.

Arguments: the build directories of the kernels with commas between them, the newest last; the guest
image; the directory with the selftests and the kernel's helpers; the directory of a cloud's
guests (tools/vm/cloud); the directory with the packages; and files with the results of what
ran before.
"""

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../vm"))
import guests  # noqa: E402  pylint: disable=wrong-import-position
import cloud  # noqa: E402  pylint: disable=wrong-import-position
import guest_suite  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position

HANG_SECONDS = guest_suite.HANG_SECONDS
# What says whether the driver and this kernel go together: data, each way of which an object comes and goes, the
# ends of a device and of the module.
EVERYDAY = ("counters.sh", "netdev.sh", "verbs/bad_arguments.", "verbs/events.", "verbs/mw.", "verbs/rc_data.",
            "verbs/rc_killed.", "verbs/rc_rings.", "verbs/rc_srq.", "verbs/rc_xrc.", "verbs/rings_abi.", "verbs/uc.",
            "unbind.sh", "module.sh")
# The user that cloud-init makes.
USER = "debian"
# Files that belong to the packages by their names, beside those that cloud-init was given.
FILES = r"find / -xdev \( -name '*virtio_rdma*' -o -name '*virtio-rdma*' \) -not -path '/var/lib/cloud/*'"
README = os.path.join(guests.TOP, "README.md")


class Selftests(guest_suite.Suite):
    """The selftests on a kernel of Debian's."""

    def run_briefly(self, name):
        """Sends data between two guests."""
        self.part(f"{name}: two guests", 2, lambda: self.works(f"{name}: two guests"), self.agrees)

    def run(self, name):
        self.part(f"{name}: one guest", 1, lambda: self.those_of(EVERYDAY, f"{name}: "), self.agrees)
        self.run_briefly(name)
        self.part(f"{name}: a guest that sleeps", 2, self.sleeps, self.agrees, swap=True, serial=True)


def recipe():
    """The lines of runcmd in the README's recipe for cloud-init."""
    with open(README, encoding="utf-8") as file:
        text = file.read()
    lines = re.search(r"^ *runcmd:\n((?: *- .*\n)+)", text, re.MULTILINE)[1]
    return [line.strip().removeprefix("- ") for line in lines.splitlines()]


class Packages(guest_suite.Suite):
    """Two guests of a cloud with the packages of this project."""

    def __init__(self, options, report, packages):
        super().__init__(options, report)
        self.packages = packages

    def boot(self, count, kind, rings, **changes):
        program = os.path.join(self.packages.host, "usr/sbin/virtio-rdmad")
        options = guests.dataclasses.replace(self.options, guests=count, share=self.packages.share)
        self.network = cloud.Network(options, program, recipe())
        self.network.boot(links=False)

    def in_each(self, name, command, timeout=HANG_SECONDS):
        """Runs a command in all guests at a time; whether each ended with 0."""
        jobs = [guest.start(command) for guest in self.network.guests]
        passed = True
        for job in jobs:
            if job.wait(timeout):
                self.report.note(f"guest {job.guest.number}: {command}\n{job.text}")
                passed = False
        return self.report.result(name, passed)

    def links(self):
        """The port of each guest is active and has the GID of its IPv4 address; its index is kept."""
        wait = ("for try in $(seq 300); do for gid in /sys/class/infiniband/*/ports/1/gids/*; do "
                "grep -qs '^0000:0000:0000:0000:0000:ffff:' $gid && rdma link show | grep -q ACTIVE && "
                "{ echo ${gid##*/}; exit 0; }; done; sleep 0.2; done; rdma link show; exit 1")
        for guest in self.network.guests:
            status, text = guest.run(wait, timeout=HANG_SECONDS)
            guest.link = ("virtio_rdma0", text.split()[-1] if status == 0 else "0")
            if status:
                self.report.note(text + guest.run("dmesg | tail -n 30; lsmod | grep -E 'rdma|ib_'")[1])
            self.report.result(f"guest {guest.number}: the link is active", status == 0)

    def as_user(self, name):
        """A user who is not root runs ibv_rc_pingpong between the guests; the data is checked."""
        server, client = self.network.guests
        command = f"runuser -u {USER} -- ibv_rc_pingpong -d {{}} -g {{}} -c -n 200 -r 100"
        job = server.start(command.format(*server.link))
        status, text = client.run(
            f"until {command.format(*client.link)} {server.address} >/tmp/out 2>&1; do "
            "grep -q \"Couldn't connect\" /tmp/out || { cat /tmp/out; exit 1; }; sleep 0.2; done", timeout=HANG_SECONDS)
        passed = status == 0 and job.wait(HANG_SECONDS) == 0
        if not passed:
            self.report.note(text + job.text)
        self.report.result(name, passed)

    def first_use(self):
        """What the recipe leads to."""
        self.in_each("cloud-init runs the recipe without an error", "cloud-init status --long | grep -v '^ *$'; "
                     "! grep -iE 'failed|error' /var/log/cloud-init-output.log")
        self.in_each("the guest has no compiler, and nothing of the checkout",
                     "! command -v gcc rustc && ! ls /run/vr 2>/dev/null")
        self.links()
        self.as_user("a user's ibv_rc_pingpong")
        self.in_each("the provider is loaded by itself", f"runuser -u {USER} -- ibv_devinfo -d virtio_rdma0")

    def upgrades(self):
        """The packages are upgraded under a program, with the old module loaded."""
        programs = [guest.start(f"runuser -u {USER} -- ibv_rc_pingpong -d {guest.link[0]} -g {guest.link[1]} -p 18600")
                    for guest in self.network.guests]
        self.in_each("upgrade: apt installs it with the old module loaded",
                     "apt-get install -y /mnt/upgrade/ibverbs-*.deb /mnt/upgrade/*-$(uname -r)_*.deb && lsmod | grep -q ^virtio_rdma")
        self.in_each("upgrade: the packages have the new version",
                     "dpkg-query -f '${Version}\\n' -W 'virtio-rdma-modules-*' ibverbs-provider-virtio-rdma | "
                     "grep -v '+upgrade' && exit 1 || exit 0")
        self.as_user("upgrade: the new provider with the old module")
        waits = all(job.status is None for job in programs)
        for job in programs:
            job.kill(signal.SIGKILL)
            job.wait(HANG_SECONDS)
        self.report.result("upgrade: a program that ran before it still runs", waits)
        self.in_each("upgrade: the new module takes the old one's place", "modprobe -r virtio_rdma && modprobe virtio_rdma")
        self.links()
        self.as_user("upgrade: ibv_rc_pingpong with the new module")

    def serves_confined(self):
        """A guest can be a host, whose kernel enforces the profile of AppArmor."""
        (_, guest) = self.network.guests
        status, text = guest.run("/mnt/host/test-confined /mnt/host/virtio-rdmad_*.deb", timeout=HANG_SECONDS)
        if status:
            self.report.note(text)
        self.report.result("virtio-rdmad: AppArmor's profile is in force, and refuses nothing that it needs", status == 0)

    def restarts(self):
        """After a restart, nobody has to load anything."""
        (_, guest) = self.network.guests
        # The disk's changes stay for as long as QEMU lives.
        guest.reboot()
        self.links()
        self.as_user("a restarted guest: ibv_rc_pingpong")

    def purges(self):
        """The packages leave nothing behind."""
        self.in_each("purge: apt removes the packages, and the module can go",
                     "apt-get purge -y 'virtio-rdma-modules-*' ibverbs-provider-virtio-rdma && rmmod virtio_rdma")
        self.in_each("purge: nothing is left", f"! {FILES} | grep .")
        self.in_each("purge: no RDMA device is left", "! rdma link show | grep .")

    def run(self):
        self.part("packages: two guests of a cloud", 2, self.first_use, self.upgrades, self.restarts,
                  self.serves_confined, self.purges)


class Files:
    """The packages for these guests, sorted by who gets them."""

    def __init__(self, built, directory):
        self.share = os.path.join(directory, "debs")
        self.host = os.path.join(directory, "host")
        upgrade = os.path.join(self.share, "upgrade")
        os.makedirs(upgrade)
        for pattern in ("virtio-rdma-modules-*_*.deb", "ibverbs-provider-virtio-rdma_*deb13*.deb"):
            for path in glob.glob(os.path.join(built, pattern)):
                shutil.copy(path, self.share)
                self.make_newer(path, upgrade)
        (device,) = glob.glob(os.path.join(built, "virtio-rdmad_*.deb"))
        for_a_host = os.path.join(self.share, "host")
        os.makedirs(for_a_host)
        for path in (device, os.path.join(guests.TOP, "tools/deb/test-confined")):
            shutil.copy(path, for_a_host)
        subprocess.run(["dpkg-deb", "-x", device, self.host], check=True)

    @staticmethod
    def make_newer(path, directory):
        """The same package with a higher version."""
        with tempfile.TemporaryDirectory() as unpacked:
            subprocess.run(["dpkg-deb", "-R", path, unpacked], check=True)
            control = os.path.join(unpacked, "DEBIAN/control")
            with open(control, encoding="utf-8") as file:
                text = re.sub(r"^(Version: .*)$", r"\1+upgrade", file.read(), flags=re.MULTILINE)
            with open(control, "w", encoding="utf-8") as file:
                file.write(text)
            subprocess.run(["dpkg-deb", "-b", unpacked, directory], check=True, stdout=subprocess.DEVNULL)


def release_of(kernel_dir):
    """As uname -r says it in a guest with that kernel."""
    return os.path.basename(glob.glob(os.path.join(kernel_dir, "install/lib/modules/*"))[0])


def selftests_on(kernel_dir, image, share, report):
    options = guest_suite.options("qemu", "stock", kernel_dir, image, share)
    return Selftests(guests.dataclasses.replace(options, workers=2), report)


def main(arguments):
    kernels, image, share, cloud_dir, built, *results = arguments
    signal.signal(signal.SIGTERM, guest_suite.interrupt)
    report = ktap.Report()
    *older, newest = kernels.split(",")
    for path in results:
        relay = ktap.Relay(report, os.path.splitext(os.path.basename(path))[0].removeprefix("stock-"))
        with open(path, encoding="utf-8") as file:
            relay.feed(file.read())
        relay.end(0)
    try:
        with tempfile.TemporaryDirectory() as directory:
            options = guests.Options(vmm="qemu", kernel="stock", kernel_dir=cloud_dir, rdma="virtio",
                                     image=os.path.join(cloud_dir, "root.ext4"))
            Packages(options, report, Files(built, directory)).run()
        for kernel in older:
            selftests_on(kernel, image, share, report).run_briefly(release_of(kernel))
        selftests_on(newest, image, share, report).run(release_of(newest))
    except KeyboardInterrupt:
        return 130
    return report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
