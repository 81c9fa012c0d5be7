# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""How to boot guests."""

import dataclasses
import os
from typing import Any

from virtio_rdma.common import BUILD


@dataclasses.dataclass
class Options:
    """How to boot.

    vmm: "qemu" or "uml". guests: how many. rdma: "virtio", "rxe" or "none". kernel: "plain", "debug", or "stock" and
    its like. image, kernel_dir: from tools/vm/guest and tools/vm/kernel. share: a directory for /mnt, or "". mtu: of
    the network, in bytes. memory: of a guest, in MiB. cpus: of a guest. keep: leave the run directory behind (a
    failure leaves it behind in any case). no_rings: numbers of the guests to which the device does not offer rings.
    workers: of the device; 0 leaves their number to it. device: the program virtio-rdmad. hugetlb: QEMU's guests have
    their memory in huge pages of 2 MiB, of which the machine has enough. swap: QEMU's guests have an empty disk for
    swap space, /dev/vdb, and resume from it. pluggable: how much memory QEMU's guests can get besides while they run,
    in MiB. iommu: QEMU's guests of amd64 have a virtual IOMMU, and these are options of their kernel for it. serial:
    QEMU's guests of amd64 answer over their second serial line, which guests that sleep need. others: options that
    some guests have of their own, by their numbers, for example their image and kernel_dir.
    """

    vmm: str = "qemu"
    guests: int = 1
    rdma: str = "virtio"
    kernel: str = "plain"
    image: str = ""
    kernel_dir: str = ""
    share: str = ""
    mtu: int = 1500
    memory: int = 1024
    cpus: int = 2
    keep: bool = False
    no_rings: tuple[int, ...] = ()
    workers: int = 0
    device: str = os.path.join(BUILD, "virtio-rdmad")
    hugetlb: bool = False
    swap: bool = False
    pluggable: int = 0
    iommu: str = ""
    serial: bool = False
    others: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)


def architecture_of(kernel_dir):
    """Returns the architecture of a kernel as Debian calls it. A directory without a file "architecture" has a
    kernel that was built here."""
    try:
        with open(os.path.join(kernel_dir, "architecture"), encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        return "amd64"
