# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests that reach each other over VXLAN tunnels, which need no bridge and no privilege: the device's process has no
capabilities."""

import os

from virtio_rdma.guests.network import UNPRIVILEGED, Network
from virtio_rdma.guests.qemu import QemuGuest
from virtio_rdma.guests.uml import UmlGuest

VNI = 42


class Tunnelled(Network):
    """Guests, each in a network of its own, with a tunnel to the others. Their interfaces are on a bridge, over which
    the guests' kernels find each other's MAC addresses."""

    def network_of(self, guest):
        """Returns the name of the network that a guest is in."""
        return guest.name

    def device_command(self):
        command = [*UNPRIVILEGED, *super().device_command()]
        networks = list(dict.fromkeys(map(self.network_of, self.of_device())))
        ends = {name: f"127.0.0.{number}" for number, name in enumerate(networks, 1)}
        for name, local in ends.items():
            remotes = [f"remote={end}" for end in ends.values() if end != local]
            command += ["--uplink", ",".join([f"network={name},vxlan={VNI},local={local}", *remotes])]
        return command

    def guest_spec(self, guest):
        return f"{super().guest_spec(guest)},network={self.network_of(guest)}"

    def uplink_status(self):
        """Returns what the device says of its uplinks: the counters by the names of their networks."""
        return {uplink["network"]: uplink["counters"] for uplink in self.status()["uplinks"]}


def nic_socket(guest):
    """Returns the path of the socket of a guest's network interface, where that is connected to the device's switch."""
    return os.path.join(guest.network.dir, f"{guest.name}-nic.sock")


class SwitchedUml(UmlGuest):
    """User-mode Linux whose network interface is connected to the device's switch."""

    def prepare_network(self):
        pass

    def transport(self):
        return f"transport=bess,dst={nic_socket(self)}"


class SwitchedQemu(QemuGuest):
    """QEMU whose guest's network interface is connected to the device's switch."""

    def netdevs(self):
        return ["-netdev", f"stream,id=nic,server=off,addr.type=unix,addr.path={nic_socket(self)}"]


class Switched(Tunnelled):
    """Guests whose network interfaces are connected to the device's switch too, so that nothing is on a bridge."""

    guest_kinds = {"uml": SwitchedUml, "qemu": SwitchedQemu}

    def __init__(self, options):
        self.guest_kind = self.guest_kinds[options.vmm]
        super().__init__(options)

    def guest_spec(self, guest):
        return f"{super().guest_spec(guest)},nic={nic_socket(guest)}"


class SwitchedPair(Switched):
    """The first two guests are in one network, and each other guest in one of its own."""

    def network_of(self, guest):
        return self.guests[0].name if guest.number == 2 else guest.name
