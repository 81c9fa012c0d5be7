#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Thousands of connections of the RDMA CM, made and ended 500 at a time, in
# loopback or with PEERS between two hosts (GUEST=1 is the server); and programs
# with connections that are killed.
#
# CONNECTIONS in the environment is how many; without it 2,000 in loopback where a
# guest is fast, and half of that between hosts.

. "$(dirname "$0")/lib.sh"

COUNT=${CONNECTIONS:-$((${ROUNDS:-200} * $([ -z "${PEERS:-}" ] && echo 10 || echo 5)))}
AT_A_TIME=500
OUT=/tmp/connections.$$

need_device
need_mads
[ -x "$DIR/connections" ] || skip_all "connections.c is not compiled"
wait_for gid_index >/dev/null || skip_all "$DEVICE has no RoCE v2 GID of an IPv4 address"

limit() { ibv_devinfo -v -d "$DEVICE" | sed -n "s/.*$1:[^0-9]*//p"; }
least() { printf '%s\n' "$@" | sort -n | head -n 1; }

AT_A_TIME=$(least $AT_A_TIME "$COUNT" $((($(limit max_qp) - 8) / 2)) "$(limit max_cqe)")
IN_FLIGHT=$AT_A_TIME
# The kernel lets a quarter of the MADs that it can receive wait for a reply at a
# time (SOL_FC_MAX_DEFAULT_FRAC in drivers/infiniband/core/mad.c), REQs and REPs
# alike: in loopback, where one port sends both, REQs alone must not fill that.
if [ -z "${PEERS:-}" ]; then
	IN_FLIGHT=$(least "$AT_A_TIME" $(($(cat /sys/module/ib_core/parameters/recv_queue_size) / 8)))
fi

FEW=$(least 30 "$IN_FLIGHT")

is_server() { [ -z "${PEERS:-}" ] || [ "$GUEST" = 1 ]; }
is_client() { [ -z "${PEERS:-}" ] || [ "$GUEST" != 1 ]; }
address() { if [ -n "${PEERS:-}" ]; then echo "${PEERS%% *}"; else port_address; fi; }

# Both programs of a loopback on one processor: where those of a guest do not all
# run at the same time, most of it would be waiting for locks.
PIN=
[ -n "${PEERS:-}" ] || ! command -v taskset >/dev/null || PIN="taskset -c 0"

server() { $PIN "$DIR/connections" server "$COUNT" "$AT_A_TIME"; }
client() { $PIN "$DIR/connections" client "$(address)" "$COUNT" "$AT_A_TIME" "$IN_FLIGHT"; }

# objects: prints how many objects of each kind there are, of all programs.
objects() { rdma resource show "$DEVICE"; }

complain() { for file in "$@"; do sed "s|^|# ${file##*.}: |" "$file"; done; return 1; }

connect_and_disconnect()
{
	begin=$(date +%s%N)
	if is_server; then
		server >"$OUT.server" 2>&1 &
		SERVER=$!
	fi
	if is_client; then
		client >"$OUT.client" 2>&1 || { complain "$OUT".*; return; }
	fi
	if is_server; then
		wait "$SERVER" || { complain "$OUT".*; return; }
	fi
	echo "# $COUNT connections, $AT_A_TIME at a time: $((($(date +%s%N) - begin) / 1000000)) ms"
}

under_way() { grep -q made "$OUT.client" 2>/dev/null || ! kill -0 "$CLIENT" 2>/dev/null; }

# killed: kills the client while it connects, and then the server if that has not
# ended by itself, because requests of a client that is gone may fail.
killed()
{
	for round in $(rounds 5); do
		rm -f "$OUT".*
		"$DIR/connections" server 1000000 $FEW >"$OUT.server" 2>&1 &
		SERVER=$!
		"$DIR/connections" client "$(address)" 1000000 $FEW $FEW >"$OUT.client" 2>&1 &
		CLIENT=$!
		wait_for under_way || { complain "$OUT".*; return; }
		kill -KILL "$CLIENT"
		wait "$CLIENT"
		[ $? = 137 ] || { complain "$OUT".*; return; }
		kill -KILL "$SERVER" 2>/dev/null
		wait "$SERVER" || : # as it likes
	done
}

# nothing_left: fails if programs of this host left objects behind.
nothing_left()
{
	[ "$(objects)" = "$BEFORE" ] && return
	echo "# before: $BEFORE"
	echo "# after:  $(objects)"
	rdma resource show cm_id | sed 's/^/# /'
	return 1
}

BEFORE=$(objects)
ktap_print_header
ktap_set_plan 3
ktap_test_result "connect_and_disconnect" connect_and_disconnect
if [ -z "${PEERS:-}" ]; then
	ktap_test_result "killed" killed
else
	ktap_test_skip "killed # in loopback only"
fi
ktap_test_result "nothing_left" nothing_left
rm -f "$OUT".*
ktap_finished
