# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What the RDMA device of a guest must be able to do, if its device has all features of the specification.

The selftests ask the device under test what to test, and take a feature that is lost for one that was never there.
Here the answer is known.
"""

import os
import re

from virtio_rdma.common import TOP

HEADER = os.path.join(TOP, "include/uapi/linux/virtio_rdma.h")
# The two data paths, of which a driver accepts one.
RINGS, VIRTQUEUES = "VIRTIO_RDMA_F_RINGS", "VIRTIO_RDMA_F_VIRTQUEUES"
# What "ibv_devinfo -v" calls capabilities, by the bits of device_cap_flags_ex where it has no name for them.
CAPABILITIES = ("SRQ_RESIZE", "MEM_WINDOW", "XRC", "MEM_MGT_EXTENSIONS", "MEM_WINDOW_TYPE_2B")
# IB_DEVICE_FLUSH_GLOBAL and IB_DEVICE_ATOMIC_WRITE of the kernel's ib_verbs.h.
FLAGS = {"FLUSH": 1 << 38, "ATOMIC_WRITE": 1 << 40}
# The least value of what "ibv_devinfo -v" prints as a number.
LIMITS = {"max_qp": 16384, "max_cq": 16384, "max_mr": 100000, "max_mw": 1024, "max_srq": 1024, "max_srq_sge": 1,
          "max_mcast_grp": 1, "max_mcast_qp_attach": 1, "max_total_mcast_qp_attach": 1, "max_qp_rd_atom": 1,
          "max_mr_size": 1 << 40, "max_cq_count": 1, "max_cq_period": 1, "num_comp_vectors": 2, "gid_tbl_len": 2}
COUNTERS = ("port_xmit_data", "port_rcv_data", "unicast_xmit_packets", "multicast_rcv_packets")


def missing(guest):
    """Returns what a guest's RDMA device lacks, in words."""
    device = guest.link[0]
    text = guest.check(f"ibv_devinfo -v -d {device}")
    values = {name: int(value, 0) for name, value in re.findall(r"(\w+):\s+(0x[0-9a-f]+|\d+)", text)}
    flags = values.get("device_cap_flags_ex", 0)
    agreed = accepted(guest)
    counters = guest.check(f"ls /sys/class/infiniband/{device}/ports/1/counters || true").split()
    path = VIRTQUEUES if RINGS in agreed else RINGS
    other = {path} | dependents(path)
    return [
        *(f"feature bit {name}" for name, _ in bits() if name not in agreed | other),
        *(name for name in CAPABILITIES if not re.search(rf"^\s+{name}$", text, re.MULTILINE)),
        *(name for name, flag in FLAGS.items() if not flags & flag),
        *(f"{name} {values.get(name)}, not {least}" for name, least in LIMITS.items() if values.get(name, 0) < least),
        *(f"counter {name}" for name in COUNTERS if name not in counters),
        *(["atomics"] if "ATOMIC_GLOB" not in text else []),
    ]


def negotiated(guest):
    """Returns the feature bits that driver and device agreed on in a guest, a digit for each."""
    return guest.check("cat /sys/bus/virtio/drivers/virtio_rdma/virtio*/features").strip()


def accepted(guest):
    """Returns the names of the features of the specification that driver and device agreed on in a guest."""
    digits = negotiated(guest)
    return {name for name, bit in bits() if digits[bit:bit + 1] == "1"}


def matches(pattern):
    """Returns what a pattern finds in the lines of the header."""
    with open(HEADER, encoding="ascii") as file:
        found = re.findall(pattern, file.read(), re.MULTILINE)
    assert found, f"{HEADER}: no {pattern}"
    return found


def bits():
    """Returns the features of the specification, as pairs of a name and a bit."""
    return [(name, int(bit)) for name, bit in matches(r"^#define (VIRTIO_RDMA_F_\w+)\s+(\d+)$")]


def dependents(feature):
    """Returns the names of the features that require this one, or one that requires it."""
    found: set[str] = set()
    # What is required comes first in the header.
    for name, required in matches(r"^#define VIRTIO_RDMA_REQUIRES_(\w+)\s+(.*)$"):
        if {feature, *found} & set(re.findall(r"VIRTIO_RDMA_F_\w+", required)):
            found.add(f"VIRTIO_RDMA_F_{name}")
    return found
