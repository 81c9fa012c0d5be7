# SPDX-License-Identifier: GPL-2.0
"""A configuration space that cannot be, for hostile.py: the driver refuses it, or limits what it says."""

import errno

import abi
import ktap
from hostile_device import (RINGS, VFIO, Watch, bind, data_flows, device, honest, order, patch, rdma_devices, recovers,
                            unbind)
from rc import fails_with

CONFIG = abi.Config
MAX = 2**32 - 1
# What says that a configuration is one of this specification.
OWN = (patch(CONFIG.magic, abi.MAGIC), patch(CONFIG.revision, abi.REVISION))


def refused(why, number=errno.EINVAL):
    """Fails the test unless the driver does not bind, with one line that says why."""
    watch = Watch()
    fails_with(number, bind)
    ktap.equal(rdma_devices(), [], "RDMA devices")
    lines = watch.lines(r"virtio_rdma|virtio\d+:")
    said = [line for line in lines if why in line]
    ktap.equal(len(said), 1, f"lines that say {why}: {lines}")


def spoilt(*patches):
    """Unbinds the device and spoils its configuration space."""
    unbind()
    honest()
    for part in patches:
        order(config=part)


def config(why, *patches):
    """Fails the test unless the driver refuses a configuration and says why."""
    spoilt(*patches)
    refused(why)
    recovers()


def config_of_ones(_rng):
    config("magic 0xffffffff, not 0x616d6472", "ones")
    config("has 4294967295 ports", "ones", *OWN)
    config("virtqueues, more than there can be", "ones", *OWN, patch(CONFIG.phys_port_cnt, 1))


def config_of_zeros(_rng):
    config("magic 0x00000000, not 0x616d6472", "zeros")
    config("has 0 ports", "zeros", *OWN)


def config_of_another_revision(_rng):
    """A device of a later text, which this driver would misunderstand, works but for that."""
    config("has revision 2, and this driver knows 1", patch(CONFIG.revision, 2))


def config_without_objects(_rng):
    names = ("max_qp", "max_cq", "max_qp_wr", "max_cqe")
    for name in names:
        config(f"{name} 0", patch(getattr(CONFIG, f"ring_{name}" if RINGS else name), 0))
    config("max_send_sge 0", patch(CONFIG.max_send_sge, 0))
    if RINGS:
        config("no completion vector", patch(CONFIG.num_comp_vectors, 0))
        config("no power of two", patch(CONFIG.ring_max_qp_wr, 100))
        config("no power of two", patch(CONFIG.ring_max_cqe, MAX))
    config("no pages of 4 KiB", patch(CONFIG.page_size_cap, 1 << 13))


def config_with_queues_that_do_not_exist(_rng):
    if not VFIO:
        raise ktap.Skip("user-mode Linux itself warns about it")
    if RINGS:
        config("cannot set up", patch(CONFIG.num_comp_vectors, 1000))
    else:
        config("cannot set up", patch(CONFIG.max_qp, 100))
        config("cannot set up", patch(CONFIG.max_cq, 1000))


def config_with_huge_queues(_rng):
    """The sizes of the rings limit what the driver offers."""
    if RINGS:
        patches = [patch(field, 2**31) for field in (CONFIG.ring_max_cqe, CONFIG.ring_max_qp_wr)]
        patches += [patch(field, MAX) for field in (CONFIG.ring_max_qp, CONFIG.ring_max_cq)]
    else:
        patches = [patch(field, MAX) for field in (CONFIG.max_cqe, CONFIG.max_qp_wr)]
    spoilt(*patches, patch(CONFIG.max_send_sge, MAX))
    bind()
    attr = device().attr
    most_cqe, most_wr = (1 << 22, 1 << 16) if RINGS else (32768, 32768)
    ktap.equal((attr.max_cqe <= most_cqe, attr.max_qp_wr <= most_wr, attr.max_sge <= 32), (True,) * 3,
               "limits are sane")
    data_flows()
    recovers()


def config_of_huge_mrs(_rng):
    """The largest MR is one whose pages a command can count."""
    spoilt(patch(CONFIG.max_mr_size, 2**64 - 1))
    bind()
    ktap.equal(device().attr.max_mr_size, MAX << abi.PAGE_SHIFT, "max_mr_size")
    data_flows()
    recovers()


def attributes():
    """Returns what the driver tells of the device."""
    attr = device().context.query_device_ex()
    return attr.device_cap_flags_ex, attr.orig_attr.atomic_caps, attr.orig_attr.max_qp, attr.orig_attr.max_srq


def config_with_reserved_words(_rng):
    """The driver tells the same whatever reserved words hold: capabilities are those of the features."""
    before = attributes()
    spoilt(patch(CONFIG.reserved_38, 2**64 - 1), patch(CONFIG.reserved_68, MAX), patch(CONFIG.reserved_84, MAX),
           patch(CONFIG.reserved_c4, MAX))
    bind()
    ktap.equal(attributes(), before, "attributes")
    data_flows()
    recovers()


def config_of_another_model(_rng):
    """The driver works with a device of any vendor, model and version, and tells programs which one it is."""
    before = attributes()
    for number in (0, MAX):
        spoilt(patch(CONFIG.vendor_id, number), patch(CONFIG.vendor_part_id, number), patch(CONFIG.hw_ver, number),
               patch(CONFIG.fw_ver, number << 32 | number))
        bind()
        attr = device().attr
        ktap.equal((attr.vendor_id, attr.vendor_part_id, attr.hw_ver), (number,) * 3, "vendor, part and version")
        ktap.equal(attributes(), before, "attributes")
        data_flows()
        recovers()


TESTS = [config_of_ones, config_of_zeros, config_of_another_revision, config_without_objects,
         config_with_queues_that_do_not_exist, config_with_huge_queues, config_of_huge_mrs,
         config_with_reserved_words, config_of_another_model]
