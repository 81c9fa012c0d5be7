#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# What the device says of itself, and what people may say of it.

. "$(dirname "$0")/lib.sh"

need_device
IB=/sys/class/infiniband/$DEVICE

# The version of the device is three numbers, and each tool shows the same.
firmware_version()
{
	version=$(cat "$IB/fw_ver") &&
	echo "$version" | grep -Eqx '[0-9]+\.[0-9]+\.[0-9]+' &&
	rdma -d dev show "$DEVICE" | grep -qF " fw $version " &&
	[ "$(ibv_devinfo -d "$DEVICE" | awk '$1 == "fw_ver:" { print $2 }')" = "$version" ]
}

# The description of the node can be written, as rdma-ndd does. It has 64 bytes, and nothing behind them changes.
node_description()
{
	before=$(cat "$IB/node_guid") && said=$(cat "$IB/node_desc") &&
	echo "a host $DEVICE" >"$IB/node_desc" && [ "$(cat "$IB/node_desc")" = "a host $DEVICE" ] &&
	printf '%070d' 7 >"$IB/node_desc" && [ "$(cat "$IB/node_desc")" = "$(printf '%064d' 0)" ] &&
	[ "$(cat "$IB/node_guid")" = "$before" ] && echo "$said" >"$IB/node_desc" && usable
}

ktap_print_header
ktap_set_plan 2
ktap_test_result "firmware_version" firmware_version
ktap_test_result "node_description" node_description
ktap_finished
