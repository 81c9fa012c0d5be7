#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Verbs as consumers in the kernel use them, in loopback: kverbs.ko, whose KUnit
# suites run when it is loaded and report to the kernel's log.

. "$(dirname "$0")/lib.sh"

MODULE=$DIR/kverbs/kverbs.ko

need_device
[ -e "$MODULE" ] || skip_all "kverbs.ko was not built (make KDIR=...)"
need_kunit
wait_for gid_index >/dev/null || skip_all "$DEVICE has no RoCE v2 GID of an IPv4 address"

kunit_results "$MODULE" kverbs_ device="$DEVICE" rounds="$(rounds 200 | wc -l)"
STATUS=$?
rmmod kverbs 2>/dev/null
exit $STATUS
