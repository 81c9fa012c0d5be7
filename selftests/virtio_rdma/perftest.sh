#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# The usual tools, in loopback, or with PEERS between two hosts
# (GUEST=1 is the server): the pingpongs with their data checked, and short
# runs of perftest with all sizes.

. "$(dirname "$0")/lib.sh"

need_device
wait_for gid_index >/dev/null || skip_all "$DEVICE has no RoCE v2 GID of an IPv4 address"
INDEX=$(gid_index)
TCP=18515
# These tools do not end by themselves when a completion is lost.
GUARD="timeout 120"

listening() { grep -qi ":$(printf %04X $TCP) [^ ]* 0A " /proc/net/tcp /proc/net/tcp6; }
ended() { ! kill -0 "$SERVER" 2>/dev/null; }
started() { listening || ended; }

# pair CMD...: runs the server and the client, or the one that is this host's.
pair()
{
	status=0
	rm -f /tmp/server.$$ /tmp/client.$$
	if [ -z "${PEERS:-}" ] || [ "$GUEST" = 1 ]; then
		$GUARD "$@" >/tmp/server.$$ 2>&1 &
		SERVER=$!
	fi
	if [ -z "${PEERS:-}" ]; then
		wait_for started
		$GUARD "$@" 127.0.0.1 >/tmp/client.$$ 2>&1 || status=1
	elif [ "$GUEST" != 1 ]; then
		# The server starts on the other host meanwhile.
		tries=0
		until $GUARD "$@" "${PEERS%% *}" >/tmp/client.$$ 2>&1; do
			tries=$((tries + 1))
			grep -qi "couldn't connect" /tmp/client.$$ && [ $tries -lt 600 ] || { status=1; break; }
			sleep 0.1
		done
	fi
	[ -z "${SERVER:-}" ] || wait "$SERVER" || status=1
	[ $status = 0 ] || for side in server client; do
		[ ! -e /tmp/$side.$$ ] || sed "s/^/# $side: /" /tmp/$side.$$
	done
	return $status
}

# The tools want CQs of 2048 entries by default; a transport with small rings has fewer.
limit() { ibv_devinfo -v -d "$DEVICE" | sed -n "s/.*$1:[^0-9]*//p"; }
if [ "$(limit max_cqe)" -lt 2048 ]; then
	RECEIVES="-r $(($(limit max_qp_wr) / 2 - 1))"
	SENDS="-t $(($(limit max_cqe) / 16))"
fi
QPS=16
[ "$(limit max_qp)" -gt $((2 * QPS)) ] || QPS=8

pingpong() { pair ibv_rc_pingpong -d "$DEVICE" -g "$INDEX" ${RECEIVES:-} -c "$@"; }
srq_pingpong() { pair ibv_srq_pingpong -d "$DEVICE" -g "$INDEX" -c -n 200 "$@"; }
xsrq_pingpong() { pair ibv_xsrq_pingpong -d "$DEVICE" -g "$INDEX" -n 200 "$@"; }
perf() { tool=$1; shift; pair "$tool" -d "$DEVICE" -x "$INDEX" -F "$@"; }

ktap_print_header
ktap_set_plan 18
ktap_test_result "pingpong" pingpong -n 200
ktap_test_result "pingpong_events" pingpong -n 200 -e
ktap_test_result "pingpong_sizes_1" pingpong -n 20 -s 1
ktap_test_result "pingpong_sizes_1M" pingpong -n 20 -s 1048576
if [ "$(limit max_srq)" -gt 0 ]; then
	ktap_test_result "srq_pingpong" srq_pingpong
	ktap_test_result "srq_pingpong_events" srq_pingpong -e
else
	ktap_test_skip "srq_pingpong # $DEVICE has no SRQs"
	ktap_test_skip "srq_pingpong_events # $DEVICE has no SRQs"
fi
if ibv_devinfo -v -d "$DEVICE" | grep -q XRC; then
	ktap_test_result "xsrq_pingpong" xsrq_pingpong
	ktap_test_result "xsrq_pingpong_events" xsrq_pingpong -e
else
	ktap_test_skip "xsrq_pingpong # $DEVICE has no XRC"
	ktap_test_skip "xsrq_pingpong_events # $DEVICE has no XRC"
fi
ktap_test_result "ib_send_bw" perf ib_send_bw -n 100
ktap_test_result "ib_write_bw" perf ib_write_bw -a -n 50
ktap_test_result "ib_read_bw" perf ib_read_bw -a -n 50
ktap_test_result "ib_atomic_bw" perf ib_atomic_bw -n 100
ktap_test_result "ib_write_bw_many_qps" perf ib_write_bw -q $QPS ${SENDS:-} -n 50
ktap_test_result "ib_write_bw_both" perf ib_write_bw -b -n 100
ktap_test_result "ib_send_lat" perf ib_send_lat -n 100
ktap_test_result "ib_write_lat" perf ib_write_lat -n 100
ktap_test_result "ib_read_lat" perf ib_read_lat -n 100
ktap_test_result "ib_send_bw_events" perf ib_send_bw -e -n 100
ktap_finished
