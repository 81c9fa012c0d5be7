# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: the RDMA network block device, server and client.
# ADDRESS is the server's. It exports block devices, so a loop device lies on the
# file. The server of RTRS maps an MR of one page with a page size of 128 KiB.

SESSION=virtio-rdma
CLIENT_CLASS=/sys/class/rnbd-client/ctl

# missing: a kernel with CFI counts as one without. rnbd_client of Linux 7.2.12 gives a device attributes of struct
# kobj_attribute. With CFI, struct device_attribute is longer, dev_attr_store() reads beyond their end, and nothing can be
# mapped.
missing()
{
	modprobe -a loop rnbd_server rnbd_client 2>/dev/null || { echo "the kernel has no RNBD"; return; }
	! grep -q ' __cfi_rnbd_clt_map_device_store' /proc/kallsyms || echo "rnbd_client does not work in a kernel with CFI"
}

target_up() { store_up && losetup /dev/loop0 "$PLACE/disk"; }
target_down() { losetup -d /dev/loop0 && store_down; }

# disk: prints the disk that is mapped.
disk()
{
	for path in /sys/block/rnbd*; do
		[ -b "/dev/${path##*/}" ] && [ "$(cat "$path/size")" != 0 ] || continue
		echo "/dev/${path##*/}"
		return
	done
	return 1
}

no_disk() { ! disk >/dev/null; }

connect()
{
	echo "sessname=$SESSION path=ip:$ADDRESS device_path=/dev/loop0" >$CLIENT_CLASS/map_device &&
	wait_for disk >/dev/null
}

# disconnect: the session ends with its last device.
disconnect()
{
	name=$(disk) || return
	echo normal >"/sys/block/${name##*/}/rnbd/unmap_device" && wait_for no_disk && wait_for no_connections
}
