# SPDX-License-Identifier: GPL-2.0
#
# Functions that the scripts share. RDMA_DEVICE names the device under test, by
# default the first one of the driver.

. "$(dirname "$0")/../kselftest/ktap_helpers.sh"

DRIVER=/sys/bus/virtio/drivers/virtio_rdma
DIR=$(cd "$(dirname "$0")" && pwd)

# skip_all REASON: ends the program, whose tests cannot run here.
skip_all()
{
	ktap_print_header
	ktap_skip_all "$*"
	exit "$KSFT_SKIP"
}

# fail_all REASON: ends the program, whose tests cannot run although they must.
fail_all()
{
	ktap_print_header
	ktap_set_plan 1
	ktap_print_msg "$*"
	ktap_test_fail has_a_device
	ktap_finished
}

# rounds COUNT: prints the numbers from 1 to COUNT, or to LOOPS_PERCENT of that
# if it is set: a slow machine runs fewer rounds.
rounds() { seq $((($1 * ${LOOPS_PERCENT:-100} + 99) / 100)); }

# infiniband_of VIRTIO: prints the directory with the RDMA device of a virtio device. It stands below the PCI function, or
# below the virtio device if that is on another bus.
infiniband_of()
{
	for path in "$DRIVER/$1/infiniband" "$DRIVER/$1/../infiniband"; do
		[ -d "$path" ] || continue
		echo "$path"
		return
	done
	return 1
}

