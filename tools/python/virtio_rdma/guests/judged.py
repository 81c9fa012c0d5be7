# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A guest whose device is virtio-rdma-conform, which watches the driver and judges it."""

import json
import os

from virtio_rdma.common import BUILD
from virtio_rdma.guests.hostile import Hostile

PROGRAM = os.path.join(BUILD, "virtio-rdma-conform")
# VIRTIO_RDMA_F_RINGS.
RINGS = 2


class Judged(Hostile):
    """One guest whose driver is judged until its device ends."""

    def __init__(self, options):
        super().__init__(options)
        # The member "clauses" of what was found.
        self.clauses = {}

    def device_command(self):
        (guest,) = self.guests
        transport = "--vfio-user" if self.options.vmm == "qemu" else "--vhost-user"
        command = [PROGRAM, "driver", transport, guest.rdma_socket, "--mac", guest.mac, "--json", self.found]
        return command + ["--without", str(RINGS)] * (guest.number in self.options.no_rings)

    @property
    def found(self):
        """The file with what was found."""
        return os.path.join(self.dir, "found.json")

    def close(self, failed=False):
        """Ends the device first. User-mode Linux does not tell it of the reset with which a driver ends, after which
        the driver takes its buffers back and its memory is that of others."""
        self.stop_daemon()
        super().close(failed)

    def stop_daemon(self):
        super().stop_daemon()
        if os.path.exists(self.found):
            with open(self.found, encoding="utf-8") as file:
                self.clauses = json.load(file)["clauses"]

    def findings(self):
        """Returns for each clause that was judged whether the driver keeps it, and the failures."""
        judged = {clause: what for clause, what in self.clauses.items() if what["result"] != "not judged"}
        return [(clause, what["result"] == "pass", what.get("failures", ())) for clause, what in judged.items()]
