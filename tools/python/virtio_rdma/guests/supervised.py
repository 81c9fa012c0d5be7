# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests whose device's process is started again when it ends."""

import os
import signal
import time

from virtio_rdma.common import Failure
from virtio_rdma.guests.network import Network

# The bound on a start of the device's process, in seconds.
SOON = 120


def faults(usual):
    """Returns how often something that fails is to fail: FAULTS times if that is in the environment."""
    return int(os.environ.get("FAULTS", usual))


class Supervised(Network):
    """Guests whose device's process is started again when it ends (virtio-rdmad supervise)."""

    def device_command(self):
        program, *options = super().device_command()
        return [program, "supervise", "--", *options]

    def start_daemon(self):
        super().start_daemon()
        self.wait_started(1)

    def starts(self):
        """Returns how often the device's process was ready."""
        with open(os.path.join(self.dir, "virtio-rdmad.log"), encoding="utf-8") as log:
            return sum(" ready guests=" in line for line in log)

    def wait_started(self, count):
        """Waits until the device's process was ready this often."""
        deadline = time.monotonic() + SOON
        while self.starts() < count:
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"virtio-rdmad was not ready {count} times")
            time.sleep(0.005)

    def crash(self):
        """Kills the device's process, and waits until another one is ready."""
        count = self.starts()
        pid = self.daemon.pid
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
            os.kill(int(children.read().split()[0]), signal.SIGKILL)
        self.wait_started(count + 1)

    def wait_recovered(self):
        """Waits until the drivers of all guests have started their devices again, and have their GIDs."""
        deadline = time.monotonic() + SOON
        while not all(guest["started"] and len(guest["gids"]) >= 2 for guest in self.device_status().values()):
            if time.monotonic() > deadline:
                raise Failure(f"a guest has no device {SOON} s after the end of the last one")
            time.sleep(0.02)

    def restart(self):
        """Restarts the device's process, and waits until it is ready."""
        count = self.starts()
        self.ask_to_restart()
        self.wait_started(count + 1)

    def ask_to_restart(self):
        """Asks the supervisor to restart the device's process."""
        self.daemon.send_signal(signal.SIGHUP)

    def pauses(self):
        """Returns how long guests were paused by restarts, in milliseconds."""
        with open(os.path.join(self.dir, "virtio-rdmad.log"), encoding="utf-8") as log:
            lines = [line for line in log if "guests were paused" in line]
        return [int(line.rsplit("milliseconds=", 1)[1]) for line in lines]
