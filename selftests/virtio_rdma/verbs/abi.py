# SPDX-License-Identifier: GPL-2.0
"""Made by tools/abi/layout from the headers. Do not edit, but run: tools/vm/enter tools/abi/layout --python > FILE

The device ABI and the user ABI of virtio-rdma, and what the tests use of the kernel's verbs ABI.

Names are those of the headers without VIRTIO_RDMA_; a structure is a class: struct virtio_rdma_cq_ring is CqRing, and
struct ib_uverbs_create_cq is IbUverbsCreateCq. bytes() of an object is what is exchanged; CqRing.consumer.offset is
where a field is. The fields of a union are also fields of the structure that has the union.
"""

import ctypes
from ctypes import c_int32 as s32, c_int64 as s64, c_uint8 as u8, c_uint16 as u16, c_uint32 as u32, c_uint64 as u64

be32, be64 = u32.__ctype_be__, u64.__ctype_be__


def union(**fields):
    """Returns a class for a union with these fields."""
    return type("union", (ctypes.LittleEndianUnion,), {"_fields_": list(fields.items())})


def struct(**fields):
    """Returns a class for a structure with these fields."""
    unions = [name for name, kind in fields.items() if issubclass(kind, ctypes.Union)]
    return type("struct", (ctypes.LittleEndianStructure,), {"_anonymous_": unions, "_fields_": list(fields.items())})


# ---- <linux/virtio_rdma.h>

DEVICE_ID = 42
PAGE_SHIFT = 12
MAX_PAGE_LEVELS = 3
PORT = 1
GSI_QPN = 1
MAX_DOORBELLS = 512
F_EVENTS = 0
F_MAC = 1
F_RINGS = 2
F_SRQ = 3
F_FAST_REG = 4
F_MW = 5
F_REREG_MR = 6
F_FLUSH = 7
F_ATOMIC_WRITE = 8
F_MCAST = 9
F_COUNTERS = 10
F_XRC = 11
F_PAGE_LEVELS = 12
F_VLAN = 13
F_CQ_MODERATION = 14
F_PAGE_SIZES = 15
F_RESET_TO_RTR = 16
F_VIRTQUEUES = 17
F_ATOMICS = 18
F_UC = 19
F_SRQ_RESIZE = 20
F_CQ_RESIZE = 21
F_ATOMICS_GLOBAL = 22
REQUIRES_EVENTS = 1 << F_VIRTQUEUES
REQUIRES_SRQ = 1 << F_RINGS
REQUIRES_MW = 1 << F_RINGS
REQUIRES_FLUSH = 1 << F_RINGS
REQUIRES_ATOMIC_WRITE = 1 << F_RINGS
REQUIRES_XRC = 1 << F_SRQ
REQUIRES_CQ_MODERATION = 1 << F_RINGS
REQUIRES_SRQ_RESIZE = 1 << F_SRQ
REQUIRES_CQ_RESIZE = 1 << F_RINGS
REQUIRES_ATOMICS_GLOBAL = 1 << F_ATOMICS
MAGIC = 0x616d6472
REVISION = 1
PORT_CM_SUP = 0x10000
ACCESS_LOCAL_WRITE = 0x1
ACCESS_REMOTE_WRITE = 0x2
ACCESS_REMOTE_READ = 0x4
ACCESS_REMOTE_ATOMIC = 0x8
ACCESS_MW_BIND = 0x10
ACCESS_ZERO_BASED = 0x20
ACCESS_ON_DEMAND = 0x40
ACCESS_HUGETLB = 0x80
ACCESS_FLUSH_GLOBAL = 0x100
ACCESS_FLUSH_PERSISTENT = 0x200
ACCESS_RELAXED_ORDERING = 0x100000
REREG_TRANS = 0x1
REREG_PD = 0x2
REREG_ACCESS = 0x4
QP_CREATE_BLOCK_MCAST_LOOPBACK = 0x2
AH_GRH = 1
QP_STATE = 0x1
QP_CUR_STATE = 0x2
QP_EN_SQD_ASYNC_NOTIFY = 0x4
QP_ACCESS_FLAGS = 0x8
QP_PKEY_INDEX = 0x10
QP_PORT = 0x20
QP_QKEY = 0x40
QP_AV = 0x80
QP_PATH_MTU = 0x100
QP_TIMEOUT = 0x200
QP_RETRY_CNT = 0x400
QP_RNR_RETRY = 0x800
QP_RQ_PSN = 0x1000
QP_MAX_QP_RD_ATOMIC = 0x2000
QP_ALT_PATH = 0x4000
QP_MIN_RNR_TIMER = 0x8000
QP_SQ_PSN = 0x10000
QP_MAX_DEST_RD_ATOMIC = 0x20000
QP_PATH_MIG_STATE = 0x40000
QP_CAP = 0x80000
QP_DEST_QPN = 0x100000
QP_RATE_LIMIT = 0x2000000
NO_VLAN = 0xffff
MCAST_QPN = 0xffffff
NOTIFY_SOLICITED = 0x1
NOTIFY_NEXT_COMPLETION = 0x2
QP_PRIVILEGED = 0x1
SEND_FENCE = 0x1
SEND_SIGNALED = 0x2
SEND_SOLICITED = 0x4
SEND_INLINE = 0x8
SEND_IP_CSUM = 0x10
WC_GRH = 0x1
WC_WITH_IMM = 0x2
WC_WITH_INVALIDATE = 0x4
WC_IP_CSUM_OK = 0x8
WC_WITH_VLAN = 0x20
FLUSH_GLOBAL = 0x1
FLUSH_PERSISTENT = 0x2

