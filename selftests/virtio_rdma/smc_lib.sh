# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: SMC-R version 2, sockets of TCP whose bytes RDMA carries.
# ADDRESS is the address of the host that sends them back.

missing() { modprobe -a smc smc_diag 2>/dev/null || echo "the kernel has no SMC"; }

# up: both hosts are in one group, without which they use TCP.
up() { modprobe -a smc && "$DIR/smc.py" ueid; }

serve() { exec "$DIR/smc.py" serve "$ADDRESS"; }

# once: opens a connection. When a client has lost its link group, and the server has not noticed,
# the server sends a message over the lost link, and waits 2 s for the answer, or until the QP of
# the link has no retry left (smc_llc_do_confirm_rkey()). It then declines the connection, which
# goes by TCP (SMC_CLC_DECL_ERR_REGBUF). The QP's error has it give up the group. If that takes
# longer, it declines more connections until then.
once() { "$DIR/smc.py" once "$ADDRESS"; }

# note_groups, given_up: notes the link groups of this host; whether it has given up all of them.
note_groups() { mkdir -p "$PLACE" && "$DIR/smc.py" groups >"$PLACE/groups"; }
given_up() { xargs "$DIR/smc.py" gone <"$PLACE/groups"; }

ask() { "$DIR/smc.py" ask "$ADDRESS" "$1"; }

# ask_large: opens a connection whose buffers have more pages than a registration takes. SMC
# gets no MR for them, and the connection goes by TCP.
ask_large()
{
	before=$(sysctl -n net.smc.rmem) &&
	sysctl -q net.smc.rmem=4194304 && once
	result=$?
	sysctl -q "net.smc.rmem=$before" && return $result
}

# load_streams: uses a connection until $PLACE/stop is there.
load_streams()
{
	mkdir -p "$PLACE" && rm -f "$PLACE/stop" &&
	exec "$DIR/smc.py" load "$ADDRESS" "$PLACE/stop"
}

# down: SMC keeps link groups for ten minutes, and gives them up with its module.
down() { modprobe -r smc_diag smc && wait_for no_connections; }

# down_after_aborts: does the same where link groups have been terminated under streams. smc_close_active_abort() of
# Linux 7.2 lets go of the socket's lock for a moment. If the program closes the socket just then, nobody drops the last
# reference, so the module stays, and the link groups end with their device.
down_after_aborts() { { modprobe -r smc_diag smc || lost_socket; } && wait_for no_connections; }

lost_socket() { no_sockets && echo "SMC has lost a socket" && "$DIR/fault.sh" reload_driver; }

no_sockets() { awk '/SMC/ { sockets += $3 } END { exit sockets != 0 }' /proc/net/protocols; }
