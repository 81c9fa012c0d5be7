#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# The limits of a cgroup: how many contexts of the device (hca_handle) and how
# many objects (hca_object) its programs may have. One more is refused with the
# errno of rdmacg_try_charge(), and an object that is gone does not count.

. "$(dirname "$0")/lib.sh"

need_device
wait_for gid_index >/dev/null || skip_all "$DEVICE has no RoCE v2 GID of an IPv4 address"
grep -q '^rdma[[:space:]]' /proc/cgroups 2>/dev/null || skip_all "the kernel has no CONFIG_CGROUP_RDMA"

ROOT=/sys/fs/cgroup
OUT=/tmp/cgroup.$$
if [ ! -e $ROOT/cgroup.controllers ]; then
	mount -t cgroup2 cgroup2 $ROOT || skip_all "cannot mount cgroup2"
fi
grep -qw rdma $ROOT/cgroup.controllers || skip_all "the RDMA controller is not one of cgroup2"
echo +rdma >$ROOT/cgroup.subtree_control || skip_all "cannot enable the RDMA controller"
GROUP=$ROOT/virtio-rdma-$$
mkdir "$GROUP" || skip_all "cannot make a cgroup"

limit() { echo "$DEVICE $*" >"$GROUP/rdma.max"; }

# uses RESOURCE: prints how many of it the programs of the cgroup have.
uses()
{
	sed -n "s/^$DEVICE .*$1=\([0-9]*\).*/\1/p" "$GROUP/rdma.current" | grep . || echo 0
}

none_used() { [ "$(uses hca_handle)" = 0 ] && [ "$(uses hca_object)" = 0 ]; }

# hold KIND: starts a program in the cgroup that makes as many as it may; sets HOLDER.
hold()
{
	rm -f "$OUT"
	sh -c 'echo $$ >"$0/cgroup.procs" && exec env RDMA_DEVICE="$1" python3 "$2/verbs/hold.py" "$3"' \
		"$GROUP" "$DEVICE" "$DIR" "$1" >"$OUT" 2>&1 &
	HOLDER=$!
	wait_for grep -q "^$1 " "$OUT" && return
	sed 's/^/# /' "$OUT"
	kill -9 "$HOLDER"
	return 1
}

holds() { [ "$(cat "$OUT")" = "$1" ] || { sed 's/^/# /' "$OUT"; false; }; }

# ends SIGNAL: ends the program, and waits until its objects are gone.
ends()
{
	kill "-$1" "$HOLDER"
	wait "$HOLDER" 2>/dev/null
	wait_for none_used || { sed 's/^/# /' "$GROUP/rdma.current"; return 1; }
}

contexts()
{
	limit hca_handle=3 hca_object=max && hold contexts || return 1
	holds "contexts 3 EAGAIN" && [ "$(uses hca_handle)" = 3 ]
	result=$?
	ends TERM && return $result
}

objects()
{
	limit hca_handle=max hca_object=50 && hold objects || return 1
	holds "objects 50 EAGAIN" && [ "$(uses hca_object)" = 50 ]
	result=$?
	ends "$1" && return $result
}

# no_objects: a limit of 0.
no_objects()
{
	limit hca_object=0 && hold objects || return 1
	holds "objects 0 EAGAIN" && [ "$(uses hca_object)" = 0 ]
	result=$?
	ends TERM && return $result
}

# events: reads how often a limit was met.
events() { grep -q "^$DEVICE .*hca_object.max=[1-9]" "$GROUP/rdma.events"; }

# unlimited: programs outside of the cgroup have no limit.
unlimited() { limit hca_handle=0 && usable; }

# lifted: without limits the cgroup has as many objects as programs want.
lifted()
{
	limit hca_handle=max hca_object=max && hold objects || return 1
	holds "objects 200 0"
	result=$?
	ends KILL && return $result
}

gone_group() { rmdir "$GROUP"; }

ktap_print_header
ktap_set_plan 8
ktap_test_result "contexts" contexts
ktap_test_result "objects_of_a_program_that_ends" objects TERM
ktap_test_result "objects_of_a_program_that_is_killed" objects KILL
ktap_test_result "no_objects" no_objects
if [ -e "$GROUP/rdma.events" ]; then
	ktap_test_result "events" events
else
	ktap_test_skip "events # the kernel does not count them"
fi
ktap_test_result "others_are_not_limited" unlimited
ktap_test_result "limits_lifted" lifted
ktap_test_result "cgroup_removed" gone_group
ktap_finished
