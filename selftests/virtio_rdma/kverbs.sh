#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Verbs as consumers in the kernel use them, in loopback: kverbs.ko, whose KUnit
# suites run when it is loaded and report to the kernel's log.

. "$(dirname "$0")/lib.sh"

MODULE=$DIR/kverbs/kverbs.ko
LOG=/tmp/kverbs.$$

need_device
[ -e "$MODULE" ] || skip_all "kverbs.ko was not built (make KDIR=...)"
case " $(cat /proc/cmdline) " in
*" kunit.enable=1 "*) ;;
*) skip_all "KUnit is not enabled (kunit.enable=1 kunit.autorun=1 on the kernel's command line)" ;;
esac
wait_for gid_index >/dev/null || skip_all "$DEVICE has no RoCE v2 GID of an IPv4 address"

MARK="kverbs.sh $$ begins"
echo "$MARK" >/dev/kmsg
insmod "$MODULE" device="$DEVICE" rounds="$(rounds 200 | wc -l)"
STATUS=$?
[ $STATUS != 0 ] || rmmod kverbs
dmesg --notime | sed "1,/$MARK/d" >"$LOG"

# Suites stand at the first level, their tests at the second, parameters of these
# below: the tests are the results, by the name of their suite.
echo "TAP version 13"
awk '
	/^ *# Subtest: kverbs_/ { suite = $NF; sub(/^kverbs_/, "", suite) }
	/^    (not )?ok / {
		line = $0
		sub(/^    /, "", line)
		match(line, /ok [0-9]+ /)
		print substr(line, 1, RSTART + 2) (++count) " " suite "_" substr(line, RSTART + RLENGTH)
		next
	}
	/^(not )?ok / { suites++ }
	{ print "# " $0 }
	END {
		if (suites != 5)
			print "not ok " (++count) " five suites have run"
		print "1.." count
	}' "$LOG"
[ $STATUS = 0 ] && ! grep -q '^ *not ok ' "$LOG"