# enum virtio_rdma_cmd
CMD_QUERY_PORT = 1
CMD_CREATE_CQ = 2
CMD_DESTROY_CQ = 3
CMD_CREATE_PD = 4
CMD_DESTROY_PD = 5
CMD_GET_DMA_MR = 6
CMD_CREATE_MR = 7
CMD_MAP_MR_SG = 8
CMD_REG_USER_MR = 9
CMD_DEREG_MR = 10
CMD_CREATE_QP = 11
CMD_MODIFY_QP = 12
CMD_QUERY_QP = 13
CMD_DESTROY_QP = 14
CMD_QUERY_PKEY = 15
CMD_ADD_GID = 16
CMD_DEL_GID = 17
CMD_REQ_NOTIFY_CQ = 18
CMD_CREATE_RING_CQ = 32
CMD_RESIZE_CQ = 33
CMD_CREATE_RING_QP = 34
CMD_CREATE_SRQ = 35
CMD_MODIFY_SRQ = 36
CMD_QUERY_SRQ = 37
CMD_DESTROY_SRQ = 38
CMD_RESIZE_SRQ = 39
CMD_REREG_MR = 40
CMD_ALLOC_MW = 41
CMD_DEALLOC_MW = 42
CMD_ATTACH_MCAST = 44
CMD_DETACH_MCAST = 45
CMD_QUERY_COUNTERS = 46
CMD_ALLOC_XRCD = 47
CMD_DEALLOC_XRCD = 48
CMD_MODIFY_CQ = 49

# enum virtio_rdma_status
STATUS_OK = 0
STATUS_ERR = 1
STATUS_INVAL = 2
STATUS_NO_OBJECT = 3
STATUS_NO_RESOURCE = 4
STATUS_BUSY = 5
STATUS_UNSUPPORTED = 6
STATUS_PERM = 7
STATUS_FAULT = 8
STATUS_LENGTH = 9
STATUS_STATE = 10
STATUS_EXISTS = 11

# enum virtio_rdma_mw_type
MW_TYPE_1 = 1
MW_TYPE_2 = 2

# enum virtio_rdma_qp_type
QPT_GSI = 1
QPT_RC = 2
QPT_UC = 3
QPT_UD = 4
QPT_XRC_INI = 9
QPT_XRC_TGT = 10

# enum virtio_rdma_sig_type
SIGNAL_ALL_WR = 0
SIGNAL_REQ_WR = 1

# enum virtio_rdma_qp_state
QPS_RESET = 0
QPS_INIT = 1
QPS_RTR = 2
QPS_RTS = 3
QPS_SQD = 4
QPS_SQE = 5
QPS_ERR = 6

# enum virtio_rdma_gid_type
GID_TYPE_IB = 0
GID_TYPE_ROCE = 1
GID_TYPE_ROCE_UDP_ENCAP = 2

# enum virtio_rdma_wr_opcode
WR_RDMA_WRITE = 0
WR_RDMA_WRITE_WITH_IMM = 1
WR_SEND = 2
WR_SEND_WITH_IMM = 3
WR_RDMA_READ = 4
WR_ATOMIC_CMP_AND_SWP = 5
WR_ATOMIC_FETCH_AND_ADD = 6
WR_LOCAL_INV = 7
WR_BIND_MW = 8
WR_SEND_WITH_INV = 9
WR_RDMA_READ_WITH_INV = 11
WR_FLUSH = 14
WR_ATOMIC_WRITE = 15
WR_REG_MR = 0x20

# enum virtio_rdma_wc_status
WC_SUCCESS = 0
WC_LOC_LEN_ERR = 1
WC_LOC_QP_OP_ERR = 2
WC_LOC_EEC_OP_ERR = 3
WC_LOC_PROT_ERR = 4
WC_WR_FLUSH_ERR = 5
WC_MW_BIND_ERR = 6
WC_BAD_RESP_ERR = 7
WC_LOC_ACCESS_ERR = 8
WC_REM_INV_REQ_ERR = 9
WC_REM_ACCESS_ERR = 10
WC_REM_OP_ERR = 11
WC_RETRY_EXC_ERR = 12
WC_RNR_RETRY_EXC_ERR = 13
WC_LOC_RDD_VIOL_ERR = 14
WC_REM_INV_RD_REQ_ERR = 15
WC_REM_ABORT_ERR = 16
WC_INV_EECN_ERR = 17
WC_INV_EEC_STATE_ERR = 18
WC_FATAL_ERR = 19
WC_RESP_TIMEOUT_ERR = 20
WC_GENERAL_ERR = 21

