# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The lines of Documentation/quickstart.md."""

import os

from virtio_rdma.common import TOP
from virtio_rdma.tests import examples

PAGE = os.path.join(TOP, "Documentation/quickstart.md")


def step(number):
    """Returns the lines of a step."""
    (lines,) = (lines for title, lines in examples.blocks(PAGE).items() if title.startswith(f"{number}. "))
    return lines
