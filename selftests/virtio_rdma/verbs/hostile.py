#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""The driver in front of a device that misbehaves: each kind of it ends in an error and a counter of its own, in at
most one line in the log, and in a device that works again after it was unbound and bound, or by itself. With rings, programs take
their CQEs themselves: the library in front of them drops those that make no sense.

The device is virtio-rdma-hostile. This program asks for a misbehaviour by a line of JSON behind "@" on its standard
output, and reads the answer from its standard input; the program that runs it passes both on. HOSTILE_TRANSPORT is
"vfio-user" or "vhost-user".
"""

import hostile_config
import hostile_cqes
import hostile_failure
import hostile_mount
import hostile_queues
import hostile_recovery
import hostile_replies
import hostile_srq
import ktap
from hostile_device import TRANSPORT, isolated, reload_module

# The last ones load the module with other parameters.
SUBJECTS = (hostile_config, hostile_replies, hostile_srq, hostile_cqes, hostile_queues, hostile_failure,
            hostile_recovery, hostile_mount)

if __name__ == "__main__":
    if TRANSPORT not in ("vfio-user", "vhost-user"):
        ktap.skip_all("the device is not hostile")
    reload_module()
    ktap.run([isolated(test) for subject in SUBJECTS for test in subject.TESTS])