# enum virtio_rdma_wc_opcode
WC_SEND = 0
WC_RDMA_WRITE = 1
WC_RDMA_READ = 2
WC_COMP_SWAP = 3
WC_FETCH_ADD = 4
WC_BIND_MW = 5
WC_LOCAL_INV = 6
WC_FLUSH = 8
WC_ATOMIC_WRITE = 9
WC_REG_MR = 64
WC_RECV = 128
WC_RECV_RDMA_WITH_IMM = 129

# enum virtio_rdma_event_type
EVENT_CQ_ERR = 0
EVENT_QP_FATAL = 1
EVENT_QP_REQ_ERR = 2
EVENT_QP_ACCESS_ERR = 3
EVENT_COMM_EST = 4
EVENT_SQ_DRAINED = 5
EVENT_DEVICE_FATAL = 8
EVENT_PORT_ACTIVE = 9
EVENT_PORT_ERR = 10
EVENT_SRQ_ERR = 14
EVENT_SRQ_LIMIT_REACHED = 15
EVENT_QP_LAST_WQE_REACHED = 16

# enum virtio_rdma_flush_level
FLUSH_RANGE = 0
FLUSH_MR = 1

# enum virtio_rdma_doorbell_queue
DOORBELL_SQ = 0
DOORBELL_RQ = 1
DOORBELL_SRQ = 2

Config = struct(phys_port_cnt=u32, magic=u32, sys_image_guid=u64, vendor_id=u32, vendor_part_id=u32, hw_ver=u32,
                revision=u32, max_mr_size=u64, page_size_cap=u64, max_qp=u32, max_qp_wr=u32, reserved_38=u64,
                max_send_sge=u32, max_recv_sge=u32, max_sge_rd=u32, max_cq=u32, max_cqe=u32, max_mr=u32, max_pd=u32,
                max_qp_rd_atom=u32, max_res_rd_atom=u32, max_qp_init_rd_atom=u32, reserved_68=u32, max_mw=u32,
                max_mcast_grp=u32, max_mcast_qp_attach=u32, max_total_mcast_qp_attach=u32, max_ah=u32,
                max_fast_reg_page_list_len=u32, reserved_84=u32, max_pkeys=u16, local_ca_ack_delay=u8,
                reserved_8b=u8 * 5, features=u64, mac=u8 * 6, reserved_9e=u8 * 2, num_comp_vectors=u32, ring_max_qp=u32,
                ring_max_cq=u32, ring_max_qp_wr=u32, ring_max_cqe=u32, ring_max_inline_data=u32, max_srq=u32,
                max_srq_wr=u32, max_srq_sge=u32, reserved_c4=u32, fw_ver=u64, reserved_d0=u8 * 48)
CmdQueryPort = struct(port=u8)
RspQueryPort = struct(state=u8, max_mtu=u8, active_mtu=u8, reserved_03=u8, phys_mtu=u32, gid_tbl_len=u32,
                      port_cap_flags=u32, max_msg_sz=u32, bad_pkey_cntr=u32, qkey_viol_cntr=u32, pkey_tbl_len=u16,
                      active_width=u8, reserved_1f=u8, active_speed=u16, phys_state=u8, reserved_23=u8,
                      reserved=u32 * 32)
CmdCreateCq = struct(cqe=u32)
RspCreateCq = struct(cqn=u32)
CmdDestroyCq = struct(cqn=u32)
RspCreatePd = struct(pdn=u32)
CmdDestroyPd = struct(pdn=u32)
CmdGetDmaMr = struct(pdn=u32, access_flags=u32)
RspMr = struct(mrn=u32, lkey=u32, rkey=u32)
CmdCreateMr = struct(pdn=u32, access_flags=u32, max_num_sg=u32)
CmdMapMrSg = struct(mrn=u32, npages=u32, start=u64, length=u64, pages=u64)
RspMapMrSg = struct(npages=u32)
CmdRegUserMr = struct(pdn=u32, access_flags=u32, start=u64, length=u64, virt_addr=u64, pages=u64, npages=u32, levels=u8,
                      page_shift=u8, reserved_2e=u8 * 2)
CmdReregMr = struct(mrn=u32, flags=u32, mr=CmdRegUserMr)
CmdDeregMr = struct(mrn=u32)
CmdAllocMw = struct(pdn=u32, type=u8, reserved_05=u8 * 3)
RspAllocMw = struct(mwn=u32, rkey=u32)
CmdDeallocMw = struct(mwn=u32)
CmdCreateQp = struct(pdn=u32, qp_type=u8, sq_sig_type=u8, create_flags=u8, reserved_07=u8, max_send_wr=u32,
                     max_send_sge=u32, send_cqn=u32, max_recv_wr=u32, max_recv_sge=u32, recv_cqn=u32,
                     max_inline_data=u32, reserved=u32 * 8)
