#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# The network interface of the RDMA device moves to another network namespace and back, alone and
# together with the RDMA device, which fails and comes back there, and the namespace ends with the
# interface inside, or with both, under a listener and a connection that waits for its answer.
# Connections of the RDMA CM carry data wherever the interface is.

. "$(dirname "$0")/lib.sh"

need_device
need_mads
[ -e /proc/self/ns/net ] || skip_all "no network namespaces"
command -v rping >/dev/null || skip_all "rping is not installed"
rdma system show | grep -q 'netns shared' || skip_all "namespaces are not in shared mode"
[ -n "$NETDEV" ] || skip_all "$DEVICE has no network interface"

NS=virtio-rdma-if-$$
# The initial namespace needs a name to move things back to.
HOME_NS=virtio-rdma-if-home-$$
ADDRESS=$(ip -4 -o addr show dev "$NETDEV" | awk '{ print $4; exit }')
[ -n "$ADDRESS" ] || skip_all "$NETDEV has no IPv4 address"
COUNT=50
# The port of a server that does not answer.
UNANSWERED=7175
# Where the device can be reset beneath its driver; sysfs shows it in the namespace of the RDMA device alone.
FUNCTION=$(pci_function)

inside() { ip netns exec "$NS" "$@"; }

# Where a command runs: here, or inside.
here() { "$@"; }

# up WHERE RDMA: gives the interface its address and takes it up, as a move has taken both away. RDMA is where the RDMA
# device is, whose port has to become active with the GID of the address.
up()
{
	"$1" ip link set lo up && "$1" ip addr replace "$ADDRESS" dev "$NETDEV" && "$1" ip link set "$NETDEV" up &&
	wait_for "$2" grep -q ACTIVE "$PORT/state" && wait_for "$2" sh -c "grep -q ':ffff:' $PORT/gids/*"
}

# connects WHERE: a client and a server of the RDMA CM compare what they exchange (-v, -V).
connects()
{
	"$1" timeout 60 rping -s -a "${ADDRESS%/*}" -C $COUNT -V >/tmp/rping.$$ 2>&1 &
	server=$!
	# The server listens some time after it was started.
	tries=0
	until "$1" timeout 60 rping -c -a "${ADDRESS%/*}" -C $COUNT -V >>/tmp/rping.$$ 2>&1; do
		tries=$((tries + 1))
		[ $tries -lt 20 ] || break
		kill -0 $server 2>/dev/null || break
		sleep 0.1
	done
	wait $server && return
	sed 's/^/# /' /tmp/rping.$$
	return 1
}

names() { ip netns attach "$HOME_NS" 1 && ip netns add "$NS"; }
moves_alone() { ip link set "$NETDEV" netns "$NS" && up inside here && connects inside; }
comes_back() { inside ip link set "$NETDEV" netns "$HOME_NS" && up here here && connects here; }
# The counters are read from each namespace that has the device. Where namespaces share it, sysfs has none of them.
statistic_inside() { inside rdma statistic show link "$DEVICE/1" | grep -q commands; }
counters_inside() { inside sh -c "cat $PORT/hw_counters/* $PORT/counters/* >/dev/null" && statistic_inside; }

# states STATE: counts the ids of the RDMA CM that are in this state, inside.
states() { inside rdma resource show cm_id | grep ":$UNANSWERED" | grep -c "state $1"; }
are() { [ "$(states "$1")" = "$2" ]; }

# half_open: has a connection wait inside for the answer of a server that is stopped once it listens; sets HALF_OPEN,
# their processes.
half_open()
{
	ip netns exec "$NS" rping -s -a "${ADDRESS%/*}" -p $UNANSWERED >/tmp/half.$$ 2>&1 &
	HALF_OPEN=$!
	wait_for are LISTEN 1 && kill -STOP $HALF_OPEN || return
	ip netns exec "$NS" rping -c -a "${ADDRESS%/*}" -p $UNANSWERED >>/tmp/half.$$ 2>&1 &
	HALF_OPEN="$HALF_OPEN $!"
	# The id of the server's side is there once the request is.
	wait_for are CONNECT 2
}

interface_is_here() { ip link show "$NETDEV" >/dev/null 2>&1; }

# ends: the namespace ends under such a connection. Its interface comes back.
ends()
{
	half_open && ip netns del "$NS" || return
	# shellcheck disable=SC2086 # two processes
	kill -KILL $HALF_OPEN
	wait_for interface_is_here && up here here && connects here
}
namespace_ends_shared() { ip link set "$NETDEV" netns "$NS" && up inside here && ends; }
exclusive_mode() { wait_for rdma system set netns exclusive 2>/dev/null; }
both_move()
{
	rdma dev set "$DEVICE" netns "$NS" && ip link set "$NETDEV" netns "$NS" && up inside inside && connects inside
}
# The RDMA device that comes back has another index, and is where the old one was.
index_inside() { inside rdma dev show "$DEVICE" 2>/dev/null | sed -n 's/^\([0-9]*\):.*/\1/p'; }
is_new_inside() { NEW=$(index_inside) && [ -n "$NEW" ] && [ "$NEW" != "$INDEX" ]; }
recovers_inside()
{
	INDEX=$(index_inside) && [ -n "$INDEX" ] || return
	python3 "$DIR/device_status.py" "$FUNCTION" 0 || return
	! inside ibv_devinfo -d "$DEVICE" >/dev/null 2>&1 && wait_for is_new_inside && up inside inside && connects inside
}
both_come_back()
{
	inside rdma dev set "$DEVICE" netns "$HOME_NS" && inside ip link set "$NETDEV" netns "$HOME_NS" && up here here &&
	connects here
}
namespace_ends()
{
	rdma dev set "$DEVICE" netns "$NS" && ip link set "$NETDEV" netns "$NS" && up inside inside && ends
}
shared() { ip netns del "$HOME_NS" && wait_for rdma system set netns shared 2>/dev/null; }

ktap_print_header
ktap_set_plan 13
ktap_test_result "names" names
ktap_test_result "interface_moves" moves_alone
ktap_test_result "statistic_inside" statistic_inside
ktap_test_result "interface_comes_back" comes_back
# The mode changes only while there is no other namespace.
ktap_test_result "namespace_ends_shared" namespace_ends_shared
ktap_test_result "exclusive_mode" exclusive_mode
ip netns add "$NS"
ktap_test_result "both_move" both_move
ktap_test_result "counters_inside" counters_inside
if [ -n "$FUNCTION" ]; then
	ktap_test_result "recovers_inside" recovers_inside
else
	ktap_test_skip "recovers_inside # no PCI device"
fi
ktap_test_result "both_come_back" both_come_back
ktap_test_result "namespace_ends" namespace_ends
ktap_test_result "shared_again" shared
ktap_test_result "usable" usable
ktap_finished
