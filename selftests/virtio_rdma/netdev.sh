#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# The port follows its network device: link state, addresses, MTU.

. "$(dirname "$0")/lib.sh"

need_device
[ -n "$NETDEV" ] || skip_all "$DEVICE has no network device"

link_down_up()
{
	for round in $(rounds 5); do
		ip link set "$NETDEV" down && wait_for inactive || return 1
		ip link set "$NETDEV" up && wait_for active || return 1
	done
}

address_add_del()
{
	for last in 7 8 9; do
		ip addr add "198.51.100.$last/24" dev "$NETDEV" || return 1
		wait_for has_gid "$(mapped 198 51 100 $last)" || return 1
	done
	for last in 9 8 7; do
		ip addr del "198.51.100.$last/24" dev "$NETDEV" || return 1
		wait_for no_gid "$(mapped 198 51 100 $last)" || return 1
	done
}

address_ipv6()
{
	ip addr add 2001:db8::7/64 dev "$NETDEV" nodad || return 1
	wait_for has_gid 2001:0db8:0000:0000:0000:0000:0000:0007 || return 1
	ip addr del 2001:db8::7/64 dev "$NETDEV" || return 1
	wait_for no_gid 2001:0db8:0000:0000:0000:0000:0000:0007
}

# More addresses than the table has entries do no harm to the port.
address_flood()
{
	entries=$(find "$PORT/gids" -type f | wc -l)
	[ "$entries" -lt 254 ] || entries=253
	for last in $(seq 1 $((entries + 1))); do echo "addr add 198.51.100.$last/24 dev $NETDEV"; done | ip -batch - || return 1
	ip addr flush dev "$NETDEV" to 198.51.100.0/24 || return 1
	wait_for no_gid "$(mapped 198 51 100 1)" && usable
}

active_mtu() { ibv_devinfo -d "$DEVICE" | awk '/active_mtu/ { print $2 }'; }
mtu_is() { [ "$(active_mtu)" = "$1" ]; }

# IBV_PORT_IP_BASED_GIDS: the GIDs are those of the interface's IP addresses.
says_ip_based_gids()
{
	flags=$(ibv_devinfo -v -d "$DEVICE" | sed -n 's/.*port_cap_flags:[^0-9]*//p')
	[ $((flags & 1 << 26)) != 0 ]
}

mtu_follows()
{
	was=$(cat "/sys/class/net/$NETDEV/mtu")
	before=$(active_mtu)
	ip link set "$NETDEV" mtu 700 && wait_for mtu_is 512 || return 1
	ip link set "$NETDEV" mtu "$was" && wait_for mtu_is "$before"
	# Below 1280 the kernel drops IPv6 from a device; this gives it back.
	ip link set "$NETDEV" down && ip link set "$NETDEV" up && wait_for active
}

ktap_print_header
ktap_set_plan 7
ktap_test_result "link_down_up" link_down_up
ktap_test_result "address_add_del" address_add_del
ktap_test_result "address_ipv6" address_ipv6
ktap_test_result "address_flood" address_flood
ktap_test_result "mtu_follows" mtu_follows
ktap_test_result "says_ip_based_gids" says_ip_based_gids
ktap_test_result "usable" usable
ktap_finished