RspCreateQp = struct(qpn=u32)
GlobalRoute = struct(dgid=u8 * 16, flow_label=u32, sgid_index=u8, hop_limit=u8, traffic_class=u8, reserved_17=u8)
AhAttr = struct(grh=GlobalRoute, sl=u8, static_rate=u8, port_num=u8, ah_flags=u8, dmac=u8 * 6, reserved_22=u8 * 6)
QpCap = struct(max_send_wr=u32, max_recv_wr=u32, max_send_sge=u32, max_recv_sge=u32, max_inline_data=u32)
QpAttr = struct(qp_state=u8, cur_qp_state=u8, path_mtu=u8, path_mig_state=u8, qkey=u32, rq_psn=u32, sq_psn=u32,
                dest_qp_num=u32, qp_access_flags=u32, pkey_index=u16, alt_pkey_index=u16, en_sqd_async_notify=u8,
                sq_draining=u8, max_rd_atomic=u8, max_dest_rd_atomic=u8, min_rnr_timer=u8, port_num=u8, timeout=u8,
                retry_cnt=u8, rnr_retry=u8, alt_port_num=u8, alt_timeout=u8, reserved_27=u8, rate_limit=u32, cap=QpCap,
                ah_attr=AhAttr, alt_ah_attr=AhAttr)
CmdModifyQp = struct(qpn=u32, attr_mask=u32, attr=QpAttr)
CmdQueryQp = struct(qpn=u32, attr_mask=u32)
RspQueryQp = struct(attr=QpAttr)
CmdDestroyQp = struct(qpn=u32)
CmdQueryPkey = struct(port=u32, index=u16, reserved_06=u16)
RspQueryPkey = struct(pkey=u16)
CmdAddGid = struct(gid=u8 * 16, gid_type=u32, index=u16, vlan_id=u16, port_num=u32)
CmdDelGid = struct(index=u16, reserved_02=u16, port=u32)
CmdMcast = struct(gid=u8 * 16, qpn=u32, lid=u16, reserved_16=u16)
CmdQueryCounters = struct(port=u32)
RspQueryCounters = struct(xmit_data=u64, rcv_data=u64, xmit_packets=u64, rcv_packets=u64, multicast_xmit_packets=u64,
                          multicast_rcv_packets=u64, xmit_discards=u64, reserved=u64 * 9)
CmdReqNotify = struct(cqn=u32, flags=u32)
RingRegion = struct(pages=u64, npages=u32, reserved_0c=u32)
CmdCreateRingCq = struct(region=RingRegion, cqe=u32, comp_vector=u32)
CmdResizeCq = struct(region=RingRegion, cqe=u32, cqn=u32)
RspResizeCq = struct(moved=u32)
RingShape = struct(depth=u32, stride=u32, offset=u32, reserved_0c=u32)
CmdCreateRingQp = struct(base=CmdCreateQp, flags=u32, region=RingRegion, sq=RingShape, rq=RingShape, srqn=u32,
                         xrcdn=u32, reserved=u32 * 6)
CmdCreateSrq = struct(region=RingRegion, ring=RingShape, pdn=u32, max_sge=u32, xrcdn=u32, cqn=u32, reserved=u32 * 4)
RspCreateSrq = struct(srqn=u32)
CmdModifySrq = struct(srqn=u32, srq_limit=u32)
CmdQuerySrq = struct(srqn=u32)
RspQuerySrq = struct(max_wr=u32, max_sge=u32, srq_limit=u32, reserved_0c=u32)
CmdDestroySrq = struct(srqn=u32)
CmdResizeSrq = struct(region=RingRegion, ring=RingShape, srqn=u32, reserved_24=u32)
RspResizeSrq = struct(moved=u32)
RspAllocXrcd = struct(xrcdn=u32)
CmdDeallocXrcd = struct(xrcdn=u32)
CmdModifyCq = struct(cqn=u32, cq_count=u16, cq_period=u16)
Sge = struct(addr=u64, length=u32, lkey=u32)
Av = struct(port=u32, pdn=u32, sl_tclass_flowlabel=u32, dgid=u8 * 16, gid_index=u8, static_rate=u8, hop_limit=u8,
            dmac=u8 * 6, reserved=u8 * 7)
SqWqe = struct(num_sge=u32, send_flags=u32, opcode=u32, reserved_0c=u32, wr_id=u64, ex=union(imm_data=be32,
               invalidate_rkey=u32), reserved_1c=u32, wr=union(rdma=struct(remote_addr=u64, rkey=u32, reserved_0c=u32),
               atomic=struct(remote_addr=u64, compare_add=u64, swap=u64, rkey=u32, reserved_1c=u32),
               ud=struct(remote_qpn=u32, remote_qkey=u32, av=Av), reg=struct(mrn=u32, key=u32, access=u32, npages=u32,
               pages=u64, iova=u64, length=u64, page_shift=u8, reserved_29=u8 * 7), raw=u8 * 56))
RqWqe = struct(num_sge=u32, reserved_04=u32, wr_id=u64)
Cqe = struct(wr_id=u64, status=u8, opcode=u8, vlan_id=u16, vendor_err=u32, byte_len=u32, ex=union(imm_data=be32,
             invalidate_rkey=u32), qp_num=u32, src_qp=u32, wc_flags=u32, pkey_index=u16, sl=u8, port_num=u8)
Event = struct(event=u32, handle=u32)
QpRing = struct(sq_producer=u32, reserved_04=u8 * 60, rq_producer=u32, reserved_44=u8 * 60, sq_wake=u32, rq_wake=u32,
                reserved_88=u8 * 120)
