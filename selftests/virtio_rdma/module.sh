#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Loading and unloading the module, idle, in a loop, and with programs running.

. "$(dirname "$0")/lib.sh"

need_device
[ -d /sys/module/virtio_rdma/holders ] || skip_all "the driver is built in"

LATE_PD=$DIR/kverbs/late_pd.ko

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

# unload_with_late_pd: the module stays for a consumer in the kernel that destroys its PD later than the driver allows,
# which calls the module.
unload_with_late_pd()
{
	dmesg -C && insmod "$LATE_PD" device="$DEVICE" hold=1 || return
	rmmod virtio_rdma &
	unload=$!
	wait_for module_waits && echo 0 >/sys/module/late_pd/parameters/hold && wait $unload &&
	dmesg | grep -q 'late_pd: destroys the PD' && rmmod late_pd && modprobe virtio_rdma && usable
}
module_waits() { dmesg | grep -q 'the module waits for it'; }

ktap_print_header
ktap_set_plan 4
ktap_test_result "usable" usable
ktap_test_result "reload_loop" reload_loop
ktap_test_result "unload_under_traffic" unload_under_traffic
if [ -e "$LATE_PD" ]; then
	ktap_test_result "unload_with_late_pd" unload_with_late_pd
else
	ktap_test_skip "unload_with_late_pd # late_pd.ko was not built (make KDIR=...)"
fi
ktap_finished