# virtio_device [NAME]: prints the name of the first bound device (virtioN), or of the one with the RDMA device NAME.
virtio_device()
{
	for path in "$DRIVER"/virtio*; do
		virtio=${path##*/}
		infiniband=$(infiniband_of "$virtio") && [ -e "$infiniband/${1:-}" ] || continue
		echo "$virtio"
		return
	done
	return 1
}

# on_the_bus: whether the machine has a virtio device of type RDMA, with a driver or without.
on_the_bus() { grep -qsx 0x002a /sys/bus/virtio/devices/*/device; }

# need_device: skips all tests if the machine has no virtio device of type RDMA, and fails if it has one without a driver
# that works; sets VIRTIO (the virtio device), DEVICE, NETDEV and PORT.
need_device()
{
	[ "$(id -u)" = 0 ] || skip_all "must be root"
	[ -d "$DRIVER" ] || modprobe -q virtio_rdma
	on_the_bus || skip_all "no virtio RDMA device"
	[ -d "$DRIVER" ] || fail_all "virtio_rdma is not there"
	wait_for virtio_device >/dev/null || fail_all "virtio_rdma has no RDMA device"
	VIRTIO=$(virtio_device)
	need_found
}

# need_any_device: the same, but where RDMA_DEVICE is set it may be of another
# driver, as the peer of a program that runs on two hosts; VIRTIO is not set then.
need_any_device()
{
	[ -n "${RDMA_DEVICE:-}" ] || { need_device; return; }
	[ "$(id -u)" = 0 ] || skip_all "must be root"
	need_found
}

# need_found: sets DEVICE, NETDEV and PORT; fails if RDMA_DEVICE names a device that is not there.
need_found()
{
	find_device
	[ -e "$PORT" ] || fail_all "there is no $DEVICE"
}

# find_device: sets DEVICE, NETDEV and PORT. Fails, and changes none of them, if the RDMA device of $VIRTIO has gone and
# RDMA_DEVICE does not say which one is meant.
find_device()
{
	found=${RDMA_DEVICE:-$(ls "$(infiniband_of "$VIRTIO")" 2>/dev/null | head -n 1)}
	[ -n "$found" ] || return
	DEVICE=$found
	PORT=/sys/class/infiniband/$DEVICE/ports/1
	NETDEV=$(rdma link show "$DEVICE/1" | sed -n 's/.* netdev \([^ ]*\).*/\1/p')
}

# wait_for CMD...: waits until CMD succeeds. It waits for events that have been
# caused already; the bound is for an event that never comes.
wait_for()
{
	tries=0
	until "$@"; do
		tries=$((tries + 1))
		[ $tries -lt 2400 ] || return 1
		sleep 0.05
	done
}

active() { grep -q ACTIVE "$PORT/state" 2>/dev/null; }
inactive() { [ -e "$PORT/state" ] && ! active; }

# roce_gid REGEX: prints the index of the first entry of the port's table that matches and is RoCE v2. One process looks
# at all entries: the table is long, and a fork is slow on a kernel that checks itself.
roce_gid()
{
	for gid in $(grep -ls "$1" "$PORT"/gids/*); do
		grep -q 'RoCE v2' "$PORT/gid_attrs/types/${gid##*/}" 2>/dev/null || continue
		echo "${gid##*/}"
		return
	done
	return 1
}

# has_gid GID: whether the port's table holds it as RoCE v2.
has_gid() { roce_gid "^$1\$" >/dev/null; }

no_gid() { ! has_gid "$1"; }

# port_address: prints the IPv4 address of the GID at gid_index, which is in the last bytes of the GID.
port_address()
{
	# shellcheck disable=SC2046 # four numbers
	printf '%d.%d.%d.%d\n' $(sed 's/.*ffff:\(..\)\(..\):\(..\)\(..\)$/0x\1 0x\2 0x\3 0x\4/' "$PORT/gids/$(gid_index)")
}

# need_mads: skips all tests if the RDMA CM cannot send MADs, as with virtqueues of 256 entries in user-mode Linux.
need_mads()
{
	rdma resource show qp link "$DEVICE" | grep -q 'type GSI' || skip_all "no MADs, and so no connections"
}

# mapped A B C D: prints the GID of an IPv4 address.
mapped() { printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' "$@"; }

# is_ready: whether there is a device whose port is active and has a GID; sets VIRTIO, DEVICE, NETDEV and PORT. Each call
# looks for the device: the driver removes one that was reset, and has another one later.
is_ready() { VIRTIO=$(virtio_device) && find_device && active && gid_index >/dev/null; }

# usable: waits until the device is there and active, and moves data.
usable()
{
	wait_for is_ready || return 1
	RDMA_DEVICE=$DEVICE python3 "$DIR/verbs/rc_data.py" send rdma_read >/tmp/usable.$$ 2>&1 && return 0
	sed 's/^/# /' /tmp/usable.$$
	return 1
}

# gid_index: prints the index of the first RoCE v2 GID of an IPv4 address.
gid_index() { roce_gid '^0000:0000:0000:0000:0000:ffff:'; }

gone() { [ ! -e "/sys/class/infiniband/$DEVICE" ]; }

# gids: prints the GIDs of the port's table, without their indices.
gids() { grep -hv '^0000:0000:0000:0000:0000:0000:0000:0000$' "$PORT"/gids/* 2>/dev/null | sort; }
same_gids() { [ "$(gids)" = "$GIDS" ]; }

# is_new: whether the RDMA device is another than that of the index $INDEX.
index() { rdma dev show "$DEVICE" 2>/dev/null | sed -n 's/^\([0-9]*\):.*/\1/p'; }
is_new() { NEW=$(index) && [ -n "$NEW" ] && [ "$NEW" != "$INDEX" ]; }

# before: notes the RDMA device that is there, for is_new and same_gids.
before() { GIDS=$(gids) && INDEX=$(index) && [ -n "$GIDS" ] && [ -n "$INDEX" ]; }

# unbind, bind: takes the device from the driver, and gives it back.
unbind() { echo "$VIRTIO" >"$DRIVER/unbind" && gone; }
bind() { echo "$VIRTIO" >"$DRIVER/bind"; }

# pci_function: prints the directory of the PCI function that the device is.
pci_function()
{
	path=$(readlink -f "/sys/class/infiniband/$DEVICE/device")
	[ "$(basename "$(readlink "$path/subsystem")")" = pci ] && echo "$path"
}

# can_reset_function: whether the device is a PCI function that can be reset.
can_reset_function() { function=$(pci_function) && [ -w "$function/reset" ]; }

# reset_function: resets that function. The kernel tells the driver before and afterwards.
reset_function()
{
	can_reset_function || return
	# QEMU's port says nothing of its link, so the kernel reports an error although the reset was done.
	echo 1 2>/dev/null >"$function/reset"
	return 0
}

# reset_beneath: resets the device beneath the driver, which looks at the device when a command has no reply for a second.
reset_beneath()
{
	function=$(pci_function) && python3 "$DIR/device_status.py" "$function" 0 || return
	! ibv_devinfo -d "$DEVICE" >/dev/null 2>&1
}

# is_back: waits until there is another RDMA device, by the same name and with the same GIDs, and moves data.
is_back() { wait_for is_new && wait_for same_gids && usable; }

# lose_device: does that, and waits until the driver has taken the device into service again.
lose_device() { before && reset_beneath && wait_for is_new && wait_for same_gids; }

# Bounds a program that does not notice that its device is gone.
TRAFFIC_SECONDS=300

# traffic_start: starts programs that use the device until it is gone; sets TRAFFIC.
traffic_start()
{
	TRAFFIC=
	rm -f /tmp/traffic.$$.*
	for number in 1 2 3; do
		RDMA_DEVICE=$DEVICE timeout -k 1 $TRAFFIC_SECONDS python3 "$DIR/verbs/traffic.py" >/tmp/traffic.$$.$number 2>&1 &
		TRAFFIC="$TRAFFIC $!"
	done
	for number in 1 2 3; do
		wait_for grep -q running /tmp/traffic.$$.$number || return 1
	done
}

# traffic_ended: fails unless every program notices that the device is gone, and ends by itself.
traffic_ended()
{
	failed=0
	for pid in $TRAFFIC; do
		wait "$pid" || failed=1
	done
	[ $failed = 0 ] || sed 's/^/# /' /tmp/traffic.$$.*
	return $failed
}

# need_kunit: skip everything where the kernel does not run KUnit suites of modules that are loaded.
need_kunit()
{
	case " $(cat /proc/cmdline) " in
	*" kunit.enable=1 "*) ;;
	*) skip_all "KUnit is not enabled (kunit.enable=1 kunit.autorun=1 on the kernel's command line)" ;;
	esac
}

# kunit_results MODULE PREFIX [PARAMETER...]: load a module, with parameters, whose KUnit suites report to the kernel's
# log, and print the results of those whose names begin with PREFIX.
kunit_results()
{
	module=$1 prefix=$2
	shift 2
	mark="${0##*/} $$ loads $module"
	echo "$mark" >/dev/kmsg
	insmod "$module" "$@"
	status=$?
	dmesg --notime | sed "1,\|$mark|d" >/tmp/kunit.$$

	# Suites stand at the first level, their tests at the second, parameters of these below: the tests are the
	# results, by the name of their suite.
	echo "TAP version 13"
	awk -v prefix="$prefix" '
		/^ *# Subtest: / && index($NF, prefix) == 1 { suite = substr($NF, length(prefix) + 1) }
		/^    (not )?ok / {
			line = $0
			sub(/^    /, "", line)
			match(line, /ok [0-9]+ /)
			print substr(line, 1, RSTART + 2) (++count) " " suite "_" substr(line, RSTART + RLENGTH)
			next
		}
		/^1\.\./ { planned = substr($1, 4) }
		/^(not )?ok / { suites++ }
		{ print "# " $0 }
		END {
			if (!planned || suites != planned)
				print "not ok " (++count) " all suites have run: " suites + 0 " of " planned + 0
			print "1.." count
		}' /tmp/kunit.$$
	[ $status = 0 ] && ! grep -q '^ *not ok ' /tmp/kunit.$$
}
