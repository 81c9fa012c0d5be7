# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests that reach each other over VXLAN tunnels, which need no bridge and no privilege."""

import os

from virtio_rdma.guests.network import Network
from virtio_rdma.guests.uml import UmlGuest

VNI = 42


def address(guest):
    """Returns the address of a guest's end of the tunnel."""
    return f"127.0.0.{guest.number}"


class Tunnelled(Network):
    """Guests, each in a network of its own, with a tunnel to the others. Their interfaces are on a bridge, over which
    the guests' kernels find each other's MAC addresses."""

    def device_command(self):
        command = super().device_command()
        guests = self.of_device()
        for guest in guests:
            remotes = [f"remote={address(other)}" for other in guests if other is not guest]
            command += ["--uplink", ",".join([f"network={guest.name},vxlan={VNI},local={address(guest)}", *remotes])]
        return command

    def guest_spec(self, guest):
        return f"{super().guest_spec(guest)},network={guest.name}"

    def uplink_status(self):
        """Returns what the device says of its uplinks: the counters by the names of their networks."""
        return {uplink["network"]: uplink["counters"] for uplink in self.status()["uplinks"]}


class SwitchedGuest(UmlGuest):
    """User-mode Linux whose network interface is connected to the device's switch."""

    @property
    def nic_socket(self):
        """The path of the socket of its network interface."""
        return os.path.join(self.network.dir, f"{self.name}-nic.sock")

    def prepare_network(self):
        pass

    def transport(self):
        return f"transport=bess,dst={self.nic_socket}"


class Switched(Tunnelled):
    """Guests whose network interfaces are connected to the device's switch too, so that nothing is on a bridge."""

    guest_kind = SwitchedGuest

    def guest_spec(self, guest):
        return f"{super().guest_spec(guest)},nic={guest.nic_socket}"
