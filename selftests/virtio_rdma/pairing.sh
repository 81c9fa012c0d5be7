#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# The port is paired with a network interface that has the device's address and is not on top of another one, and keeps
# it as long as it exists.

. "$(dirname "$0")/lib.sh"

need_device
[ -e /proc/self/ns/net ] || skip_all "no network namespaces"
[ -n "$NETDEV" ] || skip_all "$DEVICE has no network interface"

OWN=$NETDEV
NS=virtio-rdma-pair-$$
# The initial namespace needs a name to move things back to.
HOME_NS=virtio-rdma-pair-home-$$
MAC=$(cat "/sys/class/net/$OWN/address")
ADDRESS=$(ip -4 -o addr show dev "$OWN" | awk '{ print $4; exit }')
[ -n "$ADDRESS" ] || skip_all "$OWN has no IPv4 address"
# An address that no other interface has.
OTHER=02:00:00:00:77:01

paired() { find_device && [ "$NETDEV" = "${1:-}" ]; }

# rebind: the driver finds all interfaces that are there, and pairs.
rebind() { unbind && bind && wait_for find_device; }

# up NETDEV: gives an interface the address, and takes it up.
up() { ip addr replace "$ADDRESS" dev "$1" && ip link set "$1" up; }

# dummy NAME MAC: makes an interface.
dummy() { ip link add "$1" address "$2" type dummy; }

# set_mac NETDEV MAC
set_mac() { ip link set "$1" down && ip link set "$1" address "$2" && ip link set "$1" up; }

# The port is not paired with an interface that has another address, even if there is no other one.
by_address()
{
	dummy stranger $OTHER && rebind && paired "$OWN" || return
	set_mac "$OWN" 02:00:00:00:77:02 && rebind && paired || return
	# An interface that gets the address later is paired then.
	set_mac stranger "$MAC" && wait_for paired stranger && ip link del stranger && wait_for paired || return
	set_mac "$OWN" "$MAC" && wait_for paired "$OWN" && up "$OWN" && usable
}

# If two interfaces have the address, the driver takes one of them, and keeps it whatever the other one does.
keeps_its_own()
{
	dummy twin "$MAC" && ip link set twin up && paired "$OWN" && rebind || return
	first=$NETDEV
	for name in "$OWN" twin; do
		[ "$name" != "$first" ] || continue
		ip link set "$name" down && ip link set "$name" up && paired "$first" || return
	done
	[ "$first" = "$OWN" ] || ip link del twin
	wait_for paired "$OWN" && { ip link del twin 2>/dev/null; up "$OWN" && usable; }
}

# moved: the interface leaves for another namespace and comes back, behind all others in the kernel's list.
moved()
{
	ip netns attach "$HOME_NS" 1 && ip netns add "$NS" && ip link set "$OWN" netns "$NS" &&
	ip netns exec "$NS" ip link set "$OWN" netns "$HOME_NS"
	status=$?
	ip netns del "$NS"
	ip netns del "$HOME_NS"
	return $status
}

# not_on_top ARGUMENTS...: the driver does not pair with an interface of this kind that has the address, even if it
# finds it first.
not_on_top()
{
	ip link add link "$OWN" name above address "$MAC" type "$@" && moved && rebind && wait_for paired "$OWN"
	status=$?
	ip link del above
	up "$OWN" && usable && return $status
}

# test_on_top ARGUMENTS...: reports not_on_top, if the kernel has such interfaces.
test_on_top()
{
	if ip link add link "$OWN" name above type "$@" 2>/tmp/pairing.$$ && ip link del above; then
		ktap_test_result "not_on_top_$1" not_on_top "$@"
	else
		ktap_test_skip "not_on_top_$1 # no interface of type $1: $(head -n 1 /tmp/pairing.$$)"
	fi
}

ktap_print_header
ktap_set_plan 5
ktap_test_result "by_address" by_address
ktap_test_result "keeps_its_own" keeps_its_own
test_on_top vlan id 7
test_on_top macvlan mode bridge
test_on_top ipvlan mode l2
ktap_finished
