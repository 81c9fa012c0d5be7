# SPDX-License-Identifier: GPL-2.0
#
# Sourced after lib.sh: tests of a remote block device. The script that sources
# this has a function `disk`, which prints the name of the device.

PLACE=${PLACE:-/tmp/block.$$}

# store_up, store_down: makes and removes $PLACE/disk, the store of the target.
store_up() { mkdir -p "$PLACE" && mount -t tmpfs none "$PLACE" && truncate -s 96M "$PLACE/disk"; }
store_down() { umount "$PLACE" && rmdir "$PLACE"; }

# tree: makes files of many sizes, and their checksums.
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

make_fs()
{
	mkdir -p "$PLACE/mnt"
	# Zeros from buffers of mke2fs: the kernel's page of zeros is not in the memory
	# that user-mode Linux shares with a device.
	UNIX_IO_NOZEROOUT=1 mke2fs -q -t ext4 -E nodiscard,lazy_itable_init=0 -F "$(disk)"
}

write_tree() { make_fs && mount "$(disk)" "$PLACE/mnt" && tree && umount "$PLACE/mnt"; }

# read_tree: compares the files, which come from the target and not from a cache of the host.
read_tree()
{
	echo 3 >/proc/sys/vm/drop_caches
	mount -o ro "$(disk)" "$PLACE/mnt" || return
	(cd "$PLACE/mnt" && sha256sum --quiet -c "$PLACE/sums")
	result=$?
	umount "$PLACE/mnt" && return $result
}

# raw: writes large blocks past the caches of the host, and reads them back.
raw()
{
	head -c 8M /dev/urandom >"$PLACE/raw"
	dd if="$PLACE/raw" of="$(disk)" bs=512K seek=128 oflag=direct status=none && same_blocks
}

# verify [FIO-OPTION...]: writes and reads blocks of all sizes at random places in
# several jobs, each block with its checksum; on the whole device without options.
verify()
{
	# If the disk is gone, fio would make a file with its name.
	[ $# -gt 0 ] || set -- --filename="$(disk)" --allow_file_create=0
	fio --name=verify "$@" --ioengine=psync --direct=1 --rw=randrw \
		--bsrange=4k-256k --size=16m --numjobs=2 --offset_increment=16m \
		--verify=crc32c --verify_fatal=1 --randseed=7 >"$PLACE/fio" 2>&1 && return
	tail -n 20 "$PLACE/fio" | sed 's/^/# /'
	return 1
}

same_blocks() { dd if="$(disk)" bs=1M count=8 skip=64 iflag=direct status=none | cmp - "$PLACE/raw"; }

# load: runs verify again and again until $PLACE/stop is there.
load()
{
	rm -f "$PLACE/stop"
	while echo "running" && [ ! -e "$PLACE/stop" ]; do
		verify "$@" || return
	done
}

# load_fs: does the same in new files of the file system.
load_fs()
{
	mount "$(disk)" "$PLACE/mnt" || return
	load --directory="$PLACE/mnt"
	result=$?
	umount "$PLACE/mnt" && return $result
}

# load_dirty: writes a file of the file system through the page cache while memory is short, until $PLACE/stop is there.
load_dirty()
{
	rm -f "$PLACE/stop" && mount "$(disk)" "$PLACE/mnt" || return
	python3 "$DIR/dirty.py" "$PLACE/mnt/dirty" "$PLACE/stop"
	result=$?
	umount "$PLACE/mnt" && return $result
}

# memory_sufficed: whether the kernel got each piece of memory that it said it needed, and no task waited for minutes.
memory_sufficed() { ! dmesg | grep -E 'page allocation failure|Out of memory|blocked for more than'; }

check_fs() { e2fsck -fn "$(disk)"; }

# has_connections: whether the kernel has QPs for connections, which may not be made yet.
has_connections() { rdma resource show qp 2>/dev/null | grep -Eq 'type RC .*comm \['; }

# no_connections: fails if the kernel has connections, or memory that is registered for them.
no_connections()
{
	! has_connections &&
		! rdma resource show mr 2>/dev/null | grep -Eq 'comm \[(nvme|ib_is|ib_srp|rds|rpcrdma|rtrs|smbdirect|smc)'
}
