#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# The KUnit suites of the driver itself, of what needs no device: a module that
# has them takes the place of the driver for as long as they run.

. "$(dirname "$0")/lib.sh"

MODULE=$DIR/kunit/virtio_rdma.ko

need_device
[ -d /sys/module/virtio_rdma/holders ] || skip_all "the driver is built in"
[ -e "$MODULE" ] || skip_all "no driver with KUnit tests was built"
need_kunit

rmmod virtio_rdma && gone || exit 1
kunit_results "$MODULE" virtio_rdma_
STATUS=$?
# The driver that was there before serves the device again.
rmmod virtio_rdma 2>/dev/null
modprobe virtio_rdma && usable || exit 1
exit $STATUS
