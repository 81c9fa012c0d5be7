# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""What runs on the host around virtio-rdma: guests and their networks (guests), the program behind
tools/vm/vm, the demonstration, the benchmark (bench) and the tests (tests).

Everything here runs inside a build root, which tools/vm/python enters.
"""
