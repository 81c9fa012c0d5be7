# SPDX-License-Identifier: GPL-2.0
#
# Sourced behind block_lib.sh: NFS over RDMA (RFC 8166, RFC 8267), server and
# client, version 4 alone and without the programs of nfs-utils: what mountd would
# tell the server, and mount.nfs the kernel, is told by hand. ADDRESS is the
# server's, CLIENT the client's.

NFSD=/proc/fs/nfsd
RPC_CACHE=/proc/net/rpc
# Of the year 2033: when the server forgets what it was told.
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

# tell CACHE WORD...: an entry of a cache of the server.
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

# target_gone, target_back: nobody serves.
target_gone() { echo 0 >$NFSD/threads; }

target_back()
{
	echo "-2 -3 +4 +4.1 +4.2" >$NFSD/versions &&
	# The first to open a file waits for those who had one open before: nobody. Less than this the server
	# does not take, nor that it is over, which needs nfsdcld.
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

# stored: what the server has is what the client wrote.
stored() { cd "$PLACE/export" && sha256sum --quiet -c sums; }

# The client.

connect()
{
	mkdir -p "$PLACE/mnt" &&
	mount -i -t nfs4 -o "vers=4.1,proto=rdma,port=20049,addr=$ADDRESS,clientaddr=$CLIENT,timeo=100" \
		"$ADDRESS:/" "$PLACE/mnt" && over_rdma
}

over_rdma() { grep -q " $PLACE/mnt nfs4 .*proto=rdma" /proc/mounts; }

disconnect() { umount "$PLACE/mnt"; }

write_tree() { tree && cp "$PLACE/sums" "$PLACE/mnt/"; }

# read_tree: from the server, not from what the client remembers.
read_tree()
{
	echo 3 >/proc/sys/vm/drop_caches
	(cd "$PLACE/mnt" && sha256sum --quiet -c "$PLACE/sums")
}

verify_files() { verify --directory="$PLACE/mnt"; }
