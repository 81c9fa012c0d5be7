# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""In a guest: moves messages by WRITEs or READs, in programs that sleep until a completion event comes.

    sleeping.py DEVICE GID_INDEX write|read SIZE COUNT            the end whose memory it is
    sleeping.py DEVICE GID_INDEX write|read SIZE COUNT ADDRESS    the end that has the work done

perftest has no events for WRITEs. With messages of 1 MiB, what Python takes for each is little.
"""

import json
import socket
import sys

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

PORT = 1
# Where the first end listens: perftest's port, which is free while this runs.
TCP_PORT = 18515
# Work requests that are outstanding, at most.
DEPTH = 16
OPCODES = {"write": e.IBV_WR_RDMA_WRITE, "read": e.IBV_WR_RDMA_READ}
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class End:
    """One end: a QP, a CQ with a completion channel, and memory for one message."""

    def __init__(self, context, index, size):
        self.context = context
        self.index = index
        self.channel = CompChannel(context)
        self.cq = CQ(context, DEPTH, None, self.channel)
        self.pd = PD(context)
        self.mr = MR(self.pd, size, ACCESS)
        self.mr.write(b"\x5a" * size, size)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=QPCap(DEPTH, 1, 1, 1))
        self.qp = QP(self.pd, init)

    def place(self):
        """Returns what the other end has to know."""
        return {"qp": self.qp.qp_num, "gid": self.context.query_gid(PORT, self.index).gid,
                "address": self.mr.buf, "rkey": self.mr.rkey}

    def connect(self, place):
        """Connects the QP to that of the other end."""
        device = self.context.query_device()
        attr = QPAttr(port_num=PORT)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = place["qp"]
        attr.path_mtu = self.context.query_port(PORT).active_mtu
        attr.max_rd_atomic = attr.max_dest_rd_atomic = min(DEPTH, device.max_qp_rd_atom)
        attr.min_rnr_timer, attr.retry_cnt, attr.rnr_retry, attr.timeout = 12, 7, 7, 14
        route = GlobalRoute(dgid=GID(place["gid"]), sgid_index=self.index)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        self.qp.to_rts(attr)

    def move(self, opcode, place, size, count):
        """Has so many messages moved, and sleeps until they are complete."""
        request = SendWR(opcode=opcode, num_sge=1, sg=[SGE(self.mr.buf, size, self.mr.lkey)],
                         send_flags=e.IBV_SEND_SIGNALED)
        request.set_wr_rdma(place["rkey"], place["address"])
        posted = done = 0
        self.cq.req_notify()
        while done < count:
            while posted < min(count, done + DEPTH):
                self.qp.post_send(request)
                posted += 1
            self.channel.get_cq_event(self.cq)
            self.cq.ack_events(1)
            self.cq.req_notify()
            done += self.completed()

    def completed(self):
        """Returns how many requests are complete since the last call."""
        done = 0
        while True:
            found, completions = self.cq.poll(DEPTH)
            if not found:
                return done
            for completion in completions:
                if completion.status != e.IBV_WC_SUCCESS:
                    raise SystemExit(f"completion with status {completion.status}")
            done += found


def connection(address):
    """Returns a TCP connection to the other end."""
    if address:
        return socket.create_connection((address, TCP_PORT))
    with socket.create_server(("", TCP_PORT)) as listener:
        return listener.accept()[0]


def main(device, index, verb, size, count, address=""):
    """Runs one end."""
    with Context(name=device) as context:
        end = End(context, int(index), int(size))
        with connection(address) as stream, stream.makefile("rw") as lines:
            print(json.dumps(end.place()), file=lines, flush=True)
            place = json.loads(lines.readline())
            end.connect(place)
            # Both ends are ready behind this.
            print(file=lines, flush=True)
            lines.readline()
            if address:
                end.move(OPCODES[verb], place, int(size), int(count))
            else:
                # The other end lets go of the connection when it is done.
                lines.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
