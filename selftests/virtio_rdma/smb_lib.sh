# SPDX-License-Identifier: GPL-2.0
#
# Sourced after block_lib.sh: SMB Direct (MS-SMBD), the kernel's server (ksmbd) and
# its client (cifs). The server's part outside of the kernel is ksmbd.mountd of
# ksmbd-tools. ADDRESS is the server's. SMB_SESSION is the client's session: "guest",
# "user", or "signed", a user's whose messages are signed; those have all data in SENDs.

. "$DIR/files_lib.sh"

SMB_SESSION=${SMB_SESSION:-guest}
KSMBD=/tmp/ksmbd

missing()
{
	modprobe -a ksmbd cifs smbdirect 2>/dev/null || { echo "the kernel has no SMB Direct"; return; }
	command -v ksmbd.mountd >/dev/null || echo "no ksmbd.mountd"
}

# The server.

# configure: $PLACE/export is what clients see. A user who is not known is no guest, unless
# guests are wanted.
configure()
{
	if [ "$SMB_SESSION" = guest ]; then guests="bad user" open=yes; else guests=never open=no; fi
	mkdir -p "$KSMBD" &&
	cat >"$KSMBD/ksmbd.conf" <<-END &&
		[global]
		bind interfaces only = no
		map to guest = $guests
		server multi channel support = no
		server signing = auto
		smb3 encryption = disabled
		[share]
		path = $PLACE/export
		guest ok = $open
		read only = no
		force user = root
	END
	: >"$KSMBD/ksmbdpwd.db" &&
	ksmbd.adduser -C "$KSMBD/ksmbd.conf" -P "$KSMBD/ksmbdpwd.db" -a -p secret anna
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

# The library of mount(8) keeps the option "user" to itself.
connect()
{
	case $SMB_SESSION in
	guest) session="sec=none,guest" ;;
	user) session="sec=ntlmssp,username=anna,password=secret" ;;
	signed) session="sec=ntlmsspi,username=anna,password=secret" ;;
	esac
	mkdir -p "$PLACE/mnt" &&
	mount -i -t cifs -o "rdma,vers=3.1.1,ip=$ADDRESS,unc=\\\\$ADDRESS\\share,$session,cache=none,hard" \
		"//$ADDRESS/share" "$PLACE/mnt" && over_rdma && session_is_as_wanted
}

over_rdma() { grep -q 'RDMA: yes\|SMBDirect' /proc/fs/cifs/DebugData && has_connections; }

session_is_as_wanted()
{
	said=$(grep 'Security type' /proc/fs/cifs/DebugData)
	case $SMB_SESSION:$said in
	signed:*signed*) ;;
	signed:* | *:*signed*) echo "session $SMB_SESSION: $said"; return 1 ;;
	esac
}

disconnect() { umount "$PLACE/mnt" && wait_for no_connections; }
