# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What guests boot: a VMM, a kernel, an image."""

import dataclasses
import glob
import os

from virtio_rdma import guests


@dataclasses.dataclass(frozen=True)
class Platform:
    """What --platform NAME=VMM,KERNEL,KERNEL_DIR,IMAGE,SHARE[,PATH] says. kernel: "plain", "debug" or "stock". share:
    the directory that guests see as /mnt, or "". path: the data path of tests that do not choose it."""

    name: str
    vmm: str
    kernel: str
    kernel_dir: str
    image: str
    share: str
    path: str = "rings"

    @classmethod
    def parse(cls, text):
        name, _, values = text.partition("=")
        return cls(name, *values.split(","))

    @property
    def is_slow(self):
        """Whether an emulated guest runs a debug kernel."""
        return (self.vmm, self.kernel) == ("qemu", "debug")

    @property
    def release(self):
        """The release of the kernel, as uname -r says it in a guest."""
        return os.path.basename(glob.glob(os.path.join(self.kernel_dir, "install/lib/modules/*"))[0])

    @property
    def directories(self):
        """Directories of this machine that guests mount, by name: the share's file "directories" has them."""
        with open(os.path.join(self.share, "directories"), encoding="utf-8") as file:
            return dict(line.split() for line in file)

    def options(self, **changes):
        """Returns the options of guests with virtio-rdma. A debug kernel needs more memory."""
        return guests.Options(**{
            "vmm": self.vmm, "kernel": self.kernel, "kernel_dir": self.kernel_dir, "image": self.image,
            "share": self.share, "rdma": "virtio", "memory": 2048 if self.kernel == "debug" else 1024, **changes})