SrqRing = struct(producer=u32, reserved_04=u8 * 60, consumer=u32, reserved_44=u8 * 60, wake=u32, reserved_84=u8 * 124)
CqRing = struct(consumer=u32, closed=u32, reserved_08=u8 * 56, arm_next=u32, arm_solicited=u32, reserved_48=u8 * 56)
RingSqWqe = struct(wr_id=u64, opcode=u8, num_sge=u8, send_flags=u16, ex=union(imm_data=be32, invalidate_rkey=u32),
                   inline_len=u16, reserved_12=u16, rkey=u32, remote_addr=u64, compare_add=u64, swap=u64)
RingXrcWqe = struct(base=RingSqWqe, remote_srqn=u32, reserved_34=u8 * 12)
RingRegWqe = struct(wr_id=u64, opcode=u8, num_sge=u8, send_flags=u16, access=u32, npages=u16, page_shift=u8,
                    reserved_13=u8, key=u32, iova=u64, pages=u64, length=u64)
RingBindWqe = struct(wr_id=u64, opcode=u8, num_sge=u8, send_flags=u16, access=u32, mw_rkey=u32, new_rkey=u32, addr=u64,
                     length=u64, lkey=u32, reserved_2c=u32)
RingFlushWqe = struct(wr_id=u64, opcode=u8, num_sge=u8, send_flags=u16, type=u8, level=u8, reserved_0e=u16,
                      reserved_10=u32, rkey=u32, remote_addr=u64, length=u64, reserved_28=u64)
RingUdWqe = struct(wr_id=u64, opcode=u8, num_sge=u8, send_flags=u16, ex=union(imm_data=be32, invalidate_rkey=u32),
                   inline_len=u16, reserved_12=u16, remote_qpn=u32, remote_qkey=u32, av=Av, reserved_48=u8 * 8)
RingCqe = struct(wr_id=u64, status=u8, opcode=u8, sl=u8, port_num=u8, vendor_err=u32, byte_len=u32,
                 ex=union(imm_data=be32, invalidate_rkey=u32), qp_num=u32, src_qp=u32, wc_flags=u32, pkey_index=u16,
                 vlan_id=u16, wqe_index=u32, srqn=u32, timestamp=u64, reserved_38=u32, lap=u32)
Doorbell = struct(number=u32, queue=u32)
CompEvent = struct(cqn=u32, reserved_04=u32)

# ---- <rdma/virtio_rdma-abi.h>

UVERBS_ABI_VERSION = 1
UDATA_PATH_KERNEL = 0
UDATA_PATH_RINGS = 1
UDATA_PATH_RINGS_BUS = 2
ATTR_QUERY_CONTEXT_RESP = 0x1000

UreqAllocUcontext = struct(comp_mask=u64)
UrespAllocUcontext = struct(data_path=u32, max_inline_data=u32, features=u64, max_cqe=u32, max_qp_wr=u32,
                            max_send_sge=u32, max_recv_sge=u32, max_srq_wr=u32, max_srq_sge=u32, comp_mask=u64)
UreqCreateCq = struct(buf_addr=u64, buf_len=u64)
UrespResizeCq = struct(moved=u32, reserved_04=u32)
UreqCreateQp = struct(buf_addr=u64, buf_len=u64, sq_depth=u32, sq_stride=u32, sq_offset=u32, rq_depth=u32,
                      rq_stride=u32, rq_offset=u32)
UreqCreateSrq = struct(buf_addr=u64, buf_len=u64, depth=u32, stride=u32, offset=u32, reserved_1c=u32)
UrespCreateAh = struct(av=u8 * 44, reserved_2c=u32)

# ---- the kernel's <rdma/ib_user_verbs.h> and <rdma/rdma_user_ioctl_cmds.h>

