# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: the two ends of NVMe over Fabrics. ADDRESS is the
# target's, QUEUES how many I/O queues the host has, KEEP_ALIVE after how many
# seconds without a word from the host the target lets go of it (5 if not set).

NQN=nqn.2026-01.test:virtio-rdma
CONFIG=/sys/kernel/config/nvmet
SUBSYSTEM=$CONFIG/subsystems/$NQN
NVMET_PORT=$CONFIG/ports/1
QUEUES=${QUEUES:-2}

# missing: prints what the target or the host needs and does not have.
missing()
{
	modprobe -a nvmet nvmet-rdma nvme-rdma 2>/dev/null || { echo "the kernel has no NVMe over RDMA"; return; }
	[ -d "$CONFIG" ] || mount -t configfs configfs /sys/kernel/config 2>/dev/null
	[ -d "$CONFIG" ] || { echo "no configfs"; return; }
	[ -c /dev/nvme-fabrics ] || echo "no /dev/nvme-fabrics"
}

# The target.

# load_target [PARAMETER=VALUE...]: loads the target's module again, with these parameters.
load_target() { modprobe -r nvmet-rdma && modprobe nvmet-rdma "$@"; }

# has_srqs: whether the target's QPs receive from SRQs.
has_srqs() { rdma resource show srq | grep -q 'comm \[nvmet'; }

target_up()
{
	store_up &&
	mkdir "$SUBSYSTEM" && echo 1 >"$SUBSYSTEM/attr_allow_any_host" &&
	mkdir "$SUBSYSTEM/namespaces/1" &&
	echo "$PLACE/disk" >"$SUBSYSTEM/namespaces/1/device_path" &&
	echo 1 >"$SUBSYSTEM/namespaces/1/buffered_io" &&
	echo 1 >"$SUBSYSTEM/namespaces/1/enable" &&
	target_back
}

# port_up: makes the port, which listens.
port_up()
{
	mkdir "$NVMET_PORT" &&
	echo rdma >"$NVMET_PORT/addr_trtype" &&
	echo ipv4 >"$NVMET_PORT/addr_adrfam" &&
	echo "$ADDRESS" >"$NVMET_PORT/addr_traddr" &&
	echo 4420 >"$NVMET_PORT/addr_trsvcid"
}

port_down() { rmdir "$NVMET_PORT"; }

# port_opens, port_closes: adds the subsystem to the port, and removes it with its controllers.
port_opens() { ln -s "$SUBSYSTEM" "$NVMET_PORT/subsystems/"; }
port_closes() { rm "$NVMET_PORT/subsystems/$NQN"; }

# target_gone, target_back: the target does not listen, and has no connections.
target_gone() { port_closes && port_down; }
target_back() { port_up && port_opens; }

target_down()
{
	target_gone &&
	echo 0 >"$SUBSYSTEM/namespaces/1/enable" &&
	rmdir "$SUBSYSTEM/namespaces/1" "$SUBSYSTEM" && store_down
}

# The host.

# controller: prints the name of the controller that is connected to the target.
controller()
{
	for path in /sys/class/nvme/nvme*; do
		[ "$(cat "$path/subsysnqn" 2>/dev/null)" = $NQN ] || continue
		basename "$path"
		return
	done
	return 1
}

# disk: prints the block device of its namespace.
disk()
{
	name=$(controller) || return 1
	for path in "/sys/class/nvme/$name/$name"*n* "/sys/class/nvme/$name"/nvme*n*; do
		name=$(basename "$path" | sed 's/c[0-9]*n/n/')
		[ -b "/dev/$name" ] || continue
		echo "/dev/$name"
		return
	done
	return 1
}

connect()
{
	printf 'transport=rdma,traddr=%s,trsvcid=4420,nqn=%s,nr_io_queues=%d,queue_size=32,reconnect_delay=2%s' \
		"$ADDRESS" $NQN "$QUEUES" "${KEEP_ALIVE:+,keep_alive_tmo=$KEEP_ALIVE}" >/dev/nvme-fabrics &&
	wait_for disk >/dev/null
}

disconnect()
{
	echo 1 >"/sys/class/nvme/$(controller)/delete_controller"
	no_controller
}

# is_live, is_away: whether the host is connected to its target, or tries to connect.
is_live() { [ "$(cat "/sys/class/nvme/$(controller)/state")" = live ]; }
is_away() { [ "$(cat "/sys/class/nvme/$(controller)/state")" = connecting ]; }
no_controller() { ! controller >/dev/null; }
