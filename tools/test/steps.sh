# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# shellcheck shell=bash
#
# Steps that name themselves, say how long they took, and leave a log behind.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
logs=$top/build/log
mkdir -p "$logs"

# step NAME TITLE CMD...: the command's result is in $result, its output and
# errors in the log; its own progress lines are shown as they come. With $beside, other output comes meanwhile, and
# the step has one line when it is done.
step() {
	local name=$1 title start=$SECONDS
	local log=$logs/$name.log
	printf -v title '%-44s' "$2"
	shift 2
	# What is shown already is not shown again at the end.
	[ -n "${beside-}" ] || { printf '%s' "$title" >&2; title=; }
	if ! result=$("$@" 2>"$log"); then
		printf '%sFAILED after %s s\n' "$title" $((SECONDS - start)) >&2
		tail -n 20 "$log" | sed 's/^/    /' >&2
		printf 'step "%s" failed; log: %s\n' "$name" "$log" >&2
		exit 1
	fi
	printf '%s%4s s\n' "$title" $((SECONDS - start)) >&2
}

# prepare KERNEL [DEVICE]: everything that guests of a kernel need; sets kernel_dir and image. DEVICE is what builds the
# device, if it is not "device".
prepare() {
	local kernel=$1
	step buildroot "build root" "$top/tools/vm/enter" true
	# First, as it takes longest where nothing is built, and others may wait for it.
	step "kernel-$kernel" "kernel $kernel" "$top/tools/vm/kernel" "$kernel"
	kernel_dir=$result
	step device "virtio-rdmad" make -s -C "$top" "${2:-device}"
	step guest "guest image" "$top/tools/vm/guest" --image
	image=$result
	step "module-$kernel" "virtio_rdma.ko for $kernel" "$top/tools/vm/module" "$kernel"
	step provider "libvirtio_rdma" make -s -C "$top" provider
}
