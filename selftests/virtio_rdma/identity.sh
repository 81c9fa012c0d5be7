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

# has_file CLASS PREFIX: whether a character device of the class is for the RDMA device.
has_file()
{
	for path in "/sys/class/$1/$2"*; do
		[ "$(cat "$path/ibdev" 2>/dev/null)" = "$DEVICE" ] && [ -c "/dev/infiniband/${path##*/}" ] && return
	done
	ktap_print_msg "$DEVICE has no file $2 of class $1"
	return 1
}

# What Kubernetes' shared device plug-in asks for (containers.md): a PCI function of the class of network controllers,
# chosen by its numbers, with a driver and the RDMA device below it; files of verbs, of MADs and of the RDMA CM; and
# namespaces in shared mode.
kubernetes_asks_for()
{
	modprobe -a ib_umad rdma_ucm &&
	[ -d "$FUNCTION/infiniband/$DEVICE" ] && [ ! -L "$FUNCTION/infiniband" ] &&
	[ "$(cat "$FUNCTION/vendor" "$FUNCTION/device" | paste -sd' ')" = "0x1af4 0x106a" ] &&
	grep -q '^0x02' "$FUNCTION/class" && [ "$(basename "$(readlink "$FUNCTION/driver")")" = virtio-pci ] &&
	has_file infiniband_verbs uverbs && has_file infiniband_mad umad && [ -c /dev/infiniband/rdma_cm ] &&
	rdma system show | grep -q 'netns shared'
}

ktap_print_header
ktap_set_plan 3
ktap_test_result "firmware_version" firmware_version
ktap_test_result "node_description" node_description
if FUNCTION=$(pci_function); then
	ktap_test_result "kubernetes_asks_for" kubernetes_asks_for
else
	ktap_test_skip "kubernetes_asks_for # no PCI function"
fi
ktap_finished
