#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#
# Usage: mpi.sh COMMAND...
#
# In guest 1, run an MPI program with a process in each of two guests, over UCX. Guest 2 runs sshd until that is done. Both
# have the same key in the working directory.

set -e
mkdir -p /run/mpi /run/sshd
cp key key.pub /run/mpi
chown -R 0:0 /run/mpi
chmod 600 /run/mpi/key
if [ "$GUEST" = 2 ]; then
	/usr/sbin/sshd -f "$PWD/sshd_config"
	until [ -e /run/done ]; do sleep 0.2; done
	exit 0
fi
ssh='-q -o StrictHostKeyChecking=no -i /run/mpi/key'
until ssh $ssh guest2 true; do sleep 0.2; done
status=0
mpirun --allow-run-as-root --host guest1,guest2 --mca plm_rsh_args "$ssh" --mca pml ucx --mca osc ucx \
	--mca pml_ucx_devices any --mca pml_ucx_tls any -x UCX_TLS=rc,self -x UCX_IB_GID_INDEX=0 \
	-x UCX_NET_DEVICES=virtio_rdma0:1 "$@" || status=$?
ssh $ssh guest2 touch /run/done
exit $status
