#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""VLANs between two hosts: the RDMA CM over the addresses of VLAN interfaces, and
which host is reached from which VLAN.

Each host puts VLAN interfaces over the network interface of its port. Their
neighbours are written down: whether that carries frames with tags is no affair of
the RDMA device.
"""

import ipaddress
import json
import os
import re
import subprocess

import hosts
import ktap
import rc
from rc import e, sge

HERE, OTHER = 5, 6
NETWORKS = ("198.51.100.{}/24", "2001:db8:5::{}/64")
LISTENS = ("cm_id", "state LISTEN")
JOINED = ("qp", "drv_mcast_groups 1")
# What rping, perftest, which has two ways to say it, and udaddy say if the other side does not listen.
NO_LISTENER = re.compile(r"REJECTED\W+error\W+8\b|Unexpected CM event bl blka 8\b|UNREACHABLE, error: 1\b")


def run(*argv):
    """Runs a program that must succeed; returns its output."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(argv)}: {done.stdout}")
    return done.stdout


def read(path):
    """Returns the text of a file of sysfs, or nothing if the file is not there (any more)."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class Vlan:
    """A VLAN interface. Both hosts have it when this begins; they have the same
    addresses in every VLAN."""

    def __init__(self, side, number):
        self.side, self.number, self.name = side, number, f"vlan{number}"
        self.port = f"/sys/class/infiniband/{side.device.name}/ports/{rc.PORT}"
        (link,) = json.loads(run("rdma", "-j", "link", "show", f"{side.device.name}/{rc.PORT}"))
        self.netdev = link["netdev"]

    def __enter__(self):
        theirs = self.side.exchange(read(f"/sys/class/net/{self.netdev}/address"))
        run("ip", "link", "add", "link", self.netdev, "name", self.name, "type", "vlan", "id", str(self.number))
        run("ip", "link", "set", self.name, "up")
        own, other = (2, 1) if self.side.active else (1, 2)
        for network in NETWORKS:
            is_ipv6 = ":" in network
            run("ip", "addr", "add", network.format(own), "dev", self.name, *(["nodad"] if is_ipv6 else []))
            run("ip", "neigh", "replace", network.format(other).split("/")[0], "lladdr", theirs,
                "dev", self.name, "nud", "permanent")
            self.gid_index(network.format(own))
        self.side.exchange()
        return self

    def __exit__(self, *_):
        if os.path.exists(f"/sys/class/net/{self.name}"):
            self.remove()

    def remove(self):
        run("ip", "link", "delete", self.name)

    def gid_index(self, address):
        """Waits for the GID of an address of this interface; returns its index."""
        address = ipaddress.ip_interface(address).ip
        if address.version == 4:
            address = ipaddress.IPv6Address(f"::ffff:{address}")
        while True:
            for index in os.listdir(f"{self.port}/gids"):
                attrs = [read(f"{self.port}/gid_attrs/{kind}/{index}") for kind in ("ndevs", "types")]
                if attrs == [self.name, "RoCE v2"] and \
                        ipaddress.IPv6Address(read(f"{self.port}/gids/{index}")) == address:
                    return int(index)
            os.sched_yield()

    def discards(self):
        """Returns how many packets of this host no port received."""
        return int(read(f"{self.port}/counters/port_xmit_discards"))


def ready(process, kind, state):
    """Waits until a program has an object in this state."""
    while state not in run("rdma", "resource", "show", kind, "-dd"):
        if process.poll() is not None:
            raise AssertionError(f"{process.args}: {process.communicate()[0]}")
        os.sched_yield()


def start(argv):
    """Starts a side of a tool."""
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process):
    """Waits for the end of a program; returns its output."""
    return process.communicate()[0]


def explain(process):
    """Ends a program that should have ended, and prints what it was doing."""
    for kind in ("cm_id", "qp"):
        print("\n".join(f"# {line}" for line in run("rdma", "resource", "show", kind, "-dd").splitlines()))
    process.terminate()
    print(f"# {' '.join(process.args)}:", *end(process).splitlines(), sep="\n# ", flush=True)


def wait_for(process, step):
    """Runs a step, and prints what a program is doing if the step fails or does not end."""
    try:
        return step()
    except BaseException:
        explain(process)
        raise


def connects(side, client):
    """Runs the active side of a tool; returns whether the other side listened."""
    process = start(client.split())
    text = wait_for(process, lambda: end(process))
    listened = not process.returncode or not NO_LISTENER.search(text)
    if listened:
        ktap.equal(process.returncode, 0, f"{client}: {text}")
    side.exchange(listened)
    return listened


def serves(side, server, state):
    """Runs the passive side of a tool; returns whether it listened when the active side connected."""
    process = start(server.split())
    try:
        ready(process, *state)
        side.exchange()
        listened = wait_for(process, side.exchange)
        if listened:
            text = wait_for(process, lambda: end(process))
            ktap.equal(process.returncode, 0, f"{server}: {text}")
        return listened
    finally:
        process.kill()
        process.wait()


def talk(side, server, client, state=LISTENS):
    """Runs a tool between both hosts. The kernel shows a listener a moment before it listens, and perftest
    says that it will listen before it does, when it has connected once already. So a client that meets no
    listener starts again, and so does the other side: it may take a second program for a part of the first."""
    while True:
        if side.active:
            side.exchange()
            if connects(side, client):
                return
        elif serves(side, server, state):
            return


def need_mads(side):
    """MADs do not start over rings of 256 entries, as virtqueues in user-mode Linux are."""
    if "type GSI" not in run("rdma", "resource", "show", "qp", "link", side.device.name):
        raise ktap.Skip("no MADs, and so no connections")


def connection_manager(side, _rng):
    """RC over IPv4 and IPv6, UD, and a multicast group."""
    need_mads(side)
    with Vlan(side, HERE):
        for network in NETWORKS:
            address = network.format(1).split("/")[0]
            talk(side, f"rping -s -V -C 20 -S 1000 -a {address}", f"rping -c -V -C 20 -S 1000 -a {address}")
        first, second = (NETWORKS[0].format(host).split("/")[0] for host in (1, 2))
        tool = f"ib_send_bw -R -F -n 100 -d {side.device.name}"
        talk(side, tool, f"{tool} {first}")
        talk(side, f"udaddy -b {first} -c 2 -C 10 -S 1000", f"udaddy -s {first} -c 2 -C 10 -S 1000")
        group = "mckey -m 239.1.2.3 -C 10 -b"
        talk(side, f"{group} {first}", f"{group} {second} -s", JOINED)


def nobody_in_another_vlan(side, _rng):
    """A request of the RDMA CM from another VLAN reaches no host, whatever its addresses are."""
    need_mads(side)
    with Vlan(side, OTHER if side.active else HERE) as vlan:
        address = NETWORKS[0].format(1).split("/")[0]
        process = None
        if not side.active:
            process = start(["rping", "-s", "-C", "1", "-a", address])
            ready(process, *LISTENS)
        side.exchange()
        if side.active:
            before = vlan.discards()
            process = start(["rping", "-c", "-C", "1", "-a", address])
            while vlan.discards() == before:
                ktap.equal(process.poll(), None, "rping")
                os.sched_yield()
        side.exchange()
        # Neither side has been connected.
        ktap.equal(process.poll(), None, "rping")
        process.kill()
        process.communicate()
        side.exchange()


def connected(side, vlan, network, **changes):
    """Returns an endpoint whose RC QP is connected through the VLAN."""
    side.gid_index = vlan.gid_index(network.format(2 if side.active else 1))
    return side.endpoint(changes)


def connections_by_hand(side, rng):
    """QPs are connected over each address without a connection manager, in VLAN 0 as in any other."""
    for number in (HERE, 0):
        with Vlan(side, number) as vlan:
            for network in NETWORKS:
                end = connected(side, vlan, network)
                region = end.memory(4096)
                there, data = side.target(region), rng.randbytes(4096)
                if side.active:
                    region.write(data, len(data))
                    end.post_send(e.IBV_WR_RDMA_WRITE, [sge(region)], remote=there)
                    rc.complete(end.send_cq)
                side.exchange()
                ktap.same_bytes(region.read(len(data), 0), data, "data")
                end.close()


def connections_to_another_vlan(side, _rng):
    """Each QP names the other, but from another VLAN."""
    with Vlan(side, OTHER if side.active else HERE) as vlan:
        end = connected(side, vlan, NETWORKS[0], timeout=8, retry_cnt=2)
        region = end.memory(64)
        there = side.target(region)
        end.post_send(e.IBV_WR_RDMA_WRITE, [sge(region)], remote=there)
        rc.complete(end.send_cq, status=e.IBV_WC_RETRY_EXC_ERR)
        side.exchange()
        end.close()


def removed_under_traffic(side, _rng):
    """The VLAN interface goes, of the sender's side and of the other; then there is a new one."""
    for is_mine in (side.active, not side.active):
        with Vlan(side, HERE) as vlan:
            # A peer that is busy must not seem to be gone, which would end the traffic too early.
            end = connected(side, vlan, NETWORKS[1], timeout=14, retry_cnt=7)
            region = end.memory(65536)
            there = side.target(region)
            if side.active:
                flow(side, end, region, there, vlan if is_mine else None)
            else:
                side.exchange()
                if is_mine:
                    vlan.remove()
            side.exchange()
            end.close()


