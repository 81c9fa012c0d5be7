#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Devices are frozen and thawed, as they are before and after the snapshot of a
# hibernation (pm_test), idle and under programs: those end, also the ones that
# poll, and the RDMA device is back by its name and with its GIDs; also if the
# driver is about to take a device that has failed into service again. A suspend,
# of a device that keeps its state, goes on where it was.
#
# ADDRESS is that of another machine, with a target of each of CONSUMERS (nvme,
# iser), SWAP a disk that the kernel resumes from: a file system on the former
# under load lives through a freeze, and everything lives through a hibernation.
#
# Only in a guest that is for this: file systems of its host (9p) do not survive.

. "$(dirname "$0")/lib.sh"
. "$DIR/block_lib.sh"

need_device
[ -w /sys/power/pm_test ] || skip_all "the kernel cannot test sleep states (CONFIG_PM_DEBUG)"
grep -q disk /sys/power/state || skip_all "the kernel has no hibernation"
[ -n "${SLEEPS:-}" ] || skip_all "not in a guest that other tests follow in (SLEEPS=1)"

# Files that are needed later must not be on the host.
case $DIR in
/tmp/*) ;;
*)
	PLACE=/tmp/suspend.$$
	mkdir "$PLACE" && cp -r "$DIR" "$DIR/../kselftest" "$PLACE/" || exit 1
	# Nor may modules.
	modprobe -aq rdma_ucm ib_umad nvme-rdma ib_iser sd_mod ext4
	cd / && exec "$PLACE/$(basename "$DIR")/suspend.sh"
	;;
esac

# forget_host: unmounts the file systems of the host, because a process that uses one would hang.
forget_host()
{
	for path in $(awk '$3 == "9p" { print $2 }' /proc/mounts); do
		umount -l "$path" || return
	done
}

# enter STATE: enters a sleep state, and returns when the machine is awake.
enter() { echo "$1" >/sys/power/state; }

# sleeps LEVEL STATE: freezes tasks and devices as for that state, up to that level of it, and thaws them.
sleeps()
{
	echo "$1" >/sys/power/pm_test && enter "$2"
	result=$?
	echo none >/sys/power/pm_test
	return $result
}

# freezes: freezes and thaws as before and after a snapshot; the device loses its state.
freezes() { sleeps devices disk; }

# hibernates: writes all memory to $SWAP, restarts the machine, and reads it back.
hibernates()
{
	mkswap "$SWAP" >/dev/null 2>&1 && swapon "$SWAP" || return
	echo reboot >/sys/power/disk && enter disk
	result=$?
	swapoff "$SWAP" && return $result
}

# idle HOW: hibernates or freezes.
idle() { before && "$1" && is_back; }

# again: freezes three times without a pause, so that the new RDMA device may not be there yet.
again() { before && for round in 1 2 3; do freezes || return; done; is_back; }

# while_it_recovers: freezes while the driver takes a device that has failed into service again.
while_it_recovers() { before && reset_beneath && freezes && is_back; }

# waiter_start: starts a program that waits for an event of a CQ.
waiter_start()
{
	rm -f /tmp/waiter.$$
	RDMA_DEVICE=$DEVICE timeout -k 1 $TRAFFIC_SECONDS python3 "$DIR/verbs/wait_event.py" >/tmp/waiter.$$ 2>&1 &
	WAITER=$!
	wait_for grep -qs waiting /tmp/waiter.$$
}

waiter_ended() { wait $WAITER || { sed 's/^/# /' /tmp/waiter.$$; return 1; }; }

# connections_start: starts programs that make and end connections of the RDMA CM all the time.
connections_start()
{
	rm -f /tmp/connections.$$.*
	timeout -k 1 $TRAFFIC_SECONDS "$DIR/connections" server 1000000 20 >/tmp/connections.$$.server 2>&1 &
	SERVER=$!
	timeout -k 1 $TRAFFIC_SECONDS "$DIR/connections" client "$(port_address)" 1000000 20 20 \
		>/tmp/connections.$$.client 2>&1 &
	CLIENT=$!
	wait_for grep -qs made /tmp/connections.$$.client
}

# connections_ended: fails unless these programs ended with an error, and not because of the bound on a hang.
connections_ended()
{
	for pid in $CLIENT $SERVER; do
		wait "$pid"
		result=$?
		[ $result = 1 ] && continue
		echo "# the program ends with $result"
		sed 's/^/# /' /tmp/connections.$$.*
		return 1
	done
}

# under_programs HOW: the device is lost to a program that posts and polls, one that waits for an event, and
# one that connects.
under_programs()
{
	before && traffic_start && waiter_start && connections_start || return
	"$1" && traffic_ended && waiter_ended && connections_ended && is_back
}

# under_mount CONSUMER HOW: a file system on a remote disk, under load, which the host connects again; no byte is lost.
under_mount()
{
	. "$DIR/$1_lib.sh"
	shift
	before && store_up && connect && write_tree || return
	load_fs >"$PLACE/load" 2>&1 &
	LOAD=$!
	wait_for grep -q running "$PLACE/load" && "$1" && wait_for is_new && wait_for is_live && runs_on || return
	touch "$PLACE/stop"
	wait $LOAD || { sed 's/^/# /' "$PLACE/load"; return 1; }
	read_tree && check_fs >/dev/null 2>&1 && disconnect && store_down
}

# runs_on: waits until the load begins another round.
runs_on()
{
	seen=$(grep -c running "$PLACE/load")
	wait_for more_runs
}

more_runs() { [ "$(grep -c running "$PLACE/load")" -gt "$seen" ]; }

# goes_on: no program notices that the machine was suspended to idle. The test leaves out the wait for an interrupt that
# wakes the machine: in QEMU, the clock has no such interrupt.
goes_on()
{
	before && traffic_start && sleeps platform freeze || return
	for pid in $TRAFFIC; do kill -0 "$pid" || return; done
	[ "$(index)" = "$INDEX" ] && usable || return
	for pid in $TRAFFIC; do kill -0 "$pid" || return; done
	kill $TRAFFIC
	for pid in $TRAFFIC; do wait "$pid"; done 2>/dev/null
	grep -q ended /tmp/traffic.$$.* && return 1
	return 0
}

# keeps_state: the device says by its PCI power management that it does (No_Soft_Reset).
keeps_state()
{
	function=$(readlink -f "$DRIVER/$VIRTIO/..")
	[ -e "$function/vendor" ] && [ "$(cat "$function/power_state")" = D0 ]
}

# with_swap NAME CMD...: runs a test, which is skipped without a disk to resume from.
with_swap()
{
	if [ -n "${SWAP:-}" ]; then
		ktap_test_result "$@"
	else
		ktap_test_skip "$1 # no disk to resume from (SWAP)"
	fi
}

# with_target CONSUMER NAME CMD...: runs a test, which is skipped without a target.
with_target()
{
	consumer=$1
	shift
	case " ${CONSUMERS:-} " in
	*" $consumer "*) "$@" ;;
	*) ktap_test_skip "$2 # no target of $consumer (ADDRESS, CONSUMERS)" ;;
	esac
}

forget_host || skip_all "a file system of the host stays"
# How many seconds a test of a sleep state waits while devices are frozen.
echo 1 >/sys/module/suspend/parameters/pm_test_delay 2>/dev/null

ktap_print_header
ktap_set_plan 12
ktap_test_result "usable" usable
ktap_test_result "freeze_idle" idle freezes
ktap_test_result "freeze_under_programs" under_programs freezes
for consumer in nvme iser; do
	with_target $consumer ktap_test_result "freeze_under_$consumer" under_mount $consumer freezes
done
with_swap "hibernate_idle" idle hibernates
with_swap "hibernate_under_programs" under_programs hibernates
for consumer in nvme iser; do
	with_target $consumer with_swap "hibernate_under_$consumer" under_mount $consumer hibernates
done
ktap_test_result "freeze_again" again
if pci_function >/dev/null; then
	ktap_test_result "freeze_while_it_recovers" while_it_recovers
else
	ktap_test_skip "freeze_while_it_recovers # no PCI device"
fi
if keeps_state; then
	ktap_test_result "suspend_keeps_objects" goes_on
else
	ktap_test_skip "suspend_keeps_objects # the device loses its state"
fi
ktap_finished
