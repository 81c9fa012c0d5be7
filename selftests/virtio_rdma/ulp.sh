#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Usage: ulp.sh nvme|iser|srp|rnbd|nfs|smb|9p|smc|rds STEP [ARGUMENT...]
#
# Runs one step of a test of a kernel consumer between two hosts, which is this
# host's: a function of block_lib.sh or of the consumer's library. A program
# outside of both hosts runs the steps in order.

. "$(dirname "$0")/lib.sh"

PLACE=${PLACE:-/tmp/ulp}
need_any_device
. "$DIR/block_lib.sh"
. "$DIR/$1_lib.sh"
shift
"$@"
