# SPDX-License-Identifier: GPL-2.0
"""A device that fails under a file system on a remote disk, for hostile.py: the host of NVMe over Fabrics connects again
by itself when the driver has taken the device into service again, and no byte is lost. The guest is the target as well,
on the same device."""

import os
import shutil
import subprocess
import tempfile

import abi
import ktap
from hostile_device import RINGS, spoil
from hostile_recovery import Before, recovers
from rc import PD, Device, PyverbsError

# The driver waits for the kernel's target, which lets go of a device that has failed when it has missed its keep-alives:
# 12 s each time. Everything else takes long on a kernel that checks itself.
ktap.WATCHDOG = max(ktap.WATCHDOG, 400)
HERE = os.path.dirname(os.path.realpath(__file__))
LIBRARIES = '. "${0%/*}/lib.sh" && . "$DIR/block_lib.sh" && . "$DIR/nvme_lib.sh" && need_device && ADDRESS=$(port_address) && '


class Disk:
    """The shell's functions of nvme_lib.sh."""

    def __init__(self, place):
        self.script = os.path.join(os.path.dirname(HERE), "disk")
        self.env = os.environ | {"PLACE": place}

    def start(self, command):
        """Starts a command, whose output is its result."""
        # The libraries take their place from the name of the script.
        return subprocess.Popen(["sh", "-c", LIBRARIES + command, self.script], env=self.env, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)

    def __call__(self, command):
        """Runs a command; returns its output."""
        job = self.start(command)
        output, _ = job.communicate()
        ktap.equal(job.returncode, 0, f"status of {command}, which printed {output}")
        return output


def fail_now(name):
    """Makes the device fail, whose port consumers in the kernel use."""
    spoil(abi.CMD_CREATE_PD, id=0xffff)
    found = Device(name)
    try:
        PD(found.context).close()
    except PyverbsError:
        found.context.close()
        return
    raise AssertionError("the device works")


@recovers()
def under_a_file_system(_rng):
    """Three times, while a program writes and reads."""
    if not RINGS:
        raise ktap.Skip("the device has too few queues for NVMe over Fabrics")
    if not all(map(shutil.which, ("fio", "mke2fs"))):
        raise ktap.Skip("no fio, or no mke2fs")
    place = tempfile.mkdtemp()
    disk = Disk(place)
    if missing := disk("missing"):
        raise ktap.Skip(missing)
    disk("target_up && connect && write_tree")
    load = disk.start("load_fs")
    for _ in range(3):
        # The load prints a line for each round.
        ktap.equal(load.stdout.readline(), "running\n", "load")
        before = Before()
        fail_now(before.name)
        before.wait_back()
        # The kernel's target does not listen again by itself when the device that it listened on is gone.
        disk("target_gone && target_back && wait_for is_live")
    ktap.equal(load.stdout.readline(), "running\n", "load")
    with open(f"{place}/stop", "w", encoding="ascii"):
        pass
    # The load looks for this behind its line: it may end without another one.
    output, _ = load.communicate()
    ktap.equal((load.returncode, set(output.split()) - {"running"}), (0, set()), "load")
    disk("read_tree && check_fs && disconnect && target_down && wait_for no_connections")


TESTS = [under_a_file_system]
