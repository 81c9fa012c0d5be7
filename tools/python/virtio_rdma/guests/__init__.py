# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests and the network that they and one device make up.

Everything here runs in a mount and a network namespace of its own, as root of at least a user namespace.

    with Network(Options(vmm="qemu", guests=2, rdma="rxe")) as network:
        network.boot()
        job = network.guests[0].start(["ibv_devinfo"])
        status = job.wait()

    options      how to boot
    agent        the way to a program in a guest that runs commands, and the commands (Job)
    log          kernel logs, and what they must not hold
    guest        one guest, whatever runs it (Guest)
    qemu, uml    what is QEMU's and user-mode Linux's own
    network      all guests with their device (Network)
    hosts        guests that reach others over the wire
    daemons      several networks with a daemon each, as two hosts or two ports of one guest
    cable        hosts with a bad network between them
    tunnel       hosts with a tunnel between them
    hostile      networks whose device misbehaves
    cloud        guests as a cloud has them
"""

from virtio_rdma.common import Failure
from virtio_rdma.guests.network import Network
from virtio_rdma.guests.options import Options

__all__ = ["Failure", "Network", "Options"]
