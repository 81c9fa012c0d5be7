# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The lines of Documentation/applications.md about disks and files, run word by word in two guests.

In a block that says "# guest 1" and "# guest 2", what follows each is of that guest. Each block leaves a file system
mounted at /media of guest 2, where files are written and read back past every cache of that guest.
"""

import dataclasses
import os
import re

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
# The next disk has the name of this one.
AFTERWARDS = {"iSER": "iscsiadm -m node -u"}


@dataclasses.dataclass
class Example:
    """A block of the page: its title, and the lines of guest 1 and of guest 2."""

    title: str
    of_first: str
    of_second: str

    def run(self, first, second):
        """Runs the block. Returns what the guests say if a line fails, or ""."""
        failure = run(first, self.of_first)
        env = FS_ENV | ({"GUID": first.run(GUID)[1].strip()} if self.title == "SRP" else {})
        failure = failure or run(second, self.of_second, env) or run(second, FILES)
        return failure or run(second, AFTERWARDS.get(self.title, ":"))


def blocks(page=PAGE):
    """Returns the lines of each section of a page by its title."""
    with open(page, encoding="utf-8") as file:
        sections = re.split(r"^###? ", file.read(), flags=re.MULTILINE)
    return {section.partition("\n")[0]:
            "\n".join(line[4:] for line in section.split("\n") if line.startswith("    ")) for section in sections}


def examples():
    """Returns each block that has lines of both guests."""
    found = []
    for title, block in blocks().items():
        match = re.fullmatch(r"# guest 1\b[^\n]*\n(.*)# guest 2\b[^\n]*\n(.*)", block, re.DOTALL)
        if match:
            found.append(Example(title, match[1], match[2]))
    return found


def run(guest, lines, env=None):
    """Runs lines, each of which must succeed. Returns what they say if one does not."""
    job = guest.start(["bash", "-exc", lines.replace("virtio_rdma0", guest.link[0])], env)
    return job.text if job.wait(HANG_SECONDS) else ""
