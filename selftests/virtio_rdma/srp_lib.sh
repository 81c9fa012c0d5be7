# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: SCSI RDMA, target and initiator, through the RDMA
# CM. ADDRESS is the target's, and GUID what the target prints for `guid`.

. "$DIR/scsi_lib.sh"

SRPT=$TARGET/srpt
SRP_PORT=5555
# srpt_rdma_cm_req_recv() names an initiator that logs in by the address of its own end.
INITIATOR=$ADDRESS

missing() { modules ib_srpt ib_srp || echo "the kernel has no SRP"; }

# guid: prints the GUID that names the target.
guid() { sed 's/^0x//' /sys/module/ib_srpt/parameters/srpt_service_guid; }

# The port's name: the lower half of its first GID.
port_name() { cut -d: -f5-8 "$PORT/gids/0"; }

tpg() { TPG=$SRPT/$(port_name)/$(port_name); }

portal_up()
{
	tpg
	mkdir -p "$SRPT" && echo $SRP_PORT >"$SRPT/discovery_auth/rdma_cm_port" &&
	mkdir -p "$TPG" && lun_up &&
	mkdir -p "$TPG/acls/$INITIATOR/lun_0" && ln -s "$TPG/lun/lun_0" "$TPG/acls/$INITIATOR/lun_0/" &&
	echo 1 >"$TPG/enable"
}

portal_down()
{
	tpg
	echo 0 >"$TPG/enable" &&
	rm "$TPG/acls/$INITIATOR/lun_0/lun_0" && rmdir "$TPG/acls/$INITIATOR/lun_0" "$TPG/acls/$INITIATOR" &&
	lun_down && rmdir "$TPG" "${TPG%/*}" &&
	echo 0 >"$SRPT/discovery_auth/rdma_cm_port" && rmdir "$SRPT"
}

# target_gone, target_back: the target is made again: it belongs to a port, which goes with the RDMA device.
target_gone() { portal_down; }
target_back() { portal_up; }

# targets: the file of the script that connects to targets: this target.
targets() { echo "$DEVICE id_ext=$GUID,ioc_guid=$GUID,dest=$ADDRESS:$SRP_PORT"; }

connect()
{
	targets | cut -d' ' -f2 >"/sys/class/infiniband_srp/srp-$DEVICE-1/add_target" && wait_for disk >/dev/null
}

# connect_by SCRIPT: connects by this script, which tries until the target listens. It may be connected already.
connect_by()
{
	targets >"$PLACE/targets" && SRP_TARGETS=$PLACE/targets SRP_PAUSE=1 "$1" "srp-$DEVICE-1" &&
	wait_for disk >/dev/null
}

# fail_after SECONDS: commands fail when their connection has been lost for so long. ib_srp begins with 15 s.
fail_after()
{
	for port in /sys/class/srp_remote_ports/*; do echo "$1" >"$port/fast_io_fail_tmo" || return; done
}

disconnect()
{
	for port in /sys/class/srp_remote_ports/*; do echo 1 >"$port/delete" || return; done
	# The connection ends after the disk is gone.
	wait_for no_disk && wait_for no_connections
}
