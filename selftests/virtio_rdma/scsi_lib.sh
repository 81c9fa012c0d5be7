# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: the kernel's SCSI target with a file behind it, and
# its disk on the host. The script that sources this has the functions portal_up
# and portal_down, and TPG, the directory of the target portal group.

TARGET=/sys/kernel/config/target
STORE=$TARGET/core/fileio_0/disk

modules() { modprobe -a target_core_mod target_core_file sd_mod "$@" 2>/dev/null && [ -d "$TARGET" ]; }

target_up()
{
	store_up &&
	mkdir -p "$STORE" &&
	echo "fd_dev_name=$PLACE/disk,fd_dev_size=$((96 << 20)),fd_buffered_io=1" >"$STORE/control" &&
	echo 1 >"$STORE/enable" &&
	portal_up
}

# lun_up, lun_down: makes and removes the LUN of the portal group.
lun_up() { mkdir "$TPG/lun/lun_0" && ln -s "$STORE" "$TPG/lun/lun_0/"; }
lun_down() { rm "$TPG/lun/lun_0/disk" && rmdir "$TPG/lun/lun_0"; }

target_down() { portal_down && rmdir "$STORE" "${STORE%/*}" && store_down; }

# disk: prints the disk of the kernel's target. That of iSER has its place in sysfs below the function of the RDMA
# device, and loses it with that, while the disk itself stays: then it is the disk that was there before.
disk()
{
	for path in /sys/block/sd*; do
		grep -q LIO-ORG "$path/device/vendor" 2>/dev/null || continue
		[ "$(cat "$path/size")" != 0 ] && [ -b "/dev/${path##*/}" ] || continue
		echo "/dev/${path##*/}" | tee "$PLACE.disk"
		return
	done
	[ -s "$PLACE.disk" ] && blockdev --getsize64 "$(cat "$PLACE.disk")" >/dev/null 2>&1 && cat "$PLACE.disk"
}

no_disk() { ! disk >/dev/null; }
