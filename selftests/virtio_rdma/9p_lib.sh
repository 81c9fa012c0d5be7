# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: 9P over RDMA, the kernel's client (trans=rdma) and
# p9_server beside this file. ADDRESS is the server's.

. "$DIR/files_lib.sh"

missing()
{
	modprobe -a 9p 9pnet_rdma 2>/dev/null || { echo "the kernel has no 9P over RDMA"; return; }
	[ -x "$DIR/p9_server" ] || echo "p9_server is not built"
}

# The server.

target_up() { store_up && mkdir "$PLACE/export" && target_back; }

# target_gone, target_back: the server is down.
# The server ends by itself when its device goes.
target_gone() { pkill -x p9_server; wait_for no_server; }

no_server() { ! pgrep -x p9_server >/dev/null; }

target_back()
{
	setsid "$DIR/p9_server" "$ADDRESS" "$PLACE/export" >"$PLACE/server" 2>&1 </dev/null &
	wait_for listens
}

listens() { grep -q listening "$PLACE/server"; }

target_down() { target_gone && wait_for store_down; }

# The client.

connect()
{
	mkdir -p "$PLACE/mnt" &&
	mount -i -t 9p -o trans=rdma,port=5640,version=9p2000.L,msize=1048576,cache=none \
		"$ADDRESS" "$PLACE/mnt" && over_rdma
}

over_rdma() { grep -q " $PLACE/mnt 9p .*trans=rdma" /proc/mounts && has_connections; }

disconnect() { umount "$PLACE/mnt" && wait_for no_connections; }

# lets_go: ends a mount whose connection is lost, and the programs that wait for it.
# umount(8) asks the server about the mount first. If the connection ends
# meanwhile, it waits for ever as well, until it is killed.
lets_go()
{
	pkill -KILL -x fio
	wait_for timeout --signal=KILL 5 umount "$PLACE/mnt"
}

# lets_go_of_failed COUNT: does the same when the device has failed after COUNT failures.
lets_go_of_failed() { wait_for has_failed_since "$1" && lets_go; }

has_failed_since() { [ "$(dmesg | grep -c 'has failed')" -gt "$1" ]; }
