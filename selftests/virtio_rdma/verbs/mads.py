#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Management datagrams (MADs) that come to the GSI from a QP of a program, as they may from any host of the network."""

import struct
import subprocess

import ktap
from rc import (AH, CQ, MR, PD, PORT, QP, AHAttr, GlobalRoute, QPAttr, QPCap, QPInitAttr, complete, e, open_device, post,
                recv_wr, send_wr, sge)

DEVICE = open_device()
GSI_QPN = 1
# The Q_Key of the GSI, and the bytes of a MAD and of the room for a GRH.
GSI_QKEY = 0x80010000
MAD = 256
GRH = 40
# Where the data of performance management begins.
DATA = 64
# struct ib_mad_hdr: versions, class, method, status, TID, attribute.
HEADER = struct.Struct(">BBBBHHQHHI")
PERFORMANCE = 4
GET, GET_RESPONSE = 0x01, 0x81
PORT_COUNTERS = 0x0012
UNSUPPORTED_METHOD_ATTRIBUTE = 0x000c


class Sender:
    """A UD QP that sends to this port's own GSI, and takes what comes back."""

    def __init__(self):
        self.pd, self.cq = PD(DEVICE.context), CQ(DEVICE.context, 16)
        cap = QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1)
        attributes = QPAttr(port_num=PORT)
        attributes.qkey = GSI_QKEY
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.cq, rcq=self.cq, cap=cap), attributes)
        self.mr = MR(self.pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
        route = GlobalRoute(dgid=DEVICE.context.query_gid(PORT, DEVICE.gid.gid_index),
                            sgid_index=DEVICE.gid.gid_index, hop_limit=5)
        self.address = AH(self.pd, attr=AHAttr(port_num=PORT, is_global=1, gr=route))

    def ask(self, header, body=b""):
        """Returns the answer to a MAD."""
        post(self.qp.post_recv, [recv_wr([sge(self.mr, 2048, GRH + MAD)])])
        self.mr.write((header + body).ljust(MAD, b"\0"), MAD)
        wr = send_wr(e.IBV_WR_SEND, [sge(self.mr, 0, MAD)])
        wr.set_wr_ud(self.address, GSI_QPN, GSI_QKEY)
        post(self.qp.post_send, [wr])
        complete(self.cq, 2)
        return self.mr.read(MAD, 2048 + GRH)

    def close(self):
        for thing in (self.address, self.qp, self.mr, self.cq, self.pd):
            thing.close()


def counters_are_for_this_host(rng):
    """Nobody gets the counters of the port by a MAD: they tell of this host's traffic, and each question costs a
    command."""
    sender = Sender()
    tid = rng.getrandbits(64)
    header = HEADER.pack(1, PERFORMANCE, 1, GET, 0, 0, tid, PORT_COUNTERS, 0, 0)
    # PortSelect is the second byte of the data, which begins at byte 64 (IBA 16.1.1).
    answer = sender.ask(header, bytes(DATA - HEADER.size) + bytes([0, PORT]))
    _, kind, _, method, status, _, answered, *_ = HEADER.unpack(answer[:HEADER.size])
    ktap.equal((kind, method, status, answered), (PERFORMANCE, GET_RESPONSE, UNSUPPORTED_METHOD_ATTRIBUTE, tid), "answer")
    ktap.equal(answer[DATA:].strip(b"\0\x01"), b"", "counters in the answer")
    sender.close()


if __name__ == "__main__":
    if "type GSI" not in subprocess.run(["rdma", "resource", "show", "qp"], stdout=subprocess.PIPE, check=True,
                                        encoding="utf-8").stdout:
        ktap.skip_all("no MADs")
    ktap.run([counters_are_for_this_host])
