# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests, the last of which the device's process is told of while it runs."""

import os
import subprocess

from virtio_rdma.common import BUILD
from virtio_rdma.guests.network import Network


class Late(Network):
    """Guests, the last of which is added to the device's process."""

    is_complete = False

    def of_device(self):
        return self.guests if self.is_complete else self.guests[:-1]

    def start_daemon(self):
        super().start_daemon()
        self.add(self.guests[-1])
        self.is_complete = True

    def operate(self, *words):
        """Runs a command for operators. Returns its status and what it says."""
        command = [os.path.join(BUILD, "virtio-rdmad"), *words, "--control", os.path.join(self.dir, "control.sock")]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
        return done.returncode, done.stdout

    def add(self, guest):
        """Adds a guest to the device's process."""
        status, text = self.operate("add", "--guest", self.guest_spec(guest))
        assert status == 0, text
