# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Guest 2 sends 2000 datagrams to guest 1, which prints how many of them came."""

import os
import socket
import time

COUNT = 2000
PORT = 18700
END = b"end"

datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["GUEST"] == "1":
    datagrams.bind(("", PORT))
    came = set()
    while (datagram := datagrams.recv(64)) != END:
        came.add(datagram)
    print(len(came), "datagrams came", flush=True)
else:
    # Guest 1 may not listen yet.
    time.sleep(1)
    for number in range(COUNT):
        datagrams.sendto(str(number).encode(), (os.environ["PEERS"], PORT))
        time.sleep(0.0005)
    # One of these may be lost as well.
    for _ in range(20):
        datagrams.sendto(END, (os.environ["PEERS"], PORT))
        time.sleep(0.01)
