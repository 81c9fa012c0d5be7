#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# NVMe over Fabrics in one guest, target and host: fast registration and
# invalidation, as kernel consumers use them. Blocks with checksums, and an ext4
# on the remote namespace with a tree of files.

. "$(dirname "$0")/lib.sh"
. "$DIR/block_lib.sh"
. "$DIR/nvme_lib.sh"

ROUNDS=3

need_device
wait_for active || skip_all "the port is not active"
wait_for gid_index >/dev/null || skip_all "the port has no GID of an IPv4 address"
need_mads
ibv_devinfo -v -d "$DEVICE" | grep -q MEM_MGT_EXTENSIONS || skip_all "$DEVICE has no fast registration"
command -v fio >/dev/null || skip_all "no fio"
MISSING=$(missing)
[ -z "$MISSING" ] || skip_all "$MISSING"
ADDRESS=$(port_address)

again()
{
	round=0
	while [ $round -lt $ROUNDS ]; do
		connect && same_blocks && disconnect || return
		round=$((round + 1))
	done
}

nothing_left() { target_down && wait_for no_connections; }

# on_ext4 NAME CMD...: runs a test, which is skipped if the tools to make a file system are missing.
on_ext4()
{
	if command -v mke2fs >/dev/null; then
		ktap_test_result "$@"
	else
		ktap_test_skip "$1 # no mke2fs"
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
