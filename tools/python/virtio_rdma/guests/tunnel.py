# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests that reach each other over VXLAN tunnels, which need no bridge and no privilege: the device's process has no
capabilities."""

import dataclasses
import os
import subprocess

from virtio_rdma.guests.daemons import CABLE, InNamespace, TwoHosts
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

    def ends(self):
        """Returns the addresses of the tunnel's ends, by the networks behind them."""
        return {name: f"127.0.0.{number}" for number, name in enumerate(self.own_networks(), 1)}

    def own_networks(self):
        """Returns the names of the device's networks."""
        return list(dict.fromkeys(map(self.network_of, self.of_device())))

    def device_command(self):
        command = [*UNPRIVILEGED, *super().device_command()]
        ends = self.ends()
        for name in self.own_networks():
            remotes = [f"remote={end}" for other, end in ends.items() if other != name]
            command += ["--uplink", ",".join([f"network={name},vxlan={VNI},local={ends[name]}", *remotes])]
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


# The addresses of two hosts with a tunnel, by the numbers of their guests.
HOSTS = {1: "192.0.2.1", 2: "192.0.2.2"}


def ip(*words):
    """Runs ip."""
    subprocess.run(["ip", *words], check=True)


class TunnelEnd(InNamespace):
    """One end of a tunnel over the cable between two namespaces."""

    def prepare_networks(self):
        super().prepare_networks()
        ip("address", "add", f"{HOSTS[self.number]}/24", "dev", CABLE)
        ip("link", "set", CABLE, "up")


class DeviceEnd(TunnelEnd, Switched):
    """A guest whose network interface and RDMA device are on the daemon's switch, whose uplink is the tunnel."""

    def ends(self):
        return {f"g{number}": address for number, address in HOSTS.items()}


class KernelEnd(TunnelEnd):
    """A guest with rxe on a bridge, with the kernel's vxlan device for the tunnel. There is no daemon."""

    def __init__(self, options, number):
        super().__init__(dataclasses.replace(options, rdma="rxe"), number)

    def prepare_networks(self):
        super().prepare_networks()
        remotes = [address for number, address in HOSTS.items() if number != self.number]
        ip("link", "add", "tunnel", "mtu", str(self.options.mtu), "type", "vxlan", "id", str(VNI),
           "local", HOSTS[self.number], "remote", *remotes, "dstport", "4789")
        ip("link", "set", "tunnel", "master", "bridge", "up")
        # The kernel leaves the checksums of what is inside a tunnel to the interface, and a veth leaves them out.
        subprocess.run(["ethtool", "-K", CABLE, "tx", "off"], check=True, stdout=subprocess.DEVNULL)


class KernelTunnel(TwoHosts):
    """A host with the daemon, and a host without, which has a guest with rxe."""

    kinds = (DeviceEnd, KernelEnd)

    def uplink_status(self):
        """Returns what the device says of its uplinks: the counters by the names of their networks."""
        return self.networks[0].uplink_status()
