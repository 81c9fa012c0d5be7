# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: what is the same for each remote file system, which the
# server has in $PLACE/export and the client mounts at $PLACE/mnt.

# stored: compares what the server has with what the client wrote.
stored() { cd "$PLACE/export" && sha256sum --quiet -c sums; }

write_tree() { tree && cp "$PLACE/sums" "$PLACE/mnt/"; }

# read_tree: compares the files, which come from the server and not from a cache of the client.
read_tree()
{
	echo 3 >/proc/sys/vm/drop_caches
	(cd "$PLACE/mnt" && sha256sum --quiet -c "$PLACE/sums")
}

verify_files() { verify --directory="$PLACE/mnt"; }

# load_files: runs verify_files again and again until $PLACE/stop is there.
load_files() { load --directory="$PLACE/mnt"; }

# large: writes a file of 1 GiB and reads it back.
large() { "$DIR/large.py" "$PLACE/mnt/large" 1024; }
