# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# Shared by the scripts in this directory. Progress goes to stderr, the one
# result of a script to stdout.

set -euo pipefail
# A caller inside the build root has a HOME of its own; the cache stays where
# the first caller had it.
vm_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
top=$(cd "$vm_dir/../.." && pwd -P)
cache=${VR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/virtio-rdma}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd -P)
export VR_CACHE=$cache

me=${0##*/}

# say TEXT...: one progress line.
say() { printf '%s: %s\n' "$me" "$*" >&2; }

die() { say "$@"; exit 1; }

# in_buildroot: whether this process already runs inside the build root.
in_buildroot() { [ -e /etc/virtio-rdma-buildroot ]; }

# hash_of FILE...: a short key for the contents of files and of stdin.
hash_of() { { cat "$@"; [ -t 0 ] || cat; } | sha256sum | cut -c1-16; }

# with_lock NAME: hold an exclusive lock on NAME until this process ends.
with_lock() {
	mkdir -p "$cache/lock"
	exec 9>"$cache/lock/$1"
	if ! flock -n 9; then
		say "waiting for another process that makes $1"
		flock 9
	fi
}

# as_root CMD...: replace this process by CMD as root, or as root of a user
# namespace when the caller is an ordinary user.
as_root() {
	if [ "$(id -u)" = 0 ]; then
		exec "$@"
	fi
	need newuidmap uidmap
	exec unshare --user --map-root-user --map-auto --mount -- "$@"
}

# apt_install PACKAGE: from the archive of this machine.
apt_install() {
	say "installing $1"
	{ apt-get update && apt-get install -y --no-install-recommends "$1"; } >"$cache/apt-$1.log" 2>&1
}

# need PROGRAM PACKAGE: install PACKAGE when PROGRAM is missing, or say so.
need() {
	command -v "$1" >/dev/null && return
	if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
		(with_lock apt; command -v "$1" >/dev/null || apt_install "$2") ||
			die "cannot install $2, see $cache/apt-$2.log"
	else
		die "missing program $1: install the package $2 (apt-get install $2)"
	fi
}

# timed WHAT LOG CMD...: run CMD with its output in LOG, and say how long it took.
timed() {
	local what=$1 log=$2 start=$SECONDS
	shift 2
	mkdir -p "${log%/*}"
	say "$what ..."
	if ! "$@" >"$log" 2>&1 9>&-; then
		tail -n 25 "$log" >&2
		die "$what failed, see $log"
	fi
	say "$what: done in $((SECONDS - start)) s"
}

# mirror: the Debian archive that this machine's own apt uses.
mirror() {
	apt-get indextargets --format '$(LABEL)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' |
		awk -F'|' '$1 == "Debian" && $2 == "main" { print $3; exit }'
}

# apt_options: what the machine's apt needs to reach its archive, as
# mmdebstrap options, one a line.
apt_options() {
	local key value
	for key in Acquire::http::Proxy Acquire::https::Proxy Acquire::Check-Valid-Until Acquire::Check-Date; do
		value=$(apt-config dump --format '%v%n' "$key")
		[ -z "$value" ] || printf '%s\n' "--aptopt=$key \"$value\""
	done
	if [ -r "$(ca_bundle)" ]; then
		printf '%s\n' "--aptopt=Acquire::https::CAInfo \"$(ca_bundle)\""
	fi
}

# ca_bundle: the certificates that this machine trusts.
ca_bundle() { printf '%s\n' "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}"; }

# Root of a user namespace cannot make device nodes, so /dev is a directory of
# files with those of this machine mounted over them, as long as packages are
# installed.
devices='full null random tty urandom zero'
devices_by_mount=(
	--skip=chroot/mount/dev
	--extract-hook="for d in $devices; do touch \"\$1/dev/\$d\" && mount --bind /dev/\$d \"\$1/dev/\$d\" || exit; done"
	--customize-hook="for d in $devices; do umount \"\$1/dev/\$d\" && rm \"\$1/dev/\$d\" || exit; done"
)

# debootstrap DIR MMDEBSTRAP-ARGUMENT...: make a Debian 13 root file system
# with its backports suite in DIR, or one of the suite that $debian_suite names.
debootstrap() {
	local dir=$1 suite=${debian_suite:-trixie} uri options sources
	shift
	uri=$(mirror)
	[ -n "$uri" ] || die "the machine's apt has no Debian archive (apt-get update?)"
	mapfile -t options < <(apt_options)
	[ "$(id -u)" = 0 ] || options+=("${devices_by_mount[@]}")
	sources=("deb $uri $suite main")
	[ "$suite" != trixie ] || sources+=("deb $uri trixie-updates main" "deb $uri trixie-backports main")
	(as_root mmdebstrap --mode=root --format=directory "${options[@]}" \
		--keyring=/usr/share/keyrings "$@" "$suite" "$dir" "${sources[@]}")
}
