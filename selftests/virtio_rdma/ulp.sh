#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Usage: ulp.sh nvme|iser|srp|rnbd|nfs STEP [ARGUMENT...]
#
# One step of a test of a kernel consumer between two hosts, on the one that it
# is a step of: a function of block_lib.sh or of the consumer's library. Who runs
# the steps on both hosts in order is outside of them.

. "$(dirname "$0")/lib.sh"

PLACE=/tmp/ulp
need_device
. "$DIR/block_lib.sh"
. "$DIR/$1_lib.sh"
shift
"$@"
