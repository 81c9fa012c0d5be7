# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests that reach each other over the wire only: each is in a network of its own, as on a host of its own. The
uplink of each network is a tap on the bridge that the guests' own interfaces are on."""

import subprocess

from virtio_rdma.guests.network import Network

PORT = 4791
# What finds packets of RoCE v2 without a VLAN: UDP, and the port it goes to, behind a header of IPv4 without options,
# and behind one of IPv6 without extensions.
FILTERS = {
    "ip": f"match u8 17 0xff at 9 match u16 {PORT} 0xffff at 22",
    "ipv6": f"match u8 17 0xff at 6 match u16 {PORT} 0xffff at 42",
}


def run(*commands):
    """Runs commands of iproute2."""
    for command in commands:
        subprocess.run(command.split(), check=True)


class Hosts(Network):
    """Guests of user-mode Linux, each as on a host of its own. Those with another driver, which are among
    Options.others, have it on their own network interface."""

    def tap(self, guest):
        """Returns the name of the tap of a guest's host."""
        return f"tap{guest.number}"

    def start_daemon(self):
        for guest in self.of_device():
            tap = self.tap(guest)
            subprocess.run(["ip", "link", "delete", tap], check=False, stderr=subprocess.DEVNULL)
            run(f"ip tuntap add {tap} mode tap", f"ip link set {tap} mtu {self.options.mtu} up")
        super().start_daemon()

    def device_command(self):
        command = super().device_command()
        for guest in self.of_device():
            command += ["--uplink", f"network={guest.name},tap={self.tap(guest)}"]
        return command

    def guest_spec(self, guest):
        return f"{super().guest_spec(guest)},network={guest.name}"

    def prepare_networks(self):
        """Puts the taps on the bridge. The bridge learns no address behind a tap: the frames that come from it have the
        guest's. What the bridge would send to the guest's own interface, and is RoCE v2, goes to the tap."""
        super().prepare_networks()
        for guest in self.of_device():
            tap, port = self.tap(guest), f"{guest.name}b"
            run(f"ip link set {tap} master bridge", f"ip link set {tap} type bridge_slave learning off flood off",
                f"tc qdisc add dev {port} clsact")
            for protocol, match in FILTERS.items():
                run(f"tc filter add dev {port} egress protocol {protocol} u32 {match} "
                    f"action mirred egress redirect dev {tap}")
