# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A guest whose device is virtio-rdma-hostile, and the way from the selftest in the guest to the device: the
guest itself reaches no socket of the host."""

import os
import socket
from typing import Any

from virtio_rdma.common import BUILD
from virtio_rdma.guests.network import Network

PROGRAM = os.path.join(BUILD, "virtio-rdma-hostile")


class Hostile(Network):
    """One guest with the hostile device."""

    # Further arguments of the device. It offers VIRTIO_F_ADMIN_VQ without such a virtqueue: a driver that accepts this
    # cannot set up its queues over PCI, and a kernel that resets the device without them fails.
    arguments: tuple[str, ...] = ("--with", "41")

    @property
    def orders(self):
        """The socket on which the device takes orders."""
        return os.path.join(self.dir, "orders.sock")

    def device_command(self):
        (guest,) = self.guests
        transport = "--vfio-user" if self.options.vmm == "qemu" else "--vhost-user"
        command = [PROGRAM, transport, guest.rdma_socket, "--mac", guest.mac, "--control", self.orders]
        command += self.arguments
        return command + ["--no-rings"] * (guest.number in self.options.no_rings)

    def device_status(self):
        """Returns nothing: this device counts nothing."""
        return {}

    def order(self, line):
        """Passes a line to the device, and returns its answer, a line as well."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(self.orders)
            connection.sendall(line.encode() + b"\n")
            with connection.makefile("r", encoding="utf-8") as answer:
                return answer.readline()


class Bare(Hostile):
    """One guest whose device behaves, and offers rings and what the RFC has, and nothing else: neither
    VIRTIO_RDMA_F_SRQ nor any bit of devices above it."""

    # The selftests of the base use atomic operations (18, 22), UC (19) and RESIZE_CQ (21).
    arguments = ("--direct", "--without", ",".join(str(bit) for bit in range(3, 24) if bit not in (18, 19, 21, 22)))


class Groundless(Hostile):
    """One guest whose device offers what requires rings, but not VIRTIO_RDMA_F_RINGS, as no device may."""

    arguments = ("--direct", "--without", "2")


class Bus(Hostile):
    """One guest whose device is behind a bus that orders memory in its own way: it offers VIRTIO_F_ORDER_PLATFORM."""

    arguments = ("--direct", "--with", "36")


class Orders:
    """Takes the orders, lines that begin with @, out of a program's output, and types the device's answers. The
    program's own output goes to sink."""

    def __init__(self, network, sink):
        self.network = network
        self.sink = sink
        self.rest = ""
        self.job: Any = None

    def feed(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if line.startswith("@"):
                self.job.type(self.network.order(line[1:]))
            else:
                self.sink(line + "\n")
