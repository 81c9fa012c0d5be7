# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests whose device's process is replaced by that of another version, or fails to start."""

import os
import time

from virtio_rdma.common import BUILD, Failure
from virtio_rdma.guests.supervised import SOON, Supervised

# What the supervisor starts: the program that a file names. It cannot start while there is another file.
PROGRAM = """#!/bin/bash
[ ! -e {directory}/fails ] || set -- "$@" --guest name=x,vhost-user=/nowhere/x
mapfile -t command <{directory}/command
exec "${{command[@]}}" "$@"
"""


class Upgraded(Supervised):
    """Guests whose device's process is one of several programs."""

    # The program, and options of it: an earlier one can take over the guests of this one.
    command = [os.path.join(BUILD, "virtio-rdmad"), "--withhold", "page-sizes", "--withhold", "reset-to-rtr"]

    def device_command(self):
        program = os.path.join(self.dir, "program")
        with open(program, "w", encoding="ascii") as file:
            file.write(PROGRAM.format(directory=self.dir))
        os.chmod(program, 0o755)
        self.choose(self.command)
        command = super().device_command()
        at = command.index("supervise") + 1
        return [*command[:at], "--program", program, *command[at:]]

    def choose(self, command):
        """Has the next process be this program, with these options."""
        path = os.path.join(self.dir, "command")
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write("".join(f"{word}\n" for word in command))
        os.rename(path + ".new", path)

    def change(self, command):
        """Replaces the process by one of this program, and waits until that is ready."""
        self.choose(command)
        self.restart()

    def failures(self):
        """Returns how many processes have failed to start."""
        with open(os.path.join(self.dir, "virtio-rdmad.log"), encoding="utf-8") as log:
            return sum("/nowhere/x: No such file" in line for line in log)

    def fail(self, count):
        """Restarts the process, has so many fail to start, and waits until another one is ready."""
        starts, failures = self.starts(), self.failures()
        mark = os.path.join(self.dir, "fails")
        with open(mark, "w", encoding="ascii"):
            pass
        self.ask_to_restart()
        deadline = time.monotonic() + SOON
        while self.failures() < failures + count:
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"there were no {count} starts of virtio-rdmad that fail")
            time.sleep(0.02)
        os.remove(mark)
        self.wait_started(starts + 1)
