#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# The device taken from the driver, idle and under programs that use it: unbind
# from the virtio bus, and removal of its PCI function.
# A consumer in the kernel destroys its PD later than it should.

. "$(dirname "$0")/lib.sh"

need_device

LATE_PD=$DIR/kverbs/late_pd.ko

unbind_loop()
{
	for round in $(rounds 10); do
		unbind && bind || return 1
	done
	usable
}

unbind_under_traffic()
{
	for round in $(rounds 3); do
		traffic_start && unbind && traffic_ended && bind || return 1
		usable || return 1
	done
}

remove() { echo 1 >"$FUNCTION/remove" && gone; }
rescan() { echo 1 >/sys/bus/pci/rescan; }

remove_loop()
{
	for round in $(rounds 5); do
		FUNCTION=$(pci_function) && remove && rescan || return 1
		usable || return 1
	done
}

remove_under_traffic()
{
	for round in $(rounds 2); do
		traffic_start && FUNCTION=$(pci_function) && remove && traffic_ended && rescan || return 1
		usable || return 1
	done
}

# vectors: prints the CPUs to which interrupts of completions may go, each once.
vectors()
{
	for irq in $(awk -v name="$VIRTIO-completions" '$NF == name { sub(":", "", $1); print $1 }' /proc/interrupts); do
		cpus "$(cat "/proc/irq/$irq/smp_affinity_list")"
	done | sort -nu
}

# cpus LIST: prints the numbers of a list of ranges.
cpus()
{
	echo "$1" | tr , '\n' | while IFS=- read -r first last; do seq "$first" "${last:-$first}"; done
}

# vectors_reach_all: every CPU may get completions.
vectors_reach_all()
{
	VIRTIO=$(virtio_device) && [ "$(vectors)" = "$(cpus "$(cat /sys/devices/system/cpu/online)")" ]
}

# late_pd: the driver waits for a PD that a consumer in the kernel destroys after it was told that the device goes.
late_pd()
{
	dmesg -C && insmod "$LATE_PD" device="$DEVICE" && unbind && dmesg | grep -q 'late_pd: destroys the PD' &&
	rmmod late_pd && bind && usable
}

ktap_print_header
ktap_set_plan 7
ktap_test_result "usable" usable
ktap_test_result "unbind_loop" unbind_loop
ktap_test_result "unbind_under_traffic" unbind_under_traffic
if [ -e "$LATE_PD" ]; then
	ktap_test_result "late_pd" late_pd
else
	ktap_test_skip "late_pd # late_pd.ko was not built (make KDIR=...)"
fi
for name in vectors_reach_all remove_loop remove_under_traffic; do
	if pci_function >/dev/null; then
		ktap_test_result "$name" "$name"
	else
		ktap_test_skip "$name # no PCI device"
	fi
done
ktap_finished
