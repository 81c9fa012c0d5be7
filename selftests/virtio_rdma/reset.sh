#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Resets of the device, idle and under programs that use it: of its PCI function,
# of which the kernel tells the driver before and afterwards, and one beneath the
# driver, of which it is not told. The driver takes the device into service again.

. "$(dirname "$0")/lib.sh"

need_device

# This file is there while resets are under way.
RESETS=/tmp/resets.$$

reset_loop()
{
	for round in $(rounds 5); do
		before && reset_function && is_back || return 1
	done
}

# reset_under_traffic: programs notice at once, and not when a command has no reply.
reset_under_traffic()
{
	dmesg -C
	before && traffic_start && reset_function && traffic_ended && is_back &&
	! dmesg | grep -q 'the device has failed'
}

# reset_of_nobody: the function of a device without a driver is reset, and the driver has it again.
reset_of_nobody()
{
	FUNCTION=$(pci_function) && unbind || return
	echo 1 2>/dev/null >"$FUNCTION/reset"
	bind && usable
}

# bind_failed_device: the driver is bound to a device that was given up (FAILED), as a probe that fails and a reset of the
# function that meets the end of a binding leave it. The driver resets the device first.
bind_failed_device()
{
	FUNCTION=$(pci_function) && unbind || return
	python3 "$DIR/device_status.py" "$FUNCTION" 0x81 || return
	bind && [ "$(cat "/sys/bus/virtio/devices/$VIRTIO/status")" = 0x0000000f ] && usable
}

# keep_master FUNCTION: lets a function be bus master again that was to be one and is not any more. The PCI core changes the
# command register without a lock, once to make the function bus master after its reset (virtio_pci_reset_done()), once to
# set up the interrupts of a driver that is bound at that moment (pci_intx()), and one of them may undo the other. Without
# bus mastering no interrupt comes, and each command takes its full time and fails.
keep_master()
{
	command=$(od -An -tu1 -j4 -N1 "$1/config")
	[ $((command & 4)) = 0 ] || return 0
	echo "# the kernel lost the function's bus mastering"
	printf "\\$(printf %o $((command | 4)))" | dd of="$1/config" bs=1 seek=4 conv=notrunc 2>/dev/null
}

# reset_while_unbound: the function is reset over and over while the driver goes and comes, so that resets begin with one
# binding and end with another or none. The driver cannot be bound while the function is disabled, so the resets have a
# number and not the bindings: a slow machine may have the function disabled whenever it tries.
reset_while_unbound()
{
	FUNCTION=$(pci_function) || return
	touch "$RESETS"
	{
		for round in $(rounds 20); do
			echo 1 2>/dev/null >"$FUNCTION/reset"
			keep_master "$FUNCTION"
		done
		rm "$RESETS"
	} &
	bindings=0
	while [ -e "$RESETS" ]; do
		[ ! -e "$DRIVER/$VIRTIO" ] || unbind || { wait $!; return 1; }
		bind 2>/dev/null && bindings=$((bindings + 1))
	done
	wait $!
	echo "# the driver was bound $bindings times between resets"
	[ $bindings -gt 0 ] || return
	[ ! -e "$DRIVER/$VIRTIO" ] || unbind || return
	bind && usable && before && reset_function && is_back
}

# reset_beneath_traffic: the driver finds out that the device was reset, and does not wait for a reply that never comes.
reset_beneath_traffic()
{
	dmesg -C
	before && traffic_start && reset_beneath && traffic_ended && is_back &&
	dmesg | grep -q 'it was reset during'
}

ktap_print_header
ktap_set_plan 7
ktap_test_result "usable" usable
for name in reset_beneath_traffic bind_failed_device; do
	if pci_function >/dev/null; then
		ktap_test_result "$name" "$name"
	else
		ktap_test_skip "$name # no PCI device"
	fi
done
for name in reset_loop reset_under_traffic reset_of_nobody reset_while_unbound; do
	if can_reset_function; then
		ktap_test_result "$name" "$name"
	else
		ktap_test_skip "$name # no PCI function that can be reset"
	fi
done
ktap_finished
