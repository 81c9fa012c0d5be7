# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""One guest, whatever runs it."""

import collections
import dataclasses
import glob
import os
import shutil
import subprocess
import threading
import time
from typing import Any

from virtio_rdma.common import BUILD, VM_DIR, Failure, die_with_parent
from virtio_rdma.guests import log
from virtio_rdma.guests.agent import Agent
from virtio_rdma.guests.options import architecture_of

# Modules with KUnit tests run them when they are loaded.
KUNIT = "kunit.enable=1 kunit.autorun=1"
# How long a guest may take to end when it is asked to.
STOP_SECONDS = 20
# The Rust target of what runs in guests of an architecture; "" is this machine's.
TARGETS = {"amd64": "", "arm64": "aarch64"}


class Guest:
    """One virtual machine: its process, kernel log and agent. `network` has the directory and the options
    that its guests share; `link` is the name of the RDMA device and the index of its RoCE v2 GID; `known_to_break` has
    the rules that tests have broken, and how often (tests/rules.py)."""

    # How long a guest may take from its start to its first message. A bound on a guest that hangs, not an expectation.
    boot_seconds = 300

    def __init__(self, network, number):
        self.network = network
        self.options = dataclasses.replace(network.options, **network.options.others.get(number, {}))
        self.architecture = architecture_of(self.options.kernel_dir)
        self.number = number
        self.name = f"g{number}"
        self.mac = f"52:54:00:12:34:{number:02x}"
        self.address = f"10.0.0.{number}"
        self.dir = os.path.join(network.dir, self.name)
        self.log = os.path.join(network.dir, f"guest{number}.log")
        self.rdma_socket = os.path.join(network.dir, f"{self.name}.sock")
        self.agent = Agent(self)
        self.process: Any = None
        self.panicked = False
        self.link = None
        self.known_to_break: collections.Counter[str] = collections.Counter()
        self.threads = []

    def channel_env(self):
        """Returns the part of guest.env that says where the guest finds its channel and its directories."""
        raise NotImplementedError

    def command(self, channel):
        """Returns the command line of the guest's process. channel: the descriptor of the agent's socket."""
        raise NotImplementedError

    def prepare_network(self):
        """Makes what this guest needs in the network namespace."""

    def prepare(self):
        """Fills the directory that the guest sees as /run/vr."""
        os.makedirs(self.dir)
        for name in ("init", "agent.py", "rdma-up"):
            shutil.copy(os.path.join(VM_DIR, "guest.d", name), self.dir)
        if self.architecture == "amd64":
            shutil.copy("/proc/cpuinfo", os.path.join(self.dir, "cpuinfo"))
        self.install_built()
        hosts = "".join(f"10.0.0.{n} guest{n}\\n" for n in range(1, self.options.guests + 1))
        env = {
            "GUEST": self.number,
            "MAC": self.mac,
            "MTU": self.options.mtu,
            "HOSTS": hosts,
            **self.channel_env(),
        }
        with open(os.path.join(self.dir, "guest.env"), "w", encoding="ascii") as file:
            for key, value in env.items():
                file.write(f"{key}='{value}'\n")

    def install_built(self):
        """Copies what this tree builds into the guest's run directory."""
        name = os.path.basename(self.options.kernel_dir).rsplit("-", 1)[0].removeprefix("kernel-")
        module = os.path.join(BUILD, "modules", name, "virtio_rdma.ko")
        if os.path.exists(module):
            shutil.copy(module, self.dir)
        provider = os.path.join(self.dir, "provider")
        os.mkdir(provider)
        for pattern in ("*.so", "*.driver"):
            for path in glob.glob(os.path.join(BUILD, "provider", TARGETS[self.architecture], pattern)):
                shutil.copy(path, provider)

    def start_process(self):
        """Starts the guest, and the threads that read from it."""
        theirs = self.agent.connect()
        self.process = subprocess.Popen(
            self.command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            preexec_fn=die_with_parent,
            env={**os.environ, "TMPDIR": self.network.memory_dir},
        )
        theirs.close()
        self.threads = [threading.Thread(target=self.agent.read, daemon=True),
                        threading.Thread(target=self.copy_log, daemon=True)]
        for thread in self.threads:
            thread.start()

    def copy_log(self):
        """Thread: copies the console into the log. A panic ends the guest, which would otherwise hang for ever."""
        with open(self.log, "ab", buffering=0) as file:
            for line in self.process.stdout:
                file.write(line)
                if log.PANIC.search(line.decode("latin-1")):
                    self.panicked = True
                    threading.Timer(1, self.process.kill).start()  # after its report
            file.write(f"the guest's process ends with status {self.process.wait()}\n".encode())

    def wait_ready(self, boots):
        """Waits until the agent has started for the boots-th time."""
        deadline = time.monotonic() + self.boot_seconds
        with self.agent.booted:
            while self.agent.boots < boots:
                if self.process.poll() is not None:
                    raise Failure(f"guest {self.number} died while booting, see {self.log}")
                if time.monotonic() > deadline:
                    raise Failure(f"guest {self.number} does not boot, see {self.log}; {self.whereabouts()}")
                self.agent.booted.wait(0.5)

    def whereabouts(self):
        """Returns what a guest that hangs is at, as far as that can be told from outside."""
        waits = "".join(f" {name}:{place}" for name, place in wait_channels(self.process.pid))
        return f"threads wait in{waits}"

    def start(self, argv, env=None, sink=None, typed=False):
        """Starts a command (Agent.start()) with GUEST and PEERS set."""
        return self.agent.start(argv, self.network.env(self) | (env or {}), sink, typed)

    def run(self, argv, env=None, sink=None, timeout=None):
        """Runs a command, and returns its status and output."""
        job = self.start(argv, env, sink)
        return job.wait(timeout), job.text

    def check(self, argv, what=None, timeout=None):
        """Runs a command that must succeed, and returns its output. Raises Failure if it does not."""
        status, text = self.run(argv, timeout=timeout)
        if status:
            raise Failure(f"guest {self.number}: {what or argv} failed ({status}):\n{text}")
        return text

    def reboot(self):
        """Restarts the guest from inside, and waits until it is back."""
        boots = self.agent.boots
        self.agent.send(end="reboot")
        self.wait_ready(boots + 1)

    def stop(self):
        """Asks the guest to end, then insists."""
        if self.process is None:
            return
        if self.process.poll() is None and self.agent.boots:
            try:
                self.agent.send(end="off")
                self.process.wait(STOP_SECONDS)
            except (Failure, subprocess.TimeoutExpired):
                pass
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()

    def reports(self):
        """Returns the lines of the kernel log that report a defect."""
        return log.reports(self.log)

    def log_after(self, line, count):
        """Returns a line of the kernel log and what follows it, count lines in all."""
        return log.after(self.log, line, count)


def wait_channels(pid):
    """Yields the threads of a process by name, and where in the kernel each waits (0: nowhere)."""
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/comm", encoding="utf-8") as file:
                name = file.read().strip()
            with open(f"/proc/{pid}/task/{task}/wchan", encoding="utf-8") as file:
                yield name, file.read().strip()
        except OSError:
            pass
