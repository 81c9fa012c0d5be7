# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""All guests of one network, and their device."""

import glob
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from typing import Any

from virtio_rdma.common import BUILD, Failure, die_with_parent, uninterrupted
from virtio_rdma.guests.guest import Guest
from virtio_rdma.guests.qemu import QemuGuest
from virtio_rdma.guests.uml import UmlGuest

# What runs a program without capabilities, which root has otherwise.
UNPRIVILEGED = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")


class Network:
    """Guests of one network and, with rdma="virtio", their one device. As a context, it ends with the context."""

    # The class of the guests, if it is not the VMM's.
    guest_kind: type[Guest] | None = None
    # Whether the interfaces of QEMU's guests are on a bridge too. User-mode Linux's always are.
    has_bridge = False

    def __init__(self, options):
        self.options = options
        os.makedirs(BUILD, exist_ok=True)
        self.dir = tempfile.mkdtemp(prefix="vm.", dir=BUILD)
        self.memory_dir = os.path.join(self.dir, "memory")
        self.daemon: Any = None
        kind = self.guest_kind or (QemuGuest if options.vmm == "qemu" else UmlGuest)
        self.guests = [kind(self, number) for number in self.numbers()]

    def numbers(self):
        """Returns the numbers of the guests."""
        return range(1, self.options.guests + 1)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        self.close(failed=kind is not None)

    def env(self, guest):
        """Returns GUEST and PEERS, which every command in a guest has in its environment."""
        peers = " ".join(other.address for other in self.guests if other is not guest)
        return {"GUEST": str(guest.number), "PEERS": peers}

    def device_command(self):
        """Returns the command line of the device's process."""
        command = [self.options.device,
                   "--control", os.path.join(self.dir, "control.sock")]
        if self.options.workers:
            command += ["--workers", str(self.options.workers)]
        for guest in self.of_device():
            command += ["--guest", self.guest_spec(guest)]
        return command

    def of_device(self):
        """Returns the guests that have virtio-rdma."""
        return [guest for guest in self.guests if guest.options.rdma == "virtio"]

    def guest_spec(self, guest):
        """Returns what the device is told of a guest."""
        transport = "vfio-user" if self.options.vmm == "qemu" else "vhost-user"
        rings = ",rings=off" if guest.number in self.options.no_rings else ""
        return f"name={guest.name},{transport}={guest.rdma_socket},mac={guest.mac}{rings}"

    def start_daemon(self):
        """Starts the device, and waits until it listens for all guests."""
        log = os.path.join(self.dir, "virtio-rdmad.log")
        with open(log, "wb") as file:
            self.daemon = subprocess.Popen(
                self.device_command(), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                preexec_fn=die_with_parent)
        deadline = time.monotonic() + 20
        while not all(os.path.exists(guest.rdma_socket) for guest in self.of_device()):
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"virtio-rdmad does not start, see {log}")
            time.sleep(0.01)

    def status(self):
        """Returns what the device says of itself (virtio-rdmad status)."""
        command = [self.options.device, "status", "--json",
                   "--control", os.path.join(self.dir, "control.sock")]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
        return json.loads(answer)

    def operate(self, *words):
        """Runs a command for operators. Returns its status and what it says."""
        command = [self.options.device, *words, "--control", os.path.join(self.dir, "control.sock")]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
        return done.returncode, done.stdout

    def capture(self, guest, path):
        """Begins to write the frames of a guest to a file (virtio-rdmad capture). Returns the process, once it does."""
        command = [self.options.device, "capture", "--guest", guest.name,
                   "--control", os.path.join(self.dir, "control.sock"), path]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", preexec_fn=die_with_parent)
        assert process.stderr is not None
        line = process.stderr.readline()
        if "captures" not in line:
            raise Failure(f"virtio-rdmad capture: {line}")
        return process

    @staticmethod
    def end_capture(process):
        """Ends what capture() began. Returns its status."""
        process.send_signal(signal.SIGINT)
        process.communicate()
        return process.returncode

    def device_status(self):
        """Returns what the device says of its guests, by their names."""
        return {guest["name"]: guest for guest in self.status()["guests"]}

    def mount_memory(self):
        """Mounts the place of the guests' memory: in huge pages, if this kernel has them. The device then reaches
        the memory of thousands of QPs through far fewer entries of the TLB."""
        for huge in (",huge=within_size", ""):
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90%,exec" + huge, "tmpfs", self.memory_dir],
                                  check=not huge, stderr=subprocess.DEVNULL if huge else None)
            if done.returncode == 0:
                break

    def boot(self, links=True):
        """Starts everything, and waits until every guest has its RDMA link, or without links until every guest
        takes commands."""
        os.mkdir(self.memory_dir)
        self.mount_memory()
        if self.has_bridge or self.options.vmm == "uml":
            # An earlier network in this namespace may have left its bridge behind.
            subprocess.run(["ip", "link", "delete", "bridge"], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "link", "add", "bridge", "type", "bridge"], check=True)
            subprocess.run(["ip", "link", "set", "bridge", "up"], check=True)
            self.prepare_networks()
        if self.options.rdma == "virtio":
            self.start_daemon()
        for guest in self.guests:
            guest.prepare()
            guest.start_process()
        for guest in self.guests:
            guest.wait_ready(1)
        for guest in self.guests if links and self.options.rdma != "none" else []:
            self.rdma_up(guest, guest.options.rdma)

    def bridge_of(self, guest):  # pylint: disable=unused-argument
        """Returns the name of the bridge that a guest's interface is on."""
        return "bridge"

    def prepare_networks(self):
        """Makes the network interfaces of the guests."""
        for guest in self.guests:
            guest.prepare_network()

    def kill_guest(self, guest):
        """Kills a guest, as a host that loses its power does, and starts it again."""
        guest.process.kill()
        guest.stop()
        guest.start_process()
        guest.wait_ready(guest.agent.boots + 1)
        self.rdma_up(guest, "virtio")

    @staticmethod
    def rdma_up(guest, kind):
        """Loads a driver in a guest, waits for the link and its GIDs, and returns Guest.link."""
        device, index = guest.check(["/run/vr/rdma-up", kind], f"setting up {kind}", 300).split()[-2:]
        guest.link = (device, int(index))
        return guest.link

    def reports(self):
        """Returns (guest number, line) of every defect in the kernel logs."""
        return [(guest.number, line) for guest in self.guests for line in guest.reports()]

    def close(self, failed=False):
        """Ends all guests, then the device, and removes the run directory unless something failed."""
        with uninterrupted():
            stops = [threading.Thread(target=guest.stop) for guest in self.guests]
            for thread in stops:
                thread.start()
            for thread in stops:
                thread.join()
            self.stop_daemon()
            if os.path.ismount(self.memory_dir):
                subprocess.run(["umount", "-l", self.memory_dir], check=False)
            if not (failed or self.options.keep):
                shutil.rmtree(self.dir, ignore_errors=True)

    def stop_daemon(self):
        """Asks the device to end, then insists."""
        if not self.daemon or self.daemon.poll() is not None:
            return
        self.daemon.terminate()
        try:
            self.daemon.wait(20)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()

    def findings(self):
        """Returns what the device says of the driver in the end: names, whether it is right, and reasons if not."""
        return ()

    def logs(self):
        """Returns the paths of the logs that there are, which are named after a failure."""
        return sorted(glob.glob(os.path.join(self.dir, "*.log")))