IB_USER_VERBS_CMD_GET_CONTEXT = 0
IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL = 17
IB_USER_VERBS_CMD_QUERY_DEVICE = 1
IB_USER_VERBS_CMD_ALLOC_PD = 3
IB_USER_VERBS_CMD_CREATE_AH = 5
IB_USER_VERBS_CMD_REG_MR = 9
IB_USER_VERBS_CMD_REREG_MR = 11
IB_USER_VERBS_CMD_ALLOC_MW = 14
IB_USER_VERBS_CMD_DEALLOC_MW = 16
IB_USER_VERBS_CMD_CREATE_CQ = 18
IB_USER_VERBS_CMD_RESIZE_CQ = 19
IB_USER_VERBS_CMD_DESTROY_CQ = 20
IB_USER_VERBS_CMD_POLL_CQ = 21
IB_USER_VERBS_CMD_CREATE_QP = 24
IB_USER_VERBS_CMD_MODIFY_QP = 26
IB_USER_VERBS_CMD_DESTROY_QP = 27
IB_USER_VERBS_CMD_POST_SEND = 28
IB_USER_VERBS_CMD_POST_RECV = 29
IB_USER_VERBS_CMD_CREATE_SRQ = 32
IB_USER_VERBS_CMD_MODIFY_SRQ = 33
IB_USER_VERBS_CMD_DESTROY_SRQ = 35
IB_USER_VERBS_CMD_POST_SRQ_RECV = 36
IB_USER_VERBS_CMD_OPEN_XRCD = 37
IB_USER_VERBS_CMD_CLOSE_XRCD = 38
IB_USER_VERBS_CMD_CREATE_XSRQ = 39
IB_USER_VERBS_CMD_FLAG_EXTENDED = 0x80000000
IB_UVERBS_SRQT_BASIC = 0
IB_UVERBS_SRQT_XRC = 1
IB_UVERBS_WR_RDMA_WRITE = 0
IB_UVERBS_WR_SEND = 2
IB_UVERBS_BUFFER_TYPE_DMABUF = 0
IB_UVERBS_BUFFER_TYPE_VA = 1
UVERBS_OBJECT_DEVICE = 0
UVERBS_OBJECT_CQ = 3
UVERBS_OBJECT_QP = 4
UVERBS_OBJECT_SRQ = 5
UVERBS_OBJECT_MR = 7
UVERBS_METHOD_INVOKE_WRITE = 0
UVERBS_METHOD_GET_CONTEXT = 3
UVERBS_METHOD_CQ_CREATE = 0
UVERBS_METHOD_QP_CREATE = 0
UVERBS_METHOD_SRQ_CREATE = 0
UVERBS_METHOD_REG_MR = 5
UVERBS_ATTR_F_MANDATORY = 1
UVERBS_ATTR_UHW_IN = 4096
UVERBS_ATTR_UHW_OUT = 4097
UVERBS_ATTR_CORE_IN = 0
UVERBS_ATTR_CORE_OUT = 1
UVERBS_ATTR_WRITE_CMD = 2
UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS = 0
UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT = 1
UVERBS_ATTR_CREATE_CQ_HANDLE = 0
UVERBS_ATTR_CREATE_CQ_CQE = 1
UVERBS_ATTR_CREATE_CQ_USER_HANDLE = 2
UVERBS_ATTR_CREATE_CQ_COMP_VECTOR = 4
UVERBS_ATTR_CREATE_CQ_RESP_CQE = 6
UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL = 3
UVERBS_ATTR_CREATE_CQ_BUFFER_VA = 8
UVERBS_ATTR_CREATE_CQ_BUFFER_LENGTH = 9
UVERBS_ATTR_CREATE_CQ_BUFFER_FD = 10
UVERBS_ATTR_CREATE_CQ_BUFFER_OFFSET = 11
UVERBS_ATTR_CREATE_CQ_BUF_UMEM = 12
UVERBS_ATTR_CREATE_QP_BUF_UMEM = 15
UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM = 16
UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM = 17
UVERBS_ATTR_CREATE_QP_HANDLE = 0
UVERBS_ATTR_CREATE_QP_PD_HANDLE = 2
UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE = 4
UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE = 5
UVERBS_ATTR_CREATE_QP_USER_HANDLE = 7
UVERBS_ATTR_CREATE_QP_CAP = 8
UVERBS_ATTR_CREATE_QP_TYPE = 9
UVERBS_ATTR_CREATE_QP_RESP_CAP = 13
UVERBS_ATTR_CREATE_QP_RESP_QP_NUM = 14
UVERBS_ATTR_CREATE_SRQ_HANDLE = 0
UVERBS_ATTR_CREATE_SRQ_PD_HANDLE = 1
UVERBS_ATTR_CREATE_SRQ_USER_HANDLE = 4
UVERBS_ATTR_CREATE_SRQ_MAX_WR = 5
UVERBS_ATTR_CREATE_SRQ_MAX_SGE = 6
UVERBS_ATTR_CREATE_SRQ_LIMIT = 7
UVERBS_ATTR_CREATE_SRQ_TYPE = 9
UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR = 11
UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE = 12
UVERBS_ATTR_REG_MR_HANDLE = 0
UVERBS_ATTR_REG_MR_PD_HANDLE = 1
UVERBS_ATTR_REG_MR_IOVA = 3
UVERBS_ATTR_REG_MR_ADDR = 4
UVERBS_ATTR_REG_MR_LENGTH = 5
UVERBS_ATTR_REG_MR_ACCESS_FLAGS = 6
UVERBS_ATTR_REG_MR_RESP_LKEY = 9
UVERBS_ATTR_REG_MR_RESP_RKEY = 10
RDMA_VERBS_IOCTL = 0xc0181b01

IbUverbsCmdHdr = struct(command=u32, in_words=u16, out_words=u16)
IbUverbsExCmdHdr = struct(response=u64, provider_in_words=u16, provider_out_words=u16, cmd_hdr_reserved=u32)
IbUverbsGetContext = struct(response=u64)
IbUverbsGetContextResp = struct(async_fd=u32, num_comp_vectors=u32)
IbUverbsCreateCompChannel = struct(response=u64)
IbUverbsCreateCompChannelResp = struct(fd=u32)
IbUverbsAllocPd = struct(response=u64)
IbUverbsAllocPdResp = struct(pd_handle=u32)
IbUverbsGlobalRoute = struct(dgid=u8 * 16, flow_label=u32, sgid_index=u8, hop_limit=u8, traffic_class=u8, reserved=u8)
IbUverbsAhAttr = struct(grh=IbUverbsGlobalRoute, dlid=u16, sl=u8, src_path_bits=u8, static_rate=u8, is_global=u8,
                        port_num=u8, reserved=u8)
