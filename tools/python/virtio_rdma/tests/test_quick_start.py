# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What the quick start has a user type on the host, steps 1 and 2, with emulated guests whose disks are empty."""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from virtio_rdma.common import TOP, die_with_parent
from virtio_rdma.tests.networks import HANG_SECONDS
from virtio_rdma.tests.quick_start import step

# What is different where guests are emulated, as step 2 says.
EMULATED = {"-accel kvm -cpu host": "-accel tcg -cpu max", "-machine q35,": "-machine q35,hpet=off,"}
# What QEMU takes for its own end, typed on the console.
CTRL_A_X = b"\x01x"


class Host:
    """A checkout with what is built, where the user types, and a directory in the place of /tmp/rdma."""

    def __init__(self, checkout):
        self.checkout = checkout
        self.directory = checkout / "rdma"
        self.stack = contextlib.ExitStack()
        os.symlink(os.path.join(TOP, "build"), checkout / "build")

    def start(self, lines):
        """Starts the lines of a step. The program of the last one takes the place of the shell."""
        for kvm, emulated in EMULATED.items():
            lines = lines.replace(kvm, emulated)
        lines = re.sub("^(?=build/|qemu)", "exec ", lines.replace("/tmp/rdma", str(self.directory)), flags=re.MULTILINE)
        process = subprocess.Popen(["bash", "-ec", lines], cwd=self.checkout, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
        self.stack.enter_context(process)
        self.stack.callback(process.kill)
        return process

    def shows(self, wanted):
        """Waits until the daemon's status has lines that begin with these words."""
        command = ["build/virtio-rdmad", "status", "--control", self.directory / "control"]
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            text = subprocess.run(command, cwd=self.checkout, check=False, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, encoding="utf-8").stdout
            if all(re.search(f"^{words}", text, re.MULTILINE) for words in wanted):
                return
            if time.monotonic() > deadline:
                pytest.fail(f"no {wanted} in\n{text}", pytrace=False)
            time.sleep(0.1)


def test_host(tmp_path):
    """The daemon has the devices and the interfaces of both guests, and answers. Ctrl-A X and Ctrl-C end them."""
    host = Host(tmp_path)
    with host.stack:
        daemon = host.start(step(1))
        host.shows(["g1: not connected", "g2: not connected"])
        for number in (1, 2):
            with open(tmp_path / f"g{number}.qcow2", "wb") as disk:
                disk.truncate(1 << 20)
        guests = [host.start(step(2).replace("N=1", f"N={number}")) for number in (1, 2)]
        host.shows(["g1: connected", "g2: connected"])
        for guest in guests:
            text, _ = guest.communicate(CTRL_A_X, timeout=HANG_SECONDS)
            assert guest.returncode == 0, text
        daemon.send_signal(signal.SIGINT)
        log, _ = daemon.communicate(timeout=HANG_SECONDS)
    assert daemon.returncode == 0, log
    assert re.search(b"ready.* guests=2", log), log
    assert log.count(b"network interface connected") == 2, log
    assert list(host.directory.iterdir()) == []
