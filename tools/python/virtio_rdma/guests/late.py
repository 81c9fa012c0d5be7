# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guests, the last of which the device's process is told of while it runs."""

from virtio_rdma.guests.network import Network


class Late(Network):
    """Guests, the last of which is added to the device's process."""

    is_complete = False

    def of_device(self):
        return self.guests if self.is_complete else self.guests[:-1]

    def start_daemon(self):
        super().start_daemon()
        self.add(self.guests[-1])
        self.is_complete = True

    def add(self, guest):
        """Adds a guest to the device's process."""
        status, text = self.operate("add", "--guest", self.guest_spec(guest))
        assert status == 0, text
