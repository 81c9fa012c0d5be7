#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# What the system tells of the device: the counters of the port that performance
# management has, what "rdma resource" adds to each object, and "rdma statistic".

. "$(dirname "$0")/lib.sh"

need_device
wait_for gid_index >/dev/null || skip_all "$DEVICE has no RoCE v2 GID of an IPv4 address"

counter() { cat "$PORT/counters/$1"; }
all() { for name in $NAMES; do counter "$name"; done | xargs; }
listening() { grep -qi ":$(printf %04X 18515) [^ ]* 0A " /proc/net/tcp /proc/net/tcp6; }

# converse: sends 100 messages of 4 KiB in each direction, in loopback.
converse()
{
	set -- ibv_rc_pingpong -d "$DEVICE" -g "$(gid_index)" -m 1024 -r 100 -n 100 -s 4096
	"$@" >/tmp/counters.$$ 2>&1 &
	wait_for listening
	"$@" 127.0.0.1 >>/tmp/counters.$$ 2>&1 && wait $! && return
	sed 's/^/# /' /tmp/counters.$$
	return 1
}

# grow: the counters grow by the data in words of 4 bytes and by packets of 1024 bytes, of both ends: they are this
# port.
grow()
{
	NAMES="port_xmit_data port_rcv_data port_xmit_packets port_rcv_packets unicast_xmit_packets unicast_rcv_packets"
	before=$(all)
	converse || return 1
	# shellcheck disable=SC2046 # one word a counter
	set -- $(all)
	for value in $before; do
		delta="${delta:-}$(($1 - value)) "
		shift
	done
	[ "$delta" = "204800 204800 800 800 800 800 " ] && return
	echo "# grew by $delta"
	return 1
}

# quiet: the counters stay the same while no message is sent.
quiet() { before=$(all) && [ "$(all)" = "$before" ]; }

# standard: every counter of PortCountersExtended can be read.
standard()
{
	for name in multicast_xmit_packets multicast_rcv_packets port_xmit_discards VL15_dropped; do
		[ "$(counter $name)" -ge 0 ] || return 1
	done
}

# port_counters NAME CMD: runs a test, which is skipped if the device does not count.
port_counters()
{
	if [ -d "$PORT/counters" ]; then
		ktap_test_result "$@"
	else
		ktap_test_skip "$1 # $DEVICE has no counters of its port"
	fi
}

# show KIND PATTERN: looks for PATTERN in what rdma(8) shows of the objects of a kind.
show()
{
	rdma resource show "$1" link "$DEVICE" -dd >/tmp/details.$$ 2>&1 ||
		rdma resource show "$1" dev "$DEVICE" -dd >/tmp/details.$$ 2>&1
	grep -Eq "$2" /tmp/details.$$
}

# details KIND PATTERN: looks at an object of a program that has objects of all kinds but SRQs.
details()
{
	# The output of the program before this one must not be there.
	rm -f /tmp/counters.$$
	python3 "$DIR/verbs/traffic.py" >/tmp/counters.$$ 2>&1 &
	TRAFFIC=$!
	wait_for grep -qs running /tmp/counters.$$
	show "$1" "$2"
	SHOWN=$?
	kill "$TRAFFIC"
	wait "$TRAFFIC" 2>/dev/null
	[ "$SHOWN" = 0 ] || sed 's/^/# /' /tmp/details.$$
	return "$SHOWN"
}

# details_of_srq PATTERN: looks at the SRQ of a program that waits for its peer.
details_of_srq()
{
	ibv_srq_pingpong -d "$DEVICE" -g 0 >/tmp/counters.$$ 2>&1 &
	SERVER=$!
	wait_for show srq "$1"
	SHOWN=$?
	kill "$SERVER"
	wait "$SERVER" 2>/dev/null
	[ "$SHOWN" = 0 ] || sed 's/^/# /' /tmp/counters.$$ /tmp/details.$$
	return "$SHOWN"
}

statistic() { rdma statistic show link "$DEVICE/1" | xargs | grep -Eq 'sends_posted [0-9]+ .*commands [0-9]+'; }

ktap_print_header
ktap_set_plan 8
port_counters "port_counters_grow" grow
port_counters "port_counters_rest" quiet
port_counters "port_counters_standard" standard
ktap_test_result "resource_qp" details qp 'drv_state 3 .*drv_sq_depth [1-9]'
ktap_test_result "resource_cq" details cq 'drv_cqn [0-9]+ drv_rings [01]'
ktap_test_result "resource_mr" details mr 'drv_mrn [0-9]+'
if ibv_devinfo -v -d "$DEVICE" | grep -Eq 'max_srq:[^0-9]*[1-9]'; then
	ktap_test_result "resource_srq" details_of_srq 'drv_srqn [0-9]+'
else
	ktap_test_skip "resource_srq # $DEVICE has no SRQs"
fi
ktap_test_result "statistic" statistic
ktap_finished