IbUverbsCreateAh = struct(response=u64, user_handle=u64, pd_handle=u32, reserved=u32, attr=IbUverbsAhAttr)
IbUverbsCreateAhResp = struct(ah_handle=u32)
IbUverbsRegMr = struct(response=u64, start=u64, length=u64, hca_va=u64, pd_handle=u32, access_flags=u32)
IbUverbsRegMrResp = struct(mr_handle=u32, lkey=u32, rkey=u32)
IbUverbsReregMr = struct(response=u64, mr_handle=u32, flags=u32, start=u64, length=u64, hca_va=u64, pd_handle=u32,
                         access_flags=u32)
IbUverbsReregMrResp = struct(lkey=u32, rkey=u32)
IbUverbsAllocMw = struct(response=u64, pd_handle=u32, mw_type=u8, reserved=u8 * 3)
IbUverbsAllocMwResp = struct(mw_handle=u32, rkey=u32)
IbUverbsDeallocMw = struct(mw_handle=u32)
IbUverbsCreateCq = struct(response=u64, user_handle=u64, cqe=u32, comp_vector=u32, comp_channel=s32, reserved=u32)
IbUverbsCreateCqResp = struct(cq_handle=u32, cqe=u32)
IbUverbsExCreateCq = struct(user_handle=u64, cqe=u32, comp_vector=u32, comp_channel=s32, comp_mask=u32, flags=u32,
                            reserved=u32)
IbUverbsExCreateCqResp = struct(base=IbUverbsCreateCqResp, comp_mask=u32, response_length=u32)
IbUverbsResizeCq = struct(response=u64, cq_handle=u32, cqe=u32)
IbUverbsResizeCqResp = struct(cqe=u32, reserved=u32)
IbUverbsPollCq = struct(response=u64, cq_handle=u32, ne=u32)
IbUverbsPollCqResp = struct(count=u32, reserved=u32)
IbUverbsWc = struct(wr_id=u64, status=u32, opcode=u32, vendor_err=u32, byte_len=u32, ex=union(imm_data=be32,
                    invalidate_rkey=u32), qp_num=u32, src_qp=u32, wc_flags=u32, pkey_index=u16, slid=u16, sl=u8,
                    dlid_path_bits=u8, port_num=u8, reserved=u8)
IbUverbsDestroyCq = struct(response=u64, cq_handle=u32, reserved=u32)
IbUverbsDestroyCqResp = struct(comp_events_reported=u32, async_events_reported=u32)
IbUverbsCreateQp = struct(response=u64, user_handle=u64, pd_handle=u32, send_cq_handle=u32, recv_cq_handle=u32,
                          srq_handle=u32, max_send_wr=u32, max_recv_wr=u32, max_send_sge=u32, max_recv_sge=u32,
                          max_inline_data=u32, sq_sig_all=u8, qp_type=u8, is_srq=u8, reserved=u8)
IbUverbsCreateQpResp = struct(qp_handle=u32, qpn=u32, max_send_wr=u32, max_recv_wr=u32, max_send_sge=u32,
                              max_recv_sge=u32, max_inline_data=u32, reserved=u32)
IbUverbsExCreateQp = struct(user_handle=u64, pd_handle=u32, send_cq_handle=u32, recv_cq_handle=u32, srq_handle=u32,
                            max_send_wr=u32, max_recv_wr=u32, max_send_sge=u32, max_recv_sge=u32, max_inline_data=u32,
                            sq_sig_all=u8, qp_type=u8, is_srq=u8, reserved=u8, comp_mask=u32, create_flags=u32,
                            rwq_ind_tbl_handle=u32, source_qpn=u32)
IbUverbsExCreateQpResp = struct(base=IbUverbsCreateQpResp, comp_mask=u32, response_length=u32)
IbUverbsQpDest = struct(dgid=u8 * 16, flow_label=u32, dlid=u16, reserved=u16, sgid_index=u8, hop_limit=u8,
                        traffic_class=u8, sl=u8, src_path_bits=u8, static_rate=u8, is_global=u8, port_num=u8)
IbUverbsModifyQp = struct(dest=IbUverbsQpDest, alt_dest=IbUverbsQpDest, qp_handle=u32, attr_mask=u32, qkey=u32,
                          rq_psn=u32, sq_psn=u32, dest_qp_num=u32, qp_access_flags=u32, pkey_index=u16,
                          alt_pkey_index=u16, qp_state=u8, cur_qp_state=u8, path_mtu=u8, path_mig_state=u8,
                          en_sqd_async_notify=u8, max_rd_atomic=u8, max_dest_rd_atomic=u8, min_rnr_timer=u8,
                          port_num=u8, timeout=u8, retry_cnt=u8, rnr_retry=u8, alt_port_num=u8, alt_timeout=u8,
                          reserved=u8 * 2)
IbUverbsExModifyQp = struct(base=IbUverbsModifyQp, rate_limit=u32, reserved=u32)
IbUverbsExModifyQpResp = struct(comp_mask=u32, response_length=u32)
IbUverbsDestroyQp = struct(response=u64, qp_handle=u32, reserved=u32)
IbUverbsDestroyQpResp = struct(events_reported=u32)
IbUverbsSge = struct(addr=u64, length=u32, lkey=u32)
IbUverbsSendWr = struct(wr_id=u64, num_sge=u32, opcode=u32, send_flags=u32, ex=union(imm_data=be32,
                        invalidate_rkey=u32), wr=union(rdma=struct(remote_addr=u64, rkey=u32, reserved=u32),
                        atomic=struct(remote_addr=u64, compare_add=u64, swap=u64, rkey=u32, reserved=u32),
                        ud=struct(ah=u32, remote_qpn=u32, remote_qkey=u32, reserved=u32)))
