#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Loading and unloading the module, idle, in a loop, and with programs running.

. "$(dirname "$0")/lib.sh"

need_device
[ -d /sys/module/virtio_rdma/holders ] || skip_all "the driver is built in"

reload_loop()
{
	for round in $(rounds 20); do
		rmmod virtio_rdma || return 1
		gone || return 1
		modprobe virtio_rdma || return 1
	done
	usable
}

# Programs hold the device open: rmmod takes it from them, and they end.
unload_under_traffic()
{
	traffic_start && rmmod virtio_rdma && traffic_ended && modprobe virtio_rdma && usable
}

ktap_print_header
ktap_set_plan 3
ktap_test_result "usable" usable
ktap_test_result "reload_loop" reload_loop
ktap_test_result "unload_under_traffic" unload_under_traffic
ktap_finished
