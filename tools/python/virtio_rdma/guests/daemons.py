# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Hosts that have nothing in common: each is a network namespace with a guest, its daemon, a tap and a bridge. A pair
of veth connects the bridges."""

import contextlib
import os
import subprocess

from virtio_rdma.guests.hosts import Hosts

# The interface of each host that leads to the other.
CABLE = "cable"


class Namespace:
    """A network namespace, which lives until it is closed."""

    OWN = "/proc/thread-self/ns/net"

    def __init__(self):
        with open(self.OWN, "rb") as home:
            os.unshare(os.CLONE_NEWNET)
            self.descriptor = os.open(self.OWN, os.O_RDONLY)
            os.setns(home.fileno())

    @property
    def path(self):
        """A path by which other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextlib.contextmanager
    def entered(self):
        """Has this thread, and the processes that it starts, in the namespace."""
        with open(self.OWN, "rb") as home:
            os.setns(self.descriptor)
            try:
                yield
            finally:
                os.setns(home.fileno())

    def close(self):
        """Lets go of it. It ends with its last process."""
        os.close(self.descriptor)


class Host(Hosts):
    """One guest and its daemon, in a namespace."""

    def __init__(self, options, number):
        self.number = number
        super().__init__(options)
        self.namespace = Namespace()

    def numbers(self):
        return (self.number,)

    def env(self, guest):
        peers = " ".join(f"10.0.0.{number}" for number in super().numbers() if number != self.number)
        return {"GUEST": str(guest.number), "PEERS": peers}

    def boot(self, links=True):
        with self.namespace.entered():
            super().boot(links)

    def prepare_networks(self):
        super().prepare_networks()
        subprocess.run(["ip", "link", "set", CABLE, "mtu", str(self.options.mtu), "master", "bridge", "up"], check=True)

    def close(self, failed=False):
        super().close(failed)
        self.namespace.close()


class BothDaemons:
    """What is asked of a daemon's process, of two."""

    def __init__(self, hosts):
        self.hosts = hosts

    def poll(self):
        """Returns the status of one that has ended, or None."""
        return next((status for status in (host.daemon.poll() for host in self.hosts) if status is not None), None)

    @property
    def returncode(self):
        """The status of one that failed, or of both."""
        statuses = [host.daemon.returncode for host in self.hosts]
        return next((status for status in statuses if status), statuses[0])


class TwoHosts:
    """Two hosts; what tests ask of a Network, of both."""

    def __init__(self, options):
        self.options = options
        self.hosts = [Host(options, number) for number in (1, 2)]
        self.guests = [guest for host in self.hosts for guest in host.guests]
        self.daemon = BothDaemons(self.hosts)

    def of_device(self):
        """Returns the guests that have virtio-rdma."""
        return [guest for host in self.hosts for guest in host.of_device()]

    def boot(self, links=True):
        """Connects the hosts, and boots them."""
        first, second = self.hosts
        with first.namespace.entered():
            subprocess.run(["ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns",
                            second.namespace.path], check=True)
        for host in self.hosts:
            host.boot(links)

    def device_status(self):
        """Returns what the devices say of their guests, by the guests' names."""
        return {name: status for host in self.hosts for name, status in host.device_status().items()}

    def close(self, failed=False):
        """Ends everything."""
        for host in self.hosts:
            host.close(failed)

    def logs(self):
        """Returns the paths of the logs that there are."""
        return [log for host in self.hosts for log in host.logs()]
