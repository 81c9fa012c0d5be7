# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: NFS over RDMA (RFC 8166, RFC 8267), server and
# client, version 4 alone and without the programs of nfs-utils: what mountd would
# tell the server, and mount.nfs the kernel, is told by hand. ADDRESS is the
# server's, CLIENT the client's.

. "$DIR/files_lib.sh"

NFSD=/proc/fs/nfsd
RPC_CACHE=/proc/net/rpc
# The year 2033, in which the entries of the caches expire.
EXPIRY=2000000000
# Read and write, from any port, root is root, no subtree is checked, it has the ID 0 (NFSEXP_*).
EXPORT_FLAGS=0x2402

missing()
{
	modprobe -a nfsd nfsv4 rpcrdma 2>/dev/null || { echo "the kernel has no NFS over RDMA"; return; }
	[ -e $NFSD/portlist ] || mount -t nfsd nfsd $NFSD 2>/dev/null
	[ -e $NFSD/portlist ] || echo "no file system nfsd"
}

# The server.

# tell CACHE WORD...: makes an entry in a cache of the server.
tell()
{
	cache=$1
	shift
	printf '%s\n' "$*" >"$RPC_CACHE/$cache/channel"
}

# exports: $PLACE/export is the root of what clients see.
exports()
{
	tell auth.unix.ip "nfsd $CLIENT $EXPIRY clients" &&
	tell nfsd.fh 'clients 1 \x00000000' "$EXPIRY $PLACE/export" &&
	tell nfsd.export "clients $PLACE/export $EXPIRY $((EXPORT_FLAGS)) 65534 65534 0"
}

target_up()
{
	store_up && mkdir "$PLACE/export" && exports && target_back
}

# target_gone, target_back: the server is down.
target_gone() { echo 0 >$NFSD/threads; }

target_back()
{
	echo "-2 -3 +4 +4.1 +4.2" >$NFSD/versions &&
	# A client that opens a file waits for clients that had files open before a restart. The server takes
	# no shorter time for that, and without nfsdcld it cannot be told that there are no such clients.
	echo 10 >$NFSD/nfsv4gracetime &&
	echo "rdma 20049" >$NFSD/portlist &&
	echo 4 >$NFSD/threads
}

target_down()
{
	target_gone &&
	for cache in nfsd.fh nfsd.export auth.unix.ip; do
		date +%s >"$RPC_CACHE/$cache/flush" || return
	done
	wait_for store_down
}

# The client.

connect()
{
	mkdir -p "$PLACE/mnt" &&
	mount -i -t nfs4 -o "vers=4.1,proto=rdma,port=20049,addr=$ADDRESS,clientaddr=$CLIENT,timeo=100" \
		"$ADDRESS:/" "$PLACE/mnt" && over_rdma
}

over_rdma() { grep -q " $PLACE/mnt nfs4 .*proto=rdma" /proc/mounts; }

disconnect() { umount "$PLACE/mnt"; }