def flow(side, end, region, there, vlan):
    """Writes until an interface is gone, of this host or of the other."""
    def write(count):
        for _ in range(count):
            end.post_send(e.IBV_WR_RDMA_WRITE, [sge(region)], remote=there)
    write(32)
    rc.complete(end.send_cq, 16)
    side.exchange()
    if vlan:
        vlan.remove()
    outstanding = 16
    while True:
        write(32 - outstanding)
        statuses = [wc.status for wc in rc.poll(end.send_cq, 16)]
        outstanding = 16
        failed = [status for status in statuses if status != e.IBV_WC_SUCCESS]
        if failed:
            flushed = [e.IBV_WC_WR_FLUSH_ERR] * (len(failed) - 1)
            ktap.equal(failed, [e.IBV_WC_RETRY_EXC_ERR] + flushed, "status")
            return


def have_vlans():
    """Returns whether the kernel has VLANs, whose module is loaded then."""
    loaded = subprocess.run(["modprobe", "-q", "8021q"], check=False)
    return loaded.returncode == 0 or os.path.exists("/proc/net/vlan")


if __name__ == "__main__":
    if not have_vlans():
        ktap.skip_all("the kernel has no VLANs")
    hosts.run([connection_manager, nobody_in_another_vlan, connections_by_hand, connections_to_another_vlan,
               removed_under_traffic])
