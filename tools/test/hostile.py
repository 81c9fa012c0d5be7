# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A guest whose device is virtio-rdma-hostile, and the way from the selftest in
the guest to the device: the guest reaches no socket of the host."""

import os
import socket
import subprocess

import guests

PROGRAM = os.path.join(guests.TOP, "build", "virtio-rdma-hostile")


class Network(guests.Network):
    """One guest with the hostile device."""

    # What the device is told besides.
    arguments = ()

    @property
    def orders(self):
        return os.path.join(self.dir, "orders.sock")

    def device_command(self):
        (guest,) = self.guests
        transport = "--vfio-user" if self.options.vmm == "qemu" else "--vhost-user"
        command = [PROGRAM, transport, guest.rdma_socket, "--mac", guest.mac, "--control", self.orders]
        command += self.arguments
        return command + ["--no-rings"] * (guest.number in self.options.no_rings)

    def order(self, line):
        """Pass a line to the device; its answer, a line as well."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(self.orders)
            connection.sendall(line.encode() + b"\n")
            with connection.makefile("r", encoding="utf-8") as answer:
                return answer.readline()


class Bare(Network):
    """One guest whose device behaves, and has rings and what the RFC has, and nothing else: VIRTIO_RDMA_F_SRQ and
    all bits of devices behind it are not offered."""

    arguments = ("--direct", "--without", ",".join(map(str, range(3, 24))))


class Bus(Network):
    """One guest whose device is behind a bus that orders memory in its own way: VIRTIO_F_ORDER_PLATFORM is offered."""

    arguments = ("--direct", "--with", "36")


class Orders:
    """Takes the orders, lines that begin with @, out of a program's output and
    types the device's answers; what is left is the report."""

    def __init__(self, network, sink):
        self.network = network
        self.sink = sink
        self.rest = ""
        self.job = None

    def feed(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if line.startswith("@"):
                self.job.type(self.network.order(line[1:]))
            else:
                self.sink(line + "\n")
