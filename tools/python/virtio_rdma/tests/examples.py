# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The commands of Documentation/applications.md, run word by word in two guests.

In a block, the lines "# both guests", "# guest 1" and "# guest 2" say where the lines behind them are typed. A block
whose guest 2 mounts something at /media leaves a file system there, where files are written and read back past every
cache of that guest. Guest 2 begins when the lines of guest 1 are done and its kernel serves. Where what guest 1 runs
last is a program that serves guest 2, guest 2 begins when guest 1 has one more listener or its program says that it
listens, and both must end with status 0. The lines of one guest alone must do that too. The programs that the page
names are in the directory where the lines are typed.
"""

import dataclasses
import os
import re
import signal
import time

from virtio_rdma.common import TOP

HANG_SECONDS = 240
PAGE = os.path.join(TOP, "Documentation", "applications.md")
FILES = """
cd /media && for size in 1 4097 1048577 20000000; do head -c $size /dev/urandom >file.$size; done
sha256sum file.* >/tmp/sums && sync && echo 3 >/proc/sys/vm/drop_caches && sha256sum --quiet -c /tmp/sums
cd / && umount /media
"""
# Prints what SRP's line about GUID says.
GUID = "sed 's/^0x//' /sys/module/ib_srpt/parameters/srpt_service_guid"
# mke2fs writes zeros from its own buffers, and all of them before the file system is mounted: the kernel's page of
# zeros is not in the memory that user-mode Linux shares with a device.
FS_ENV = {"UNIX_IO_NOZEROOUT": "1"}
FS_DEFAULTS = r"sed -i 's/^\[defaults\]/&\n\tlazy_itable_init = 0\n\tdiscard = 0/' /etc/mke2fs.conf"
# Lines that are typed behind a section, in guest 2 and then in guest 1. The next disk has the name of iSER's, and SMC
# keeps its connections until its module is unloaded.
AFTERWARDS = {"iSER": ("iscsiadm -m node -u", ":"), "SMC-R": ("modprobe -r smc",) * 2}
# The environment of all lines: what root of user-mode Linux needs for mpirun and ssh.
COMMON_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Prints who waits for connections.
LISTENERS = "{ grep -h ' 0A ' /proc/net/tcp /proc/net/tcp6; rdma resource show cm_id | grep 'state LISTEN'; } | wc -l"
# Sections whose server is a program that serves until it is told to end.
STAYS = ("Mooncake", "9P", "SMC-R")
# Sections whose server says "listening". A new listener tells nothing there: the kernel modules that the lines load
# listen before the server does.
SAYS = ("9P", "SMC-R", "RDS")


@dataclasses.dataclass
class Example:
    """A block of the page: its title, and the lines of guest 1 and of guest 2, which may be without lines."""

    title: str
    of_first: str
    of_second: str

    def run(self, first, second):
        """Runs the block. Returns what the guests say if a line fails, or ""."""
        if not self.of_first or not self.of_second:
            failure = run(first, self.of_first) or run(second, self.of_second)
        elif "/media" in self.of_second and self.title not in STAYS:
            failure = run(first, self.of_first) or self.run_client(first, second)
        else:
            failure = self.run_server(first, second)
        of_second, of_first = AFTERWARDS.get(self.title, (":", ":"))
        return failure or run(second, of_second) or run(first, of_first)

    def run_client(self, first, second):
        """Runs what guest 2 does, and uses the file system if that mounts one."""
        if "/media" not in self.of_second:
            return run(second, self.of_second)
        env = FS_ENV | ({"GUID": first.run(GUID)[1].strip()} if self.title == "SRP" else {})
        return run(second, self.of_second, env) or run(second, FILES)

    def run_server(self, first, second):
        """Runs the server, and when it listens, the client beside it."""
        before = first.run(LISTENERS)[1].strip()
        server = start(first, self.of_first)
        self.wait_until_it_listens(first, server, before)
        failure = f"the server ends with status {server.status}\n" if server.status else self.run_client(first, second)
        if failure or self.title in STAYS:
            server.kill(signal.SIGTERM)
            server.wait(HANG_SECONDS)
            # The next server is told by one listener more.
            first.check(f"until [ $({LISTENERS}) -le {before} ]; do sleep 0.05; done", timeout=HANG_SECONDS)
        elif server.wait(HANG_SECONDS):
            failure = f"the server ends with status {server.status}\n"
        return failure and failure + server.text

    def wait_until_it_listens(self, first, server, before):
        """Waits until the server listens or ends. Guest 1 had `before` listeners before the server began."""
        if self.title in SAYS:
            server.shows("listening", HANG_SECONDS)
            return
        waiter = first.start(f"until [ $({LISTENERS}) -gt {before} ]; do sleep 0.05; done")
        deadline = time.monotonic() + HANG_SECONDS
        while not waiter.done.wait(0.05) and server.status is None and time.monotonic() < deadline:
            pass
        waiter.kill(signal.SIGKILL)


def blocks(page=PAGE):
    """Returns the lines of each section of a page by its title."""
    with open(page, encoding="utf-8") as file:
        sections = re.split(r"^###? ", file.read(), flags=re.MULTILINE)
    return {section.partition("\n")[0]:
            "\n".join(line[4:] for line in section.split("\n") if line.startswith("    ")) for section in sections}


def examples():
    """Returns each block that says what the guests run."""
    found = []
    for title, block in blocks().items():
        first = second = ""
        parts = re.split(r"^# (both guests|guest 1|guest 2)\b.*\n", block + "\n", flags=re.MULTILINE)[1:]
        for where, lines in zip(parts[::2], parts[1::2]):
            first += lines * (where != "guest 2")
            second += lines * (where != "guest 1")
        if parts:
            found.append(Example(title, first, second))
    return found


def start(guest, lines, env=None):
    """Starts lines, each of which must succeed."""
    lines = "cd /mnt\n" + lines.replace("virtio_rdma0", guest.link[0])
    return guest.start(["bash", "-exc", lines], COMMON_ENV | (env or {}))


def run(guest, lines, env=None):
    """Runs lines, each of which must succeed. Returns what they say if one does not."""
    job = start(guest, lines, env)
    return job.text if job.wait(HANG_SECONDS) else ""
