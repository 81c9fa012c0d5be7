# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""User-mode Linux's guests (vhost-user)."""

import os
import struct
import subprocess

from virtio_rdma.guests.guest import KUNIT, Guest

# Drops what the guest itself sent. User-mode Linux sends and receives through two packet sockets, and the second one
# would get each frame of the first; these frames fill its buffer, and then frames from others are lost. It is a program
# of struct sock_filter (linux/filter.h): load the type of the packet, and compare it with PACKET_OUTGOING.
NOT_OUTGOING = b"".join(struct.pack("=HBBI", *instruction) for instruction in (
    (0x30, 0, 0, 0xffff_f004), (0x15, 0, 1, 4), (0x06, 0, 0, 0), (0x06, 0, 0, 0x4_0000)))


class UmlGuest(Guest):
    """User-mode Linux, in a process namespace of its own so that nothing of it survives. Its network is a pair of
    veth on a bridge in this network namespace."""

    def channel_env(self):
        return {
            "CONTROL": "/dev/ttyS0",
            "KERNEL_MODULES": f"{self.options.kernel_dir}/install/lib/modules",
            "SHARE": self.options.share,
        }

    def prepare_network(self):
        subprocess.run(["ip", "link", "delete", self.name], check=False, stderr=subprocess.DEVNULL)
        for argv in (
            f"link add {self.name} mtu {self.options.mtu} type veth peer name {self.name}b",
            f"link set {self.name}b mtu {self.options.mtu} master {self.network.bridge_of(self)} up",
            f"link set {self.name} up",
        ):
            subprocess.run(["ip", *argv.split()], check=True)

    def transport(self):
        """Returns what its network interface is connected to."""
        return self.packet_sockets(self.name)

    def packet_sockets(self, interface):
        """Returns the transport that sends and receives through an interface of the host."""
        program = os.path.join(self.dir, "not_outgoing.bpf")
        with open(program, "wb") as file:
            file.write(NOT_OUTGOING)
        return f"transport=raw,ifname={interface},bpffile={program}"

    def command(self, channel):
        options = self.options
        kernel = [
            f"{options.kernel_dir}/linux", f"mem={options.memory}M", f"ncpus={options.cpus}",
            "seccomp=on", f"ubd0r={options.image}", "root=/dev/ubda", "ro",
            "init=/usr/sbin/stage1", f"vr.share={self.dir}", "quiet", "loglevel=5",
            *KUNIT.split(),
            "con=null", "con0=null,fd:1", "ssl=null", f"ssl0=fd:{channel}",
            f"vec0:{self.transport()},depth=64,gro=1,mtu={self.options.mtu},mac={self.mac}",
        ]
        if options.rdma == "virtio":
            kernel.append(f"virtio_uml.device={self.rdma_socket}:42")
        # The shell is process 1 of the namespace: as process 1, the kernel would not take its own fatal signals.
        # As the leader of a process group (set -m) the kernel fails to make itself a session, which is what we want.
        # wait -f waits for its end: without -f, bash takes a job that is stopped for a moment (SIGSTOP) for one that
        # has ended, and ends the guest with it.
        # sched_autogroup makes a group of the scheduler of each session, user-mode Linux hands its processors from
        # thread to thread a hundred thousand times a second, and Linux 6.18 forgets how much time a group has had
        # whenever the group is empty for a moment. All other processes then starved, for a minute and longer.
        shell = ["bash", "-c", 'set -m; "$@" & wait -f $!', "bash"]
        return ["unshare", "--pid", "--fork", "--kill-child", *shell, *kernel]
