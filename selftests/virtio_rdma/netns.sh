#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Network namespaces in exclusive mode: the device is seen and used in one of
# them, can be moved, and comes back to life where it was.

. "$(dirname "$0")/lib.sh"

need_device
[ -e /proc/self/ns/net ] || skip_all "no network namespaces"
rdma system show | grep -q 'netns shared' || skip_all "namespaces are not in shared mode"
rdma system set netns exclusive 2>/dev/null || skip_all "cannot set exclusive mode"
NS=virtio-rdma-$$
# The initial namespace needs a name to move the device back to.
HOME_NS=virtio-rdma-home-$$

inside() { ip netns exec "$NS" "$@"; }
here() { rdma link show | grep -q "$DEVICE"; }
there() { inside rdma link show | grep -q "$DEVICE"; }
move() { ip netns attach "$HOME_NS" 1 && ip netns add "$NS" && rdma dev set "$DEVICE" netns "$NS" && there && ! here; }
unseen() { ! ibv_devinfo -d "$DEVICE" >/dev/null 2>&1; }
opens() { inside ibv_devinfo -d "$DEVICE" | grep -q "$DEVICE"; }
back() { inside rdma dev set "$DEVICE" netns "$HOME_NS" && here && ! there; }
# The namespace goes away some time after its name.
shared() { ip netns del "$NS" && ip netns del "$HOME_NS" && wait_for rdma system set netns shared 2>/dev/null; }

# under_traffic: programs that use the device lose it when it moves.
under_traffic() { traffic_start && rdma dev set "$DEVICE" netns "$NS" && traffic_ended && back; }

ktap_print_header
ktap_set_plan 7
ktap_test_result "move" move
ktap_test_result "not_seen_outside" unseen
ktap_test_result "opens_inside" opens
ktap_test_result "move_back" back
ktap_test_result "usable_again" usable
ktap_test_result "move_under_traffic" under_traffic
ktap_test_result "shared_again" shared
ktap_finished