IbUverbsRecvWr = struct(wr_id=u64, num_sge=u32, reserved=u32)
IbUverbsPostSend = struct(response=u64, qp_handle=u32, wr_count=u32, sge_count=u32, wqe_size=u32)
IbUverbsPostSendResp = struct(bad_wr=u32)
IbUverbsCreateSrq = struct(response=u64, user_handle=u64, pd_handle=u32, max_wr=u32, max_sge=u32, srq_limit=u32)
IbUverbsCreateXsrq = struct(response=u64, user_handle=u64, srq_type=u32, pd_handle=u32, max_wr=u32, max_sge=u32,
                            srq_limit=u32, max_num_tags=u32, xrcd_handle=u32, cq_handle=u32)
IbUverbsCreateSrqResp = struct(srq_handle=u32, max_wr=u32, max_sge=u32, srqn=u32)
IbUverbsModifySrq = struct(srq_handle=u32, attr_mask=u32, max_wr=u32, srq_limit=u32)
IbUverbsDestroySrq = struct(response=u64, srq_handle=u32, reserved=u32)
IbUverbsDestroySrqResp = struct(events_reported=u32)
IbUverbsOpenXrcd = struct(response=u64, fd=u32, oflags=u32)
IbUverbsOpenXrcdResp = struct(xrcd_handle=u32)
IbUverbsCloseXrcd = struct(xrcd_handle=u32)
IbUverbsQueryDeviceResp = struct(fw_ver=u64, node_guid=be64, sys_image_guid=be64, max_mr_size=u64, page_size_cap=u64,
                                 vendor_id=u32, vendor_part_id=u32, hw_ver=u32, max_qp=u32, max_qp_wr=u32,
                                 device_cap_flags=u32, max_sge=u32, max_sge_rd=u32, max_cq=u32, max_cqe=u32, max_mr=u32,
                                 max_pd=u32, max_qp_rd_atom=u32, max_ee_rd_atom=u32, max_res_rd_atom=u32,
                                 max_qp_init_rd_atom=u32, max_ee_init_rd_atom=u32, atomic_cap=u32, max_ee=u32,
                                 max_rdd=u32, max_mw=u32, max_raw_ipv6_qp=u32, max_raw_ethy_qp=u32, max_mcast_grp=u32,
                                 max_mcast_qp_attach=u32, max_total_mcast_qp_attach=u32, max_ah=u32, max_fmr=u32,
                                 max_map_per_fmr=u32, max_srq=u32, max_srq_wr=u32, max_srq_sge=u32, max_pkeys=u16,
                                 local_ca_ack_delay=u8, phys_port_cnt=u8, reserved=u8 * 4)
IbUverbsOdpCaps = struct(general_caps=u64, per_transport_caps=struct(rc_odp_caps=u32, uc_odp_caps=u32, ud_odp_caps=u32),
                         reserved=u32)
IbUverbsRssCaps = struct(supported_qpts=u32, max_rwq_indirection_tables=u32, max_rwq_indirection_table_size=u32,
                         reserved=u32)
IbUverbsTmCaps = struct(max_rndv_hdr_size=u32, max_num_tags=u32, flags=u32, max_ops=u32, max_sge=u32, reserved=u32)
IbUverbsCqModerationCaps = struct(max_cq_moderation_count=u16, max_cq_moderation_period=u16, reserved=u32)
IbUverbsExQueryDevice = struct(comp_mask=u32, reserved=u32)
IbUverbsExQueryDeviceResp = struct(base=IbUverbsQueryDeviceResp, comp_mask=u32, response_length=u32,
                                   odp_caps=IbUverbsOdpCaps, timestamp_mask=u64, hca_core_clock=u64,
                                   device_cap_flags_ex=u64, rss_caps=IbUverbsRssCaps, max_wq_type_rq=u32,
                                   raw_packet_caps=u32, tm_caps=IbUverbsTmCaps,
                                   cq_moderation_caps=IbUverbsCqModerationCaps, max_dm_size=u64, xrc_odp_caps=u32,
                                   reserved=u32)
IbUverbsIoctlHdr = struct(length=u16, object_id=u16, method_id=u16, num_attrs=u16, reserved1=u64, driver_id=u32,
                          reserved2=u32)
IbUverbsAttr = struct(attr_id=u16, len=u16, flags=u16, attr_data=union(enum_data=struct(elem_id=u8, reserved=u8),
                      reserved=u16), unnamed_4=union(data=u64, data_s64=s64))
IbUverbsQpCap = struct(max_send_wr=u32, max_recv_wr=u32, max_send_sge=u32, max_recv_sge=u32, max_inline_data=u32)
IbUverbsBufferDesc = struct(type=u32, fd=s32, flags=u32, optional_flags=u32, addr=u64, length=u64)
