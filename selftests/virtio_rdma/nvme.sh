#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# NVMe over Fabrics in one guest, target and host: fast registration and
# invalidation, as kernel consumers use them. Blocks with checksums, and an ext4
# on the remote namespace with a tree of files.

. "$(dirname "$0")/lib.sh"

NQN=nqn.2026-01.test:virtio-rdma
CONFIG=/sys/kernel/config/nvmet
SUBSYSTEM=$CONFIG/subsystems/$NQN
NVMET_PORT=$CONFIG/ports/1
PLACE=/tmp/nvme.$$
QUEUES=2
ROUNDS=3

need_device
wait_for active || skip_all "the port is not active"
wait_for gid_index >/dev/null || skip_all "the port has no GID of an IPv4 address"
# mapped GIDs end in the address, a byte in two digits
ADDRESS=$(sed 's/.*ffff:\(..\)\(..\):\(..\)\(..\)$/0x\1 0x\2 0x\3 0x\4/' "$PORT/gids/$(gid_index)")
# shellcheck disable=SC2086 # four numbers
ADDRESS=$(printf '%d.%d.%d.%d' $ADDRESS)

# With rings of 256 entries, as in user-mode Linux without F_RINGS, MADs do not start.
rdma resource show qp link "$DEVICE" | grep -q 'type GSI' || skip_all "no MADs, and so no connections"
command -v fio >/dev/null || skip_all "no fio"
modprobe -a nvmet nvmet-rdma nvme-rdma 2>/dev/null || skip_all "the kernel has no NVMe over RDMA"
[ -d "$CONFIG" ] || mount -t configfs configfs /sys/kernel/config 2>/dev/null
[ -d "$CONFIG" ] || skip_all "no configfs"
[ -c /dev/nvme-fabrics ] || skip_all "no /dev/nvme-fabrics"

target_up()
{
	mkdir -p "$PLACE" && mount -t tmpfs none "$PLACE" &&
	truncate -s 96M "$PLACE/disk" &&
	mkdir "$SUBSYSTEM" && echo 1 >"$SUBSYSTEM/attr_allow_any_host" &&
	mkdir "$SUBSYSTEM/namespaces/1" &&
	echo "$PLACE/disk" >"$SUBSYSTEM/namespaces/1/device_path" &&
	echo 1 >"$SUBSYSTEM/namespaces/1/buffered_io" &&
	echo 1 >"$SUBSYSTEM/namespaces/1/enable" &&
	mkdir "$NVMET_PORT" &&
	echo rdma >"$NVMET_PORT/addr_trtype" &&
	echo ipv4 >"$NVMET_PORT/addr_adrfam" &&
	echo "$ADDRESS" >"$NVMET_PORT/addr_traddr" &&
	echo 4420 >"$NVMET_PORT/addr_trsvcid" &&
	ln -s "$SUBSYSTEM" "$NVMET_PORT/subsystems/"
}

target_down()
{
	rm -f "$NVMET_PORT/subsystems/$NQN"
	rmdir "$NVMET_PORT" &&
	echo 0 >"$SUBSYSTEM/namespaces/1/enable" &&
	rmdir "$SUBSYSTEM/namespaces/1" "$SUBSYSTEM" &&
	umount "$PLACE" && rmdir "$PLACE"
}

# controller: the name of the controller that is connected to the target.
controller()
{
	for path in /sys/class/nvme/nvme*; do
		[ "$(cat "$path/subsysnqn" 2>/dev/null)" = $NQN ] || continue
		basename "$path"
		return
	done
	return 1
}

# disk: its namespace's block device.
disk()
{
	name=$(controller) || return 1
	for path in "/sys/class/nvme/$name/$name"*n* "/sys/class/nvme/$name"/nvme*n*; do
		name=$(basename "$path" | sed 's/c[0-9]*n/n/')
		[ -b "/dev/$name" ] || continue
		echo "/dev/$name"
		return
	done
	return 1
}

connect()
{
	printf 'transport=rdma,traddr=%s,trsvcid=4420,nqn=%s,nr_io_queues=%d,queue_size=32' \
		"$ADDRESS" $NQN $QUEUES >/dev/nvme-fabrics && wait_for disk >/dev/null
}

disconnect()
{
	echo 1 >"/sys/class/nvme/$(controller)/delete_controller"
	! controller >/dev/null
}

# tree: files of many sizes, and their checksums.
tree()
{
	(
		cd "$PLACE/mnt" || exit
		for size in 1 511 4096 4097 65536 131073 1048576 5000001; do
			head -c $size /dev/urandom >"file.$size" || exit
		done
		sha256sum file.* >"$PLACE/sums"
	)
}

write_tree()
{
	mkdir -p "$PLACE/mnt"
	# Zeros from buffers of mke2fs: the kernel's page of zeros is not in the memory
	# that user-mode Linux shares with a device.
	UNIX_IO_NOZEROOUT=1 mke2fs -q -t ext4 -E nodiscard,lazy_itable_init=0 -F "$(disk)" &&
	mount "$(disk)" "$PLACE/mnt" && tree && umount "$PLACE/mnt"
}

# read_tree: from the target, not from what the host remembers.
read_tree()
{
	echo 3 >/proc/sys/vm/drop_caches
	mount -o ro "$(disk)" "$PLACE/mnt" || return
	(cd "$PLACE/mnt" && sha256sum --quiet -c "$PLACE/sums")
	result=$?
	umount "$PLACE/mnt" && return $result
}

# raw: large blocks past every cache of the host, written and read back.
raw()
{
	head -c 8M /dev/urandom >"$PLACE/raw"
	dd if="$PLACE/raw" of="$(disk)" bs=512K seek=128 oflag=direct status=none && same_blocks
}

# verify: all sizes at random places by several jobs, each block with its checksum.
verify()
{
	fio --name=verify --filename="$(disk)" --ioengine=psync --direct=1 --rw=randrw \
		--bsrange=4k-256k --size=16m --numjobs=2 --offset_increment=16m \
		--verify=crc32c --verify_fatal=1 --randseed=7 >"$PLACE/fio" 2>&1 && return
	tail -n 20 "$PLACE/fio" | sed 's/^/# /'
	return 1
}

same_blocks() { dd if="$(disk)" bs=1M count=8 skip=64 iflag=direct status=none | cmp - "$PLACE/raw"; }

again()
{
	round=0
	while [ $round -lt $ROUNDS ]; do
		connect && same_blocks && disconnect || return
		round=$((round + 1))
	done
}

rdma_count() { rdma resource show "$1" 2>/dev/null | grep -c "$2"; }
no_connections() { [ "$(rdma_count qp 'type RC')" = 0 ] && [ "$(rdma_count mr 'comm \[nvm')" = 0 ]; }
nothing_left() { target_down && wait_for no_connections; }

# on_ext4 NAME CMD...: skipped where the tools to make a file system are missing.
on_ext4()
{
	if command -v mke2fs >/dev/null; then
		ktap_test_result "$@"
	else
		ktap_test_skip "$1 (no mke2fs)"
	fi
}

ktap_print_header
ktap_set_plan 9
ktap_test_result "target_up" target_up
ktap_test_result "connect" connect
ktap_test_result "raw_blocks" raw
ktap_test_result "fio_verify" verify
on_ext4 "ext4_written" write_tree
on_ext4 "ext4_read" read_tree
ktap_test_result "disconnect" disconnect
ktap_test_result "reconnect_and_compare" again
ktap_test_result "nothing_left" nothing_left
ktap_finished
