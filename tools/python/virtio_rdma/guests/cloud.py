# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests as a new user makes them: Debian with its own kernel, started by systemd and set up by cloud-init. They get
this project's packages and nothing else of it.

The package files are in a directory of the host that a guest mounts at /mnt.
"""

import base64
import json
import os

from virtio_rdma.common import VM_DIR
from virtio_rdma.guests.network import Network
from virtio_rdma.guests.qemu import QemuGuest

AGENT = os.path.join(VM_DIR, "guest.d", "agent.py")
# The service that runs the agent. It starts at each boot, when cloud-init has done its part.
SERVICE = """[Unit]
After=cloud-init.target
[Service]
Environment=HOME=/root LC_ALL=C.UTF-8
ExecStart=/usr/bin/python3 /usr/local/sbin/agent.py /dev/virtio-ports/vr
[Install]
WantedBy=cloud-init.target
"""


def file_of(path, content):
    """Returns an entry of write_files."""
    return {"path": path, "encoding": "b64", "content": base64.b64encode(content.encode()).decode()}


class CloudGuest(QemuGuest):
    """A guest of a cloud. Its disk is a read-only image: what the guest writes is lost when it ends."""

    # It boots a whole distribution and installs packages, perhaps emulated and beside the other suites.
    boot_seconds = 900

    @property
    def seed(self):
        """The disk that cloud-init reads (NoCloud)."""
        return os.path.join(self.dir, "seed")

    def prepare(self):
        os.makedirs(self.seed)
        with open(AGENT, encoding="utf-8") as file:
            agent = file.read()
        user_data = {
            "mounts": [["debs", "/mnt", "9p", "trans=virtio,ro,nofail"]],
            "write_files": [file_of("/usr/local/sbin/agent.py", agent),
                            file_of("/etc/systemd/system/agent.service", SERVICE)],
            # Not --now: cloud-init.target waits for cloud-init, which runs this.
            "runcmd": [*self.network.recipe, ["systemctl", "enable", "agent"],
                       ["systemctl", "start", "--no-block", "agent"]],
        }
        network_config = {"version": 2, "ethernets": {"eth0": {
            "match": {"macaddress": self.mac}, "set-name": "eth0", "addresses": [f"{self.address}/24"]}}}
        for name, content in (
            ("user-data", "#cloud-config\n" + json.dumps(user_data)),
            ("meta-data", json.dumps({"instance-id": self.name, "local-hostname": f"guest{self.number}"})),
            ("network-config", json.dumps(network_config)),
        ):
            with open(os.path.join(self.seed, name), "w", encoding="utf-8") as file:
                file.write(content)

    def command(self, channel):
        options = self.options
        return [
            # An emulated guest takes minutes to compile the profiles of other programs.
            *self.machine("rw quiet systemd.mask=apparmor.service"),
            "-drive", f"if=none,id=root,format=raw,snapshot=on,file.locking=off,file={options.image}",
            "-device", "virtio-blk-pci,drive=root",
            "-blockdev", f"driver=vvfat,node-name=seed,dir={self.seed},label=CIDATA,read-only=on",
            "-device", "virtio-blk-pci,drive=seed",
            *self.netdevs(),
            "-device", f"virtio-net-pci,netdev=nic,mac={self.mac},romfile=",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=agent,fd={channel}",
            "-device", "virtserialport,chardev=agent,name=vr",
            "-device", "pcie-root-port,id=rp0,chassis=1,slot=1",
            *self.directory("debs", options.share, "on"),
            *self.rdma_device(),
        ]


class CloudNetwork(Network):
    """Guests of a cloud, and the device from its package. `recipe` is what a user's cloud-init runs, lines for a
    shell."""

    guest_kind = CloudGuest

    def __init__(self, options, program, recipe):
        self.recipe = recipe
        self.program = program
        super().__init__(options)

    def device_command(self):
        return [self.program, *super().device_command()[1:]]
