#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Usage: RDMA_DEVICE=NAME fault.sh STEP [ARGUMENT...]
#
# Has something happen to this host's device, and undoes it: a function below. A program outside runs the steps while
# consumers use the device. NAME need not be there.

. "$(dirname "$0")/lib.sh"

DEVICE=$RDMA_DEVICE
PORT=/sys/class/infiniband/$DEVICE/ports/1
# What a step notes for the one that undoes it.
NOTES=/tmp/fault

# note: notes what the device is, before it goes.
note()
{
	VIRTIO=$(virtio_device "$DEVICE") &&
	mkdir -p $NOTES && gids >$NOTES/gids && echo "$VIRTIO" >$NOTES/virtio
}

# same_as_noted, back: whether the device is there with the GIDs that it had; waits until it is, and is active.
same_as_noted() { [ -s $NOTES/gids ] && [ "$(gids)" = "$(cat $NOTES/gids)" ]; }
back() { wait_for same_as_noted && wait_for active; }

# Each of these has the device go, and the one below brings it back.
unload_driver() { note && rmmod virtio_rdma && gone; }
# load_driver [PARAMETER=VALUE...]: loads the driver again, with these parameters.
load_driver() { insmod /run/vr/virtio_rdma.ko "$@" && back; }
reload_driver() { unload_driver && load_driver "$@"; }

# unload_waiting: unloads the driver while it waits for consumers to let go of a device that has failed.
unload_waiting()
{
	note && dmesg -C && reset_beneath && wait_for has_reset && wait_for has_started && rmmod virtio_rdma && gone &&
	! dmesg | grep -q 'the device is in service again'
}
has_reset() { dmesg | grep -q 'resets the device that has failed'; }
# has_started: the driver has the device's queues again: the status is 0 from the reset until then.
has_started() { [ "$(cat "/sys/bus/virtio/devices/$VIRTIO/status")" = 0x0000000f ]; }

unbind_device() { note && echo "$VIRTIO" >"$DRIVER/unbind" && gone; }
bind_device() { cat $NOTES/virtio >"$DRIVER/bind" && back; }

remove_function() { note && FUNCTION=$(pci_function) && echo 1 >"$FUNCTION/remove" && gone; }
find_function() { echo 1 >/sys/bus/pci/rescan && back; }

# break_link SECONDS: takes the network interface down for this long.
break_link()
{
	find_device
	note && ip link set "$NETDEV" down && wait_for inactive && sleep "$1" && ip link set "$NETDEV" up && back
}

"$@"
