# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""How a command says that it is not carried out."""


class Refused(Exception):
    """A command ends in this status, and changes nothing."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
