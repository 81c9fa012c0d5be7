# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: Reliable Datagram Sockets. ADDRESS is the address of
# the host that sends datagrams back, CLIENT that of the other one.

missing() { modprobe -a rds rds_rdma 2>/dev/null || echo "the kernel has no RDS over RDMA"; }

serve() { exec "$DIR/rds.py" serve "$ADDRESS"; }

# load_datagrams: sends datagrams until $PLACE/stop is there.
load_datagrams()
{
	mkdir -p "$PLACE" && rm -f "$PLACE/stop" &&
	exec "$DIR/rds.py" load "$CLIENT" "$ADDRESS" "$PLACE/stop"
}

# RDS keeps its connections for as long as its module is loaded.
no_connections() { :; }
