# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: SMC-R version 2, sockets of TCP whose bytes RDMA carries.
# ADDRESS is the address of the host that sends them back.

missing() { modprobe -a smc smc_diag 2>/dev/null || echo "the kernel has no SMC"; }

# up: both hosts are in one group, without which they use TCP.
up() { modprobe -a smc && "$DIR/smc.py" ueid; }

serve() { exec "$DIR/smc.py" serve "$ADDRESS"; }

ask() { "$DIR/smc.py" ask "$ADDRESS" "$1"; }

# load_streams: opens connections until $PLACE/stop is there.
load_streams()
{
	mkdir -p "$PLACE" && rm -f "$PLACE/stop" &&
	exec "$DIR/smc.py" load "$ADDRESS" "$PLACE/stop"
}

# down: SMC keeps link groups for ten minutes, and gives them up with its module.
down() { modprobe -r smc_diag smc && wait_for no_connections; }
