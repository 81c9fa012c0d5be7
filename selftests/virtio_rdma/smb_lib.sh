# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: SMB Direct (MS-SMBD), the kernel's server (ksmbd) and
# its client (cifs). The server's part outside of the kernel is ksmbd.mountd of
# ksmbd-tools. ADDRESS is the server's. With SMB_USER, the client logs on as a user,
# and without it as a guest. No message is signed: the ksmbd of Linux 7.2.12 finds the
# signatures of the cifs of the same kernel wrong, over TCP as well.

. "$DIR/files_lib.sh"

SMB_USER=${SMB_USER-}
KSMBD=/tmp/ksmbd

missing()
{
	modprobe -a ksmbd cifs smbdirect 2>/dev/null || { echo "the kernel has no SMB Direct"; return; }
	command -v ksmbd.mountd >/dev/null || echo "no ksmbd.mountd"
}

# The server.

# configure: $PLACE/export is what clients see.
configure()
{
	mkdir -p "$KSMBD" &&
	cat >"$KSMBD/ksmbd.conf" <<-END &&
		[global]
		bind interfaces only = no
		map to guest = bad user
		server multi channel support = no
		server signing = auto
		smb3 encryption = disabled
		[share]
		path = $PLACE/export
		guest ok = yes
		read only = no
		force user = root
	END
	: >"$KSMBD/ksmbdpwd.db" &&
	{ [ -z "$SMB_USER" ] || ksmbd.adduser -C "$KSMBD/ksmbd.conf" -P "$KSMBD/ksmbdpwd.db" -a -p secret "$SMB_USER"; }
}

target_up()
{
	store_up && mkdir "$PLACE/export" && configure && target_back
}

# target_gone, target_back: the server is down.
target_gone() { ksmbd.control -s && wait_for no_connections; }

target_back()
{
	modprobe ksmbd && ksmbd.mountd -C "$KSMBD/ksmbd.conf" -P "$KSMBD/ksmbdpwd.db" && wait_for listens
}

# listens: whether the server takes connections, by RDMA as well.
listens() { rdma resource show cm_id | grep -q 'state LISTEN.*src-addr.*:445 '; }

target_down() { target_gone && modprobe -r ksmbd && rm -r "$KSMBD" && wait_for store_down; }

# The client.

connect()
{
	if [ -n "$SMB_USER" ]; then session="sec=ntlmssp,user=$SMB_USER,pass=secret"; else session="sec=none,guest"; fi
	mkdir -p "$PLACE/mnt" &&
	mount -i -t cifs -o "rdma,vers=3.1.1,ip=$ADDRESS,unc=\\\\$ADDRESS\\share,$session,cache=none" "//$ADDRESS/share" \
		"$PLACE/mnt" && over_rdma
}

over_rdma() { grep -q 'RDMA: yes\|SMBDirect' /proc/fs/cifs/DebugData && has_connections; }

disconnect() { umount "$PLACE/mnt" && wait_for no_connections; }
