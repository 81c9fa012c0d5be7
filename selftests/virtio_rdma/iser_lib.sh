# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: iSCSI over RDMA, target and initiator. ADDRESS is
# the target's.

. "$DIR/scsi_lib.sh"

IQN=iqn.2026-01.test:virtio-rdma
TPG=$TARGET/iscsi/$IQN/tpgt_1
PORTAL=$TPG/np/$ADDRESS:3260

missing()
{
	modules ib_isert ib_iser || { echo "the kernel has no iSER"; return; }
	command -v iscsiadm >/dev/null || echo "no iscsiadm"
}

portal_up()
{
	mkdir -p "$TPG" && lun_up &&
	mkdir "$PORTAL" && echo 1 >"$PORTAL/iser" &&
	echo 0 >"$TPG/attrib/authentication" &&
	echo 1 >"$TPG/attrib/generate_node_acls" &&
	echo 0 >"$TPG/attrib/demo_mode_write_protect" &&
	echo 1 >"$TPG/enable"
}

portal_down()
{
	echo 0 >"$TPG/enable" && rmdir "$PORTAL" && lun_down &&
	rmdir "$TPG" "${TPG%/*}" "$TARGET/iscsi"
}

# target_gone, target_back: the target does not listen, and has no connections.
target_gone() { echo 0 >"$TPG/enable" && rmdir "$PORTAL"; }
target_back() { mkdir "$PORTAL" && echo 1 >"$PORTAL/iser" && echo 1 >"$TPG/enable"; }

admin() { iscsiadm -m node -T $IQN -p "$ADDRESS:3260" "$@" >"$PLACE.iscsi" 2>&1 || { cat "$PLACE.iscsi"; return 1; }; }

connect()
{
	[ -s /etc/iscsi/initiatorname.iscsi ] ||
		echo "InitiatorName=iqn.2026-01.test:initiator" >/etc/iscsi/initiatorname.iscsi
	mkdir -p /run/lock/iscsi
	pidof iscsid >/dev/null || iscsid || return
	admin -I iser -o new && admin -I iser -l && wait_for disk >/dev/null
}

# is_live: whether the initiator is logged in.
is_live() { [ "$(cat /sys/class/iscsi_session/session*/state)" = LOGGED_IN ]; }

disconnect() { admin -u && admin -o delete && wait_for no_disk; }
