/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR Linux-OpenIB */
/*
 * virtio-rdma: the device ABI, virtio device ID 42.
 *
 * This header is the one truth of what driver and device say to each other:
 * the driver, the device and the tests generate their definitions from it.
 * Documentation/specification explains what it only lays out.
 *
 * Rules that hold for every structure:
 *  - little-endian, natural C alignment, padding written out as @reserved
 *    members that the writer sets to zero and the reader ignores;
 *  - a value that IBA or the kernel's uAPI numbers has that same number here;
 *  - fields that the wire carries in network byte order keep that order: GIDs,
 *    MAC addresses, GUIDs and immediate data are copied, never swapped.
 */
#ifndef _UAPI_LINUX_VIRTIO_RDMA_H
#define _UAPI_LINUX_VIRTIO_RDMA_H

#include <linux/types.h>

#define VIRTIO_RDMA_DEVICE_ID		42

/* Page tables list pages of 4 KiB, those of MRs larger ones with VIRTIO_RDMA_F_PAGE_SIZES. */
#define VIRTIO_RDMA_PAGE_SHIFT		12

/* Most levels of lists above the page table proper. */
#define VIRTIO_RDMA_MAX_PAGE_LEVELS	3

/* Ports count from 1; there is one. */
#define VIRTIO_RDMA_PORT		1

/* The QP number that CREATE_QP answers for a QP of type GSI. */
#define VIRTIO_RDMA_GSI_QPN		1

/* Most doorbells of one buffer of the doorbell virtqueue. */
#define VIRTIO_RDMA_MAX_DOORBELLS	512

/* ---- Feature bits ------------------------------------------------------ */

/*
 * With VIRTIO_RDMA_F_VIRTQUEUES, the event virtqueue exists. With
 * VIRTIO_RDMA_F_RINGS it exists without this bit.
 */
#define VIRTIO_RDMA_F_EVENTS		0
/* config.mac names the paired network interface. */
#define VIRTIO_RDMA_F_MAC		1
/*
 * Work and completion queues are rings in guest memory instead of virtqueues,
 * and the virtqueues have other numbers: specification, Rings.
 */
#define VIRTIO_RDMA_F_RINGS		2
/* Shared receive queues. */
#define VIRTIO_RDMA_F_SRQ		3
/*
 * Fast registration: CREATE_MR, REG_MR, LOCAL_INV, and invalidation by
 * SEND_WITH_INV and RDMA_READ_WITH_INV.
 */
#define VIRTIO_RDMA_F_FAST_REG		4
/*
 * Memory windows: ALLOC_MW, DEALLOC_MW, BIND_MW, and invalidation as with
 * VIRTIO_RDMA_F_FAST_REG.
 */
#define VIRTIO_RDMA_F_MW		5
/* REREG_MR */
#define VIRTIO_RDMA_F_REREG_MR		6
/* FLUSH */
#define VIRTIO_RDMA_F_FLUSH		7
/* ATOMIC_WRITE */
#define VIRTIO_RDMA_F_ATOMIC_WRITE	8
/* UD QPs attach to multicast groups: ATTACH_MCAST, DETACH_MCAST. */
#define VIRTIO_RDMA_F_MCAST		9
/* The device counts what its port sends and receives: QUERY_COUNTERS. */
#define VIRTIO_RDMA_F_COUNTERS		10
/* Extended reliable connections. */
#define VIRTIO_RDMA_F_XRC		11
/* Page tables of MRs may have levels: virtio_rdma_cmd_reg_user_mr.levels */
#define VIRTIO_RDMA_F_PAGE_LEVELS	12
/* GIDs belong to VLANs, and completions of datagrams tell by which one came. */
#define VIRTIO_RDMA_F_VLAN		13
/* Completion events are held back: MODIFY_CQ. */
#define VIRTIO_RDMA_F_CQ_MODERATION	14
/* Page tables of MRs may list larger pages: virtio_rdma_cmd_reg_user_mr.page_shift */
#define VIRTIO_RDMA_F_PAGE_SIZES	15
/* MODIFY_QP leads from RESET to RTR at once. */
#define VIRTIO_RDMA_F_RESET_TO_RTR	16
/*
 * Work and completion queues are virtqueues. Of this bit and VIRTIO_RDMA_F_RINGS,
 * a driver accepts one.
 */
#define VIRTIO_RDMA_F_VIRTQUEUES	17
/* Atomic operations, atomic against other QPs of the device. */
#define VIRTIO_RDMA_F_ATOMICS		18
/* QPs of unreliable connections. */
#define VIRTIO_RDMA_F_UC		19
/* RESIZE_SRQ */
#define VIRTIO_RDMA_F_SRQ_RESIZE	20
/* RESIZE_CQ */
#define VIRTIO_RDMA_F_CQ_RESIZE		21
/* Atomic operations are atomic against the CPUs of the guest as well. */
#define VIRTIO_RDMA_F_ATOMICS_GLOBAL	22

/*
 * A feature bit is neither offered nor accepted without the bits that it
 * requires: VIRTIO_RDMA_F_X requires those in VIRTIO_RDMA_REQUIRES_X. Bits that
 * are required come before those that require them.
 */
#define VIRTIO_RDMA_REQUIRES_EVENTS		(1ULL << VIRTIO_RDMA_F_VIRTQUEUES)
#define VIRTIO_RDMA_REQUIRES_SRQ		(1ULL << VIRTIO_RDMA_F_RINGS)
#define VIRTIO_RDMA_REQUIRES_MW			(1ULL << VIRTIO_RDMA_F_RINGS)
#define VIRTIO_RDMA_REQUIRES_FLUSH		(1ULL << VIRTIO_RDMA_F_RINGS)
#define VIRTIO_RDMA_REQUIRES_ATOMIC_WRITE	(1ULL << VIRTIO_RDMA_F_RINGS)
#define VIRTIO_RDMA_REQUIRES_XRC		(1ULL << VIRTIO_RDMA_F_SRQ)
#define VIRTIO_RDMA_REQUIRES_CQ_MODERATION	(1ULL << VIRTIO_RDMA_F_RINGS)
#define VIRTIO_RDMA_REQUIRES_SRQ_RESIZE		(1ULL << VIRTIO_RDMA_F_SRQ)
#define VIRTIO_RDMA_REQUIRES_CQ_RESIZE		(1ULL << VIRTIO_RDMA_F_RINGS)
#define VIRTIO_RDMA_REQUIRES_ATOMICS_GLOBAL	(1ULL << VIRTIO_RDMA_F_ATOMICS)

/* ---- Configuration space ----------------------------------------------- */

/* virtio_rdma_config.magic: "rdma" */
#define VIRTIO_RDMA_MAGIC	0x616d6472
/* virtio_rdma_config.revision: that of this header */
#define VIRTIO_RDMA_REVISION	1

/**
 * struct virtio_rdma_config - the configuration space, read-only
 * @phys_port_cnt: number of ports, 1
 * @magic: VIRTIO_RDMA_MAGIC, by which a driver knows that the device is of this
 *	specification
 * @sys_image_guid: GUID of the system image, network byte order
 * @vendor_id: IEEE OUI of the vendor
 * @vendor_part_id: part number given by the vendor
 * @hw_ver: version of the hardware or model, for people
 * @revision: VIRTIO_RDMA_REVISION
 * @max_mr_size: largest memory region, in bytes
 * @page_size_cap: mask of page sizes of a fast registration, and with
 *	VIRTIO_RDMA_F_PAGE_SIZES of other MRs, bit n for 2^n bytes; bit 12 is set
 * @max_qp: number of QPs; M in the numbering of virtqueues
 * @max_qp_wr: most outstanding work requests of one send or receive queue
 * @max_send_sge: most SGEs of a send work request
 * @max_recv_sge: most SGEs of a receive work request
 * @max_sge_rd: most SGEs of an RDMA READ work request
 * @max_cq: number of CQs; N in the numbering of virtqueues
 * @max_cqe: most CQEs of one CQ
 * @max_mr: number of MRs
 * @max_pd: number of PDs
 * @max_qp_rd_atom: most READs and atomics a QP serves as the responder
 * @max_res_rd_atom: most READs and atomics the device serves in all, for
 *	information
 * @max_qp_init_rd_atom: most READs and atomics a QP has under way
 * @max_mw: number of memory windows (VIRTIO_RDMA_F_MW)
 * @max_mcast_grp: number of multicast groups
 * @max_mcast_qp_attach: most QPs of one multicast group
 * @max_total_mcast_qp_attach: most attachments in all groups
 * @max_ah: of no account: the device knows no address handles
 * @max_fast_reg_page_list_len: most pages of a fast registration, whatever their
 *	size
 * @max_pkeys: entries of the P_Key table, 1
 * @local_ca_ack_delay: IBA's Local CA ACK Delay, 4.096 us * 2^n
 * @features: the device-specific feature bits 0..63 that the device has, for
 *	diagnosis
 * @mac: MAC address of the paired network interface (VIRTIO_RDMA_F_MAC)
 * @num_comp_vectors: completion event virtqueues (VIRTIO_RDMA_F_RINGS); V in
 *	the numbering of virtqueues
 * @ring_max_qp: number of QPs with rings
 * @ring_max_cq: number of CQs with rings
 * @ring_max_qp_wr: most entries of a send or receive ring, a power of two
 * @ring_max_cqe: most entries of a completion ring, a power of two
 * @ring_max_inline_data: most bytes of inline data of a send work request
 * @max_srq: number of SRQs (VIRTIO_RDMA_F_SRQ)
 * @max_srq_wr: most entries of the ring of an SRQ, a power of two
 * @max_srq_sge: most SGEs of a work request of an SRQ
 * @fw_ver: version of the device's implementation, major << 32 | minor << 16 | patch;
 *	zero if the device does not tell
 *
 * The fields up to @local_ca_ack_delay are the RFC's; its reserved tail is cut
 * so that the whole stays within the 256 bytes that vhost-user carries.
 */
struct virtio_rdma_config {
	__le32 phys_port_cnt;
	__le32 magic;
	__le64 sys_image_guid;
	__le32 vendor_id;
	__le32 vendor_part_id;
	__le32 hw_ver;
	__le32 revision;
	__le64 max_mr_size;
	__le64 page_size_cap;
	__le32 max_qp;
	__le32 max_qp_wr;
	__le64 reserved_38;
	__le32 max_send_sge;
	__le32 max_recv_sge;
	__le32 max_sge_rd;
	__le32 max_cq;
	__le32 max_cqe;
	__le32 max_mr;
	__le32 max_pd;
	__le32 max_qp_rd_atom;
	__le32 max_res_rd_atom;
	__le32 max_qp_init_rd_atom;
	__le32 reserved_68;
	__le32 max_mw;
	__le32 max_mcast_grp;
	__le32 max_mcast_qp_attach;
	__le32 max_total_mcast_qp_attach;
	__le32 max_ah;
	__le32 max_fast_reg_page_list_len;
	__le32 reserved_84;
	__le16 max_pkeys;
	__u8   local_ca_ack_delay;
	__u8   reserved_8b[5];
	__le64 features;
	__u8   mac[6];
	__u8   reserved_9e[2];
	__le32 num_comp_vectors;
	__le32 ring_max_qp;
	__le32 ring_max_cq;
	__le32 ring_max_qp_wr;
	__le32 ring_max_cqe;
	__le32 ring_max_inline_data;
	__le32 max_srq;
	__le32 max_srq_wr;
	__le32 max_srq_sge;
	__le32 reserved_c4;
	__le64 fw_ver;
	__u8   reserved_d0[48];
};

/* ---- Control virtqueue (index 0) --------------------------------------- */

/*
 * A request is one descriptor chain. Its device-readable bytes are the command
 * (1 byte) followed by the command's request structure; its device-writable
 * bytes are the status (1 byte) followed by the command's reply structure.
 * How the bytes are spread over descriptors has no meaning.
 */
enum virtio_rdma_cmd {
	VIRTIO_RDMA_CMD_QUERY_PORT	= 1,
	VIRTIO_RDMA_CMD_CREATE_CQ	= 2,
	VIRTIO_RDMA_CMD_DESTROY_CQ	= 3,
	VIRTIO_RDMA_CMD_CREATE_PD	= 4,
	VIRTIO_RDMA_CMD_DESTROY_PD	= 5,
	VIRTIO_RDMA_CMD_GET_DMA_MR	= 6,
	VIRTIO_RDMA_CMD_CREATE_MR	= 7,
	VIRTIO_RDMA_CMD_MAP_MR_SG	= 8,
	VIRTIO_RDMA_CMD_REG_USER_MR	= 9,
	VIRTIO_RDMA_CMD_DEREG_MR	= 10,
	VIRTIO_RDMA_CMD_CREATE_QP	= 11,
	VIRTIO_RDMA_CMD_MODIFY_QP	= 12,
	VIRTIO_RDMA_CMD_QUERY_QP	= 13,
	VIRTIO_RDMA_CMD_DESTROY_QP	= 14,
	VIRTIO_RDMA_CMD_QUERY_PKEY	= 15,
	VIRTIO_RDMA_CMD_ADD_GID		= 16,
	VIRTIO_RDMA_CMD_DEL_GID		= 17,
	VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ	= 18,
	/* with VIRTIO_RDMA_F_RINGS, in place of 2, 11 and 18 */
	VIRTIO_RDMA_CMD_CREATE_RING_CQ	= 32,
	/* with VIRTIO_RDMA_F_CQ_RESIZE */
	VIRTIO_RDMA_CMD_RESIZE_CQ	= 33,
	/* with VIRTIO_RDMA_F_RINGS */
	VIRTIO_RDMA_CMD_CREATE_RING_QP	= 34,
	/* with VIRTIO_RDMA_F_SRQ */
	VIRTIO_RDMA_CMD_CREATE_SRQ	= 35,
	VIRTIO_RDMA_CMD_MODIFY_SRQ	= 36,
	VIRTIO_RDMA_CMD_QUERY_SRQ	= 37,
	VIRTIO_RDMA_CMD_DESTROY_SRQ	= 38,
	/* with VIRTIO_RDMA_F_SRQ_RESIZE */
	VIRTIO_RDMA_CMD_RESIZE_SRQ	= 39,
	/* with VIRTIO_RDMA_F_REREG_MR */
	VIRTIO_RDMA_CMD_REREG_MR	= 40,
	/* with VIRTIO_RDMA_F_MW */
	VIRTIO_RDMA_CMD_ALLOC_MW	= 41,
	VIRTIO_RDMA_CMD_DEALLOC_MW	= 42,
	/* with VIRTIO_RDMA_F_MCAST */
	VIRTIO_RDMA_CMD_ATTACH_MCAST	= 44,
	VIRTIO_RDMA_CMD_DETACH_MCAST	= 45,
	/* with VIRTIO_RDMA_F_COUNTERS */
	VIRTIO_RDMA_CMD_QUERY_COUNTERS	= 46,
	/* with VIRTIO_RDMA_F_XRC */
	VIRTIO_RDMA_CMD_ALLOC_XRCD	= 47,
	VIRTIO_RDMA_CMD_DEALLOC_XRCD	= 48,
	/* with VIRTIO_RDMA_F_CQ_MODERATION */
	VIRTIO_RDMA_CMD_MODIFY_CQ	= 49,
};

/* The status byte of a reply */
enum virtio_rdma_status {
	/* done */
	VIRTIO_RDMA_STATUS_OK		= 0,
	/* the device failed in a way of its own */
	VIRTIO_RDMA_STATUS_ERR		= 1,
	/* a field has a value that is not valid here */
	VIRTIO_RDMA_STATUS_INVAL	= 2,
	/* no object has this number */
	VIRTIO_RDMA_STATUS_NO_OBJECT	= 3,
	/* all objects of this kind are taken, or no more are allowed */
	VIRTIO_RDMA_STATUS_NO_RESOURCE	= 4,
	/* another object still uses this one */
	VIRTIO_RDMA_STATUS_BUSY		= 5,
	/* command, QP type or capability not implemented, or not agreed on */
	VIRTIO_RDMA_STATUS_UNSUPPORTED	= 6,
	/* the operator of the device does not allow it */
	VIRTIO_RDMA_STATUS_PERM		= 7,
	/* an address is not memory of the guest */
	VIRTIO_RDMA_STATUS_FAULT	= 8,
	/* request or reply shorter than the command's structures */
	VIRTIO_RDMA_STATUS_LENGTH	= 9,
	/* not allowed in the object's present state */
	VIRTIO_RDMA_STATUS_STATE	= 10,
	/* another device instance of the network has this GID */
	VIRTIO_RDMA_STATUS_EXISTS	= 11,
};

/* QUERY_PORT */

struct virtio_rdma_cmd_query_port {
	__u8   port;
};

/* What the port can do: virtio_rdma_rsp_query_port.port_cap_flags */
#define VIRTIO_RDMA_PORT_CM_SUP		(1U << 16)

/**
 * struct virtio_rdma_rsp_query_port - attributes of a port
 * @state: as PortState of IBA 14.2.5.6: 4 for active
 * @max_mtu: the largest MTU: 1 to 5 for 256, 512, 1024, 2048, 4096 bytes
 * @active_mtu: the MTU in use, in the same numbers
 * @phys_mtu: MTU in bytes
 * @gid_tbl_len: entries of the GID table
 * @port_cap_flags: VIRTIO_RDMA_PORT_CM_SUP
 * @max_msg_sz: largest message in bytes
 * @bad_pkey_cntr: packets dropped for their P_Key
 * @qkey_viol_cntr: packets dropped for their Q_Key
 * @pkey_tbl_len: entries of the P_Key table, 1
 * @active_width: link width: 1, 2, 4, 8, 16 for 1, 4, 8, 12, 2 lanes
 * @active_speed: link speed of a lane: 1, 2, 4, 8, 16, 32, 64, 128, 256 for SDR,
 *	DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR
 * @phys_state: as PortPhysicalState of IBA 14.2.5.6: 5 for link up
 */
struct virtio_rdma_rsp_query_port {
	__u8   state;
	__u8   max_mtu;
	__u8   active_mtu;
	__u8   reserved_03;
	__le32 phys_mtu;
	__le32 gid_tbl_len;
	__le32 port_cap_flags;
	__le32 max_msg_sz;
	__le32 bad_pkey_cntr;
	__le32 qkey_viol_cntr;
	__le16 pkey_tbl_len;
	__u8   active_width;
	__u8   reserved_1f;
	__le16 active_speed;
	__u8   phys_state;
	__u8   reserved_23;
	__le32 reserved[32];
};

/* CREATE_CQ, DESTROY_CQ: CQ number c is virtqueue 1 + c */

struct virtio_rdma_cmd_create_cq {
	__le32 cqe;
};

struct virtio_rdma_rsp_create_cq {
	__le32 cqn;
};

struct virtio_rdma_cmd_destroy_cq {
	__le32 cqn;
};

/* CREATE_PD, DESTROY_PD */

struct virtio_rdma_rsp_create_pd {
	__le32 pdn;
};

struct virtio_rdma_cmd_destroy_pd {
	__le32 pdn;
};

/* Memory regions */

/* Access rights of MRs, windows and QPs */
#define VIRTIO_RDMA_ACCESS_LOCAL_WRITE		(1U << 0)
#define VIRTIO_RDMA_ACCESS_REMOTE_WRITE		(1U << 1)
#define VIRTIO_RDMA_ACCESS_REMOTE_READ		(1U << 2)
#define VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC	(1U << 3)
#define VIRTIO_RDMA_ACCESS_MW_BIND		(1U << 4)
#define VIRTIO_RDMA_ACCESS_ZERO_BASED		(1U << 5)
#define VIRTIO_RDMA_ACCESS_ON_DEMAND		(1U << 6)
#define VIRTIO_RDMA_ACCESS_HUGETLB		(1U << 7)
#define VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL		(1U << 8)
#define VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT	(1U << 9)
#define VIRTIO_RDMA_ACCESS_RELAXED_ORDERING	(1U << 20)

struct virtio_rdma_cmd_get_dma_mr {
	__le32 pdn;
	__le32 access_flags;
};

/* The reply of every command that makes an MR. */
struct virtio_rdma_rsp_mr {
	__le32 mrn;
	__le32 lkey;
	__le32 rkey;
};

/**
 * struct virtio_rdma_cmd_create_mr - create a region for fast registration
 * @pdn: the PD
 * @access_flags: must be 0; access rights come with each REG_MR
 * @max_num_sg: most pages that a REG_MR gives it, whatever their size, at most
 *	max_fast_reg_page_list_len
 *
 * The region is FREE: its keys give access to nothing. The low 8 bits of its
 * keys are the consumer's, the others stay as long as the region.
 */
struct virtio_rdma_cmd_create_mr {
	__le32 pdn;
	__le32 access_flags;
	__le32 max_num_sg;
};

/**
 * struct virtio_rdma_cmd_map_mr_sg - give a CREATE_MR region its pages
 * @mrn: the MR
 * @npages: entries of the page table
 * @start: address by which work requests name the first byte
 * @length: bytes
 * @pages: address of the page table: @npages times a __le64 page address
 */
struct virtio_rdma_cmd_map_mr_sg {
	__le32 mrn;
	__le32 npages;
	__le64 start;
	__le64 length;
	__le64 pages;
};

struct virtio_rdma_rsp_map_mr_sg {
	__le32 npages;
};

/**
 * struct virtio_rdma_cmd_reg_user_mr - register pinned memory
 * @pdn: the PD
 * @access_flags: VIRTIO_RDMA_ACCESS_*
 * @start: address of the first byte in the program; its offset within a page is
 *	the offset of the first byte within the first page
 * @length: bytes
 * @virt_addr: address by which work requests name the first byte (IOVA)
 * @pages: address of the page table: @npages times a __le64 page address, in
 *	one contiguous block that the device reads before it replies
 * @npages: entries of the page table; the pages that [@start, @start + @length)
 *	touches, 0 for no bytes
 * @levels: with VIRTIO_RDMA_F_PAGE_LEVELS, how many levels of lists there are
 *	above the page table, at most VIRTIO_RDMA_MAX_PAGE_LEVELS. Each cuts
 *	what is below it into pages of 512 entries and lists the addresses of
 *	these in order; @pages is the address of the highest, in one contiguous
 *	block. Reserved without the bit.
 * @page_shift: with VIRTIO_RDMA_F_PAGE_SIZES, the binary logarithm of the bytes
 *	of a page: a bit of config.page_size_cap. Reserved without the bit: a
 *	page has 4 KiB.
 */
struct virtio_rdma_cmd_reg_user_mr {
	__le32 pdn;
	__le32 access_flags;
	__le64 start;
	__le64 length;
	__le64 virt_addr;
	__le64 pages;
	__le32 npages;
	__u8   levels;
	__u8   page_shift;
	__u8   reserved_2e[2];
};

/* What REREG_MR replaces */
#define VIRTIO_RDMA_REREG_TRANS		(1U << 0)
#define VIRTIO_RDMA_REREG_PD		(1U << 1)
#define VIRTIO_RDMA_REREG_ACCESS	(1U << 2)

/**
 * struct virtio_rdma_cmd_rereg_mr - replace attributes of an MR of REG_USER_MR
 * @mrn: the MR; its keys stay
 * @flags: VIRTIO_RDMA_REREG_*, one at least
 * @mr: with REREG_PD its @pdn, with REREG_ACCESS its @access_flags, with
 *	REREG_TRANS all else, as for REG_USER_MR; what is not replaced is ignored
 */
struct virtio_rdma_cmd_rereg_mr {
	__le32 mrn;
	__le32 flags;
	struct virtio_rdma_cmd_reg_user_mr mr;
};

struct virtio_rdma_cmd_dereg_mr {
	__le32 mrn;
};

/* ALLOC_MW, DEALLOC_MW (VIRTIO_RDMA_F_MW) */

/* Types of memory windows; type 2 is 2B, bound to a QP */
enum virtio_rdma_mw_type {
	VIRTIO_RDMA_MW_TYPE_1	= 1,
	VIRTIO_RDMA_MW_TYPE_2	= 2,
};

/**
 * struct virtio_rdma_cmd_alloc_mw - create a memory window, not bound yet
 * @pdn: the PD
 * @type: enum virtio_rdma_mw_type
 */
struct virtio_rdma_cmd_alloc_mw {
	__le32 pdn;
	__u8   type;
	__u8   reserved_05[3];
};

/**
 * struct virtio_rdma_rsp_alloc_mw - the window
 * @mwn: its number
 * @rkey: its key, which gives access to nothing before the window is bound. The
 *	low 8 bits change with each BIND_MW, the others stay as long as the
 *	window.
 */
struct virtio_rdma_rsp_alloc_mw {
	__le32 mwn;
	__le32 rkey;
};

struct virtio_rdma_cmd_dealloc_mw {
	__le32 mwn;
};

/* Queue pairs: QP number q is virtqueues 1 + N + 2 * (q - 1) and the next */

/* Types of QPs */
enum virtio_rdma_qp_type {
	VIRTIO_RDMA_QPT_GSI	= 1,
	VIRTIO_RDMA_QPT_RC	= 2,
	VIRTIO_RDMA_QPT_UC	= 3,
	VIRTIO_RDMA_QPT_UD	= 4,
	/* with VIRTIO_RDMA_F_XRC */
	VIRTIO_RDMA_QPT_XRC_INI	= 9,
	VIRTIO_RDMA_QPT_XRC_TGT	= 10,
};

/* Which send work requests make a CQE when they succeed */
enum virtio_rdma_sig_type {
	VIRTIO_RDMA_SIGNAL_ALL_WR	= 0,
	VIRTIO_RDMA_SIGNAL_REQ_WR	= 1,
};

/* virtio_rdma_cmd_create_qp.create_flags: what a UD QP sends to a group does not come back */
#define VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK	(1U << 1)

struct virtio_rdma_cmd_create_qp {
	__le32 pdn;
	__u8   qp_type;
	__u8   sq_sig_type;
	__u8   create_flags;
	__u8   reserved_07;
	__le32 max_send_wr;
	__le32 max_send_sge;
	__le32 send_cqn;
	__le32 max_recv_wr;
	__le32 max_recv_sge;
	__le32 recv_cqn;
	__le32 max_inline_data;
	__le32 reserved[8];
};

struct virtio_rdma_rsp_create_qp {
	__le32 qpn;
};

/* States of a QP */
enum virtio_rdma_qp_state {
	VIRTIO_RDMA_QPS_RESET	= 0,
	VIRTIO_RDMA_QPS_INIT	= 1,
	VIRTIO_RDMA_QPS_RTR	= 2,
	VIRTIO_RDMA_QPS_RTS	= 3,
	VIRTIO_RDMA_QPS_SQD	= 4,
	VIRTIO_RDMA_QPS_SQE	= 5,
	VIRTIO_RDMA_QPS_ERR	= 6,
};

struct virtio_rdma_global_route {
	__u8   dgid[16];
	__le32 flow_label;
	__u8   sgid_index;
	__u8   hop_limit;
	__u8   traffic_class;
	__u8   reserved_17;
};

/* virtio_rdma_ah_attr.ah_flags */
#define VIRTIO_RDMA_AH_GRH	1

struct virtio_rdma_ah_attr {
	struct virtio_rdma_global_route grh;
	__u8   sl;
	__u8   static_rate;
	__u8   port_num;
	__u8   ah_flags;
	__u8   dmac[6];
	__u8   reserved_22[6];
};

struct virtio_rdma_qp_cap {
	__le32 max_send_wr;
	__le32 max_recv_wr;
	__le32 max_send_sge;
	__le32 max_recv_sge;
	__le32 max_inline_data;
};

/* Attributes of a QP; specification, Queue pairs, has their meaning and unit. */
struct virtio_rdma_qp_attr {
	__u8   qp_state;
	__u8   cur_qp_state;
	__u8   path_mtu;
	__u8   path_mig_state;
	__le32 qkey;
	__le32 rq_psn;
	__le32 sq_psn;
	__le32 dest_qp_num;
	__le32 qp_access_flags;
	__le16 pkey_index;
	__le16 alt_pkey_index;
	__u8   en_sqd_async_notify;
	__u8   sq_draining;
	__u8   max_rd_atomic;
	__u8   max_dest_rd_atomic;
	__u8   min_rnr_timer;
	__u8   port_num;
	__u8   timeout;
	__u8   retry_cnt;
	__u8   rnr_retry;
	__u8   alt_port_num;
	__u8   alt_timeout;
	__u8   reserved_27;
	__le32 rate_limit;
	struct virtio_rdma_qp_cap cap;
	struct virtio_rdma_ah_attr ah_attr;
	struct virtio_rdma_ah_attr alt_ah_attr;
};

/* Which attributes MODIFY_QP sets */
#define VIRTIO_RDMA_QP_STATE			(1U << 0)
#define VIRTIO_RDMA_QP_CUR_STATE		(1U << 1)
#define VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY	(1U << 2)
#define VIRTIO_RDMA_QP_ACCESS_FLAGS		(1U << 3)
#define VIRTIO_RDMA_QP_PKEY_INDEX		(1U << 4)
#define VIRTIO_RDMA_QP_PORT			(1U << 5)
#define VIRTIO_RDMA_QP_QKEY			(1U << 6)
#define VIRTIO_RDMA_QP_AV			(1U << 7)
#define VIRTIO_RDMA_QP_PATH_MTU			(1U << 8)
#define VIRTIO_RDMA_QP_TIMEOUT			(1U << 9)
#define VIRTIO_RDMA_QP_RETRY_CNT		(1U << 10)
#define VIRTIO_RDMA_QP_RNR_RETRY		(1U << 11)
#define VIRTIO_RDMA_QP_RQ_PSN			(1U << 12)
#define VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC		(1U << 13)
#define VIRTIO_RDMA_QP_ALT_PATH			(1U << 14)
#define VIRTIO_RDMA_QP_MIN_RNR_TIMER		(1U << 15)
#define VIRTIO_RDMA_QP_SQ_PSN			(1U << 16)
#define VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC	(1U << 17)
#define VIRTIO_RDMA_QP_PATH_MIG_STATE		(1U << 18)
#define VIRTIO_RDMA_QP_CAP			(1U << 19)
#define VIRTIO_RDMA_QP_DEST_QPN			(1U << 20)
#define VIRTIO_RDMA_QP_RATE_LIMIT		(1U << 25)

struct virtio_rdma_cmd_modify_qp {
	__le32 qpn;
	__le32 attr_mask;
	struct virtio_rdma_qp_attr attr;
};

struct virtio_rdma_cmd_query_qp {
	__le32 qpn;
	__le32 attr_mask;
};

struct virtio_rdma_rsp_query_qp {
	struct virtio_rdma_qp_attr attr;
};

struct virtio_rdma_cmd_destroy_qp {
	__le32 qpn;
};

/* P_Keys and GIDs */

struct virtio_rdma_cmd_query_pkey {
	__le32 port;
	__le16 index;
	__le16 reserved_06;
};

struct virtio_rdma_rsp_query_pkey {
	__le16 pkey;
};

/* Types of GIDs; a device refuses all but UDP encapsulation, which is RoCE v2 */
enum virtio_rdma_gid_type {
	VIRTIO_RDMA_GID_TYPE_IB			= 0,
	VIRTIO_RDMA_GID_TYPE_ROCE		= 1,
	VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP	= 2,
};

/* The vlan_id of a GID that belongs to no VLAN */
#define VIRTIO_RDMA_NO_VLAN		0xffff

/**
 * struct virtio_rdma_cmd_add_gid - set an entry of the GID table
 * @gid: the GID
 * @gid_type: enum virtio_rdma_gid_type
 * @index: of the entry
 * @vlan_id: the VLAN that it belongs to (IEEE 802.1Q), 0 to 4094, or
 *	VIRTIO_RDMA_NO_VLAN; reserved without VIRTIO_RDMA_F_VLAN
 * @port_num: port, 1
 */
struct virtio_rdma_cmd_add_gid {
	__u8   gid[16];
	__le32 gid_type;
	__le16 index;
	__le16 vlan_id;
	__le32 port_num;
};

struct virtio_rdma_cmd_del_gid {
	__le16 index;
	__le16 reserved_02;
	__le32 port;
};

/* ATTACH_MCAST, DETACH_MCAST (VIRTIO_RDMA_F_MCAST) */

/* The destination QP number of a datagram to a group (IBA 9.2.7) */
#define VIRTIO_RDMA_MCAST_QPN		0xffffff

/**
 * struct virtio_rdma_cmd_mcast - attach a QP to a multicast group, or detach it
 * @gid: the group: ff00::/8, or an IPv4 group as ::ffff:a.b.c.d
 * @qpn: the QP, of type UD
 * @lid: must be 0; RoCE has no LIDs
 */
struct virtio_rdma_cmd_mcast {
	__u8   gid[16];
	__le32 qpn;
	__le16 lid;
	__le16 reserved_16;
};

/* QUERY_COUNTERS (VIRTIO_RDMA_F_COUNTERS) */

struct virtio_rdma_cmd_query_counters {
	__le32 port;
};

/**
 * struct virtio_rdma_rsp_query_counters - what a port has sent and received
 * @xmit_data: bytes of payload sent
 * @rcv_data: bytes of payload received
 * @xmit_packets: packets sent: a message counts as many as the path's MTU
 *	would cut it into
 * @rcv_packets: packets received
 * @multicast_xmit_packets: of @xmit_packets, those to a multicast group
 * @multicast_rcv_packets: of @rcv_packets, those to a multicast group
 * @xmit_discards: datagrams and unreliable messages that reached nobody
 *
 * All count from the start of the device instance and wrap at 2^64; a reset of
 * the device does not clear them.
 */
struct virtio_rdma_rsp_query_counters {
	__le64 xmit_data;
	__le64 rcv_data;
	__le64 xmit_packets;
	__le64 rcv_packets;
	__le64 multicast_xmit_packets;
	__le64 multicast_rcv_packets;
	__le64 xmit_discards;
	__le64 reserved[9];
};

/* REQ_NOTIFY_CQ */

#define VIRTIO_RDMA_NOTIFY_SOLICITED		(1U << 0)
#define VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION	(1U << 1)

struct virtio_rdma_cmd_req_notify {
	__le32 cqn;
	__le32 flags;
};

/* CREATE_RING_CQ, RESIZE_CQ, CREATE_RING_QP (VIRTIO_RDMA_F_RINGS) */

/**
 * struct virtio_rdma_ring_region - the memory that holds an object's rings
 * @pages: address of the page table: @npages times a __le64 page address, in
 *	one contiguous block that the device reads before it replies
 * @npages: entries of the page table
 *
 * The region begins at the first byte of its first page. The driver keeps it
 * in memory until the object is destroyed, or the region replaced.
 */
struct virtio_rdma_ring_region {
	__le64 pages;
	__le32 npages;
	__le32 reserved_0c;
};

/**
 * struct virtio_rdma_cmd_create_ring_cq - create a CQ
 * @region: struct virtio_rdma_cq_ring, then @cqe CQEs; zeroed
 * @cqe: number of CQEs, a power of two
 * @comp_vector: completion event virtqueue, 0 to num_comp_vectors - 1
 *
 * The reply is struct virtio_rdma_rsp_create_cq.
 */
struct virtio_rdma_cmd_create_ring_cq {
	struct virtio_rdma_ring_region region;
	__le32 cqe;
	__le32 comp_vector;
};

/**
 * struct virtio_rdma_cmd_resize_cq - move a CQ to another ring
 * @region: as for CREATE_RING_CQ
 * @cqe: number of CQEs of the new ring, a power of two
 * @cqn: the CQ
 */
struct virtio_rdma_cmd_resize_cq {
	struct virtio_rdma_ring_region region;
	__le32 cqe;
	__le32 cqn;
};

/**
 * struct virtio_rdma_rsp_resize_cq - the ring is in use
 * @moved: CQEs that were not consumed and stand in the new ring, from index 0
 */
struct virtio_rdma_rsp_resize_cq {
	__le32 moved;
};

/**
 * struct virtio_rdma_ring_shape - where a send or receive ring lies
 * @depth: number of entries, a power of two; 0: there is no such ring
 * @stride: bytes of an entry, a power of two, 32 to 4096
 * @offset: of the first entry in the region, a multiple of @stride
 */
struct virtio_rdma_ring_shape {
	__le32 depth;
	__le32 stride;
	__le32 offset;
	__le32 reserved_0c;
};

/* virtio_rdma_cmd_create_ring_qp.flags: the kernel owns the rings */
#define VIRTIO_RDMA_QP_PRIVILEGED	(1U << 0)

/**
 * struct virtio_rdma_cmd_create_ring_qp - create a QP
 * @base: as for CREATE_QP
 * @flags: VIRTIO_RDMA_QP_PRIVILEGED
 * @region: struct virtio_rdma_qp_ring, then the entries; zeroed
 * @sq: the send ring; its depth is at least @base.max_send_wr
 * @rq: the receive ring; its depth is at least @base.max_recv_wr
 * @srqn: the SRQ that the QP receives from, in place of a receive ring; 0: none
 *	(VIRTIO_RDMA_F_SRQ)
 * @xrcdn: the XRCD of an XRC_TGT QP, which has nothing else but its type;
 *	reserved for other types (VIRTIO_RDMA_F_XRC)
 *
 * The reply is struct virtio_rdma_rsp_create_qp.
 */
struct virtio_rdma_cmd_create_ring_qp {
	struct virtio_rdma_cmd_create_qp base;
	__le32 flags;
	struct virtio_rdma_ring_region region;
	struct virtio_rdma_ring_shape sq;
	struct virtio_rdma_ring_shape rq;
	__le32 srqn;
	__le32 xrcdn;
	__le32 reserved[6];
};

/* CREATE_SRQ, MODIFY_SRQ, QUERY_SRQ, DESTROY_SRQ, RESIZE_SRQ (VIRTIO_RDMA_F_SRQ) */

/**
 * struct virtio_rdma_cmd_create_srq - create a shared receive queue
 * @region: struct virtio_rdma_srq_ring, then the entries; zeroed
 * @ring: the ring; its depth is not 0
 * @pdn: the PD, by which the keys of work requests are checked
 * @max_sge: most SGEs of a work request
 * @xrcdn: the XRCD, of an SRQ for XRC; 0: of any other (VIRTIO_RDMA_F_XRC)
 * @cqn: the CQ of its completions, of an SRQ for XRC
 */
struct virtio_rdma_cmd_create_srq {
	struct virtio_rdma_ring_region region;
	struct virtio_rdma_ring_shape ring;
	__le32 pdn;
	__le32 max_sge;
	__le32 xrcdn;
	__le32 cqn;
	__le32 reserved[4];
};

/**
 * struct virtio_rdma_rsp_create_srq - the SRQ
 * @srqn: its number, 1 to max_srq
 */
struct virtio_rdma_rsp_create_srq {
	__le32 srqn;
};

/**
 * struct virtio_rdma_cmd_modify_srq - arm an SRQ
 * @srqn: the SRQ
 * @srq_limit: SRQ_LIMIT_REACHED is raised, once, when fewer work requests than
 *	this wait; 0: never; at most the depth of the ring
 */
struct virtio_rdma_cmd_modify_srq {
	__le32 srqn;
	__le32 srq_limit;
};

struct virtio_rdma_cmd_query_srq {
	__le32 srqn;
};

/**
 * struct virtio_rdma_rsp_query_srq - attributes of an SRQ
 * @max_wr: depth of the ring
 * @max_sge: as it was created
 * @srq_limit: 0 if the SRQ is not armed, or no longer
 */
struct virtio_rdma_rsp_query_srq {
	__le32 max_wr;
	__le32 max_sge;
	__le32 srq_limit;
	__le32 reserved_0c;
};

struct virtio_rdma_cmd_destroy_srq {
	__le32 srqn;
};

/**
 * struct virtio_rdma_cmd_resize_srq - move an SRQ to another ring
 * @region: as for CREATE_SRQ
 * @ring: the new ring; its depth is not 0
 * @srqn: the SRQ
 * @reserved_24: zero
 */
struct virtio_rdma_cmd_resize_srq {
	struct virtio_rdma_ring_region region;
	struct virtio_rdma_ring_shape ring;
	__le32 srqn;
	__le32 reserved_24;
};

/**
 * struct virtio_rdma_rsp_resize_srq - the ring is in use
 * @moved: work requests that were not taken and stand in the new ring, from
 *	index 0; the producer in its head is the same number
 */
struct virtio_rdma_rsp_resize_srq {
	__le32 moved;
};

/* ALLOC_XRCD, DEALLOC_XRCD (VIRTIO_RDMA_F_XRC) */

/**
 * struct virtio_rdma_rsp_alloc_xrcd - an extended connection domain
 * @xrcdn: its number, not 0
 */
struct virtio_rdma_rsp_alloc_xrcd {
	__le32 xrcdn;
};

struct virtio_rdma_cmd_dealloc_xrcd {
	__le32 xrcdn;
};

/* MODIFY_CQ (VIRTIO_RDMA_F_CQ_MODERATION) */

/**
 * struct virtio_rdma_cmd_modify_cq - hold back the completion events of a CQ
 * @cqn: the CQ
 * @cq_count: completions until an event
 * @cq_period: microseconds until an event, if there are fewer
 *
 * If either is 0, no event is held back.
 */
struct virtio_rdma_cmd_modify_cq {
	__le32 cqn;
	__le16 cq_count;
	__le16 cq_period;
};

/* ---- Send and receive virtqueues --------------------------------------- */

/* What a send work request asks for */
enum virtio_rdma_wr_opcode {
	VIRTIO_RDMA_WR_RDMA_WRITE		= 0,
	VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM	= 1,
	VIRTIO_RDMA_WR_SEND			= 2,
	VIRTIO_RDMA_WR_SEND_WITH_IMM		= 3,
	VIRTIO_RDMA_WR_RDMA_READ		= 4,
	VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP	= 5,
	VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD	= 6,
	VIRTIO_RDMA_WR_LOCAL_INV		= 7,
	VIRTIO_RDMA_WR_BIND_MW			= 8,
	VIRTIO_RDMA_WR_SEND_WITH_INV		= 9,
	VIRTIO_RDMA_WR_RDMA_READ_WITH_INV	= 11,
	VIRTIO_RDMA_WR_FLUSH			= 14,
	VIRTIO_RDMA_WR_ATOMIC_WRITE		= 15,
	VIRTIO_RDMA_WR_REG_MR			= 0x20,
};

/* Flags of a send work request */
#define VIRTIO_RDMA_SEND_FENCE		(1U << 0)
#define VIRTIO_RDMA_SEND_SIGNALED	(1U << 1)
#define VIRTIO_RDMA_SEND_SOLICITED	(1U << 2)
#define VIRTIO_RDMA_SEND_INLINE		(1U << 3)
#define VIRTIO_RDMA_SEND_IP_CSUM	(1U << 4)

struct virtio_rdma_sge {
	__le64 addr;
	__le32 length;
	__le32 lkey;
};

/**
 * struct virtio_rdma_av - address vector of an unreliable datagram
 * @port: port, 1
 * @pdn: PD of the address handle
 * @sl_tclass_flowlabel: SL in bits 31:28, traffic class in 27:20, flow label
 *	in 19:0
 * @dgid: destination GID
 * @gid_index: index of the source GID
 * @static_rate: as IBA's static rate; a hint
 * @hop_limit: hop limit or TTL
 * @dmac: destination MAC address
 */
struct virtio_rdma_av {
	__le32 port;
	__le32 pdn;
	__le32 sl_tclass_flowlabel;
	__u8   dgid[16];
	__u8   gid_index;
	__u8   static_rate;
	__u8   hop_limit;
	__u8   dmac[6];
	__u8   reserved[7];
};

/**
 * struct virtio_rdma_sq_wqe - header of a send work request
 * @num_sge: number of struct virtio_rdma_sge that follow the header
 * @send_flags: VIRTIO_RDMA_SEND_*
 * @opcode: enum virtio_rdma_wr_opcode
 * @wr_id: opaque to the device, comes back in the CQE
 * @imm_data: immediate data, network byte order
 * @invalidate_rkey: key to invalidate
 * @wr.reg: of REG_MR, as in struct virtio_rdma_ring_reg_wqe; @wr.reg.mrn is for
 *	logs only, @wr.reg.key names the region
 *
 * Header and SGEs are the device-readable bytes of one descriptor chain.
 */
struct virtio_rdma_sq_wqe {
	__le32 num_sge;
	__le32 send_flags;
	__le32 opcode;
	__le32 reserved_0c;
	__le64 wr_id;
	union {
		__be32 imm_data;
		__le32 invalidate_rkey;
	} ex;
	__le32 reserved_1c;
	union {
		struct {
			__le64 remote_addr;
			__le32 rkey;
			__le32 reserved_0c;
		} rdma;
		struct {
			__le64 remote_addr;
			__le64 compare_add;
			__le64 swap;
			__le32 rkey;
			__le32 reserved_1c;
		} atomic;
		struct {
			__le32 remote_qpn;
			__le32 remote_qkey;
			struct virtio_rdma_av av;
		} ud;
		struct {
			__le32 mrn;
			__le32 key;
			__le32 access;
			__le32 npages;
			__le64 pages;
			__le64 iova;
			__le64 length;
			__u8   page_shift;
			__u8   reserved_29[7];
		} reg;
		__u8 raw[56];
	} wr;
};

/**
 * struct virtio_rdma_rq_wqe - header of a receive work request
 * @num_sge: number of struct virtio_rdma_sge that follow the header
 * @wr_id: opaque to the device, comes back in the CQE
 */
struct virtio_rdma_rq_wqe {
	__le32 num_sge;
	__le32 reserved_04;
	__le64 wr_id;
};

/* ---- Completion virtqueues --------------------------------------------- */

/* How a work request ended */
enum virtio_rdma_wc_status {
	VIRTIO_RDMA_WC_SUCCESS			= 0,
	VIRTIO_RDMA_WC_LOC_LEN_ERR		= 1,
	VIRTIO_RDMA_WC_LOC_QP_OP_ERR		= 2,
	VIRTIO_RDMA_WC_LOC_EEC_OP_ERR		= 3,
	VIRTIO_RDMA_WC_LOC_PROT_ERR		= 4,
	VIRTIO_RDMA_WC_WR_FLUSH_ERR		= 5,
	VIRTIO_RDMA_WC_MW_BIND_ERR		= 6,
	VIRTIO_RDMA_WC_BAD_RESP_ERR		= 7,
	VIRTIO_RDMA_WC_LOC_ACCESS_ERR		= 8,
	VIRTIO_RDMA_WC_REM_INV_REQ_ERR		= 9,
	VIRTIO_RDMA_WC_REM_ACCESS_ERR		= 10,
	VIRTIO_RDMA_WC_REM_OP_ERR		= 11,
	VIRTIO_RDMA_WC_RETRY_EXC_ERR		= 12,
	VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR	= 13,
	VIRTIO_RDMA_WC_LOC_RDD_VIOL_ERR		= 14,
	VIRTIO_RDMA_WC_REM_INV_RD_REQ_ERR	= 15,
	VIRTIO_RDMA_WC_REM_ABORT_ERR		= 16,
	VIRTIO_RDMA_WC_INV_EECN_ERR		= 17,
	VIRTIO_RDMA_WC_INV_EEC_STATE_ERR	= 18,
	VIRTIO_RDMA_WC_FATAL_ERR		= 19,
	VIRTIO_RDMA_WC_RESP_TIMEOUT_ERR		= 20,
	VIRTIO_RDMA_WC_GENERAL_ERR		= 21,
};

/* What completed; bit 7 says that it is a receive work request */
enum virtio_rdma_wc_opcode {
	VIRTIO_RDMA_WC_SEND			= 0,
	VIRTIO_RDMA_WC_RDMA_WRITE		= 1,
	VIRTIO_RDMA_WC_RDMA_READ		= 2,
	VIRTIO_RDMA_WC_COMP_SWAP		= 3,
	VIRTIO_RDMA_WC_FETCH_ADD		= 4,
	VIRTIO_RDMA_WC_BIND_MW			= 5,
	VIRTIO_RDMA_WC_LOCAL_INV		= 6,
	VIRTIO_RDMA_WC_FLUSH			= 8,
	VIRTIO_RDMA_WC_ATOMIC_WRITE		= 9,
	VIRTIO_RDMA_WC_REG_MR			= 64,
	VIRTIO_RDMA_WC_RECV			= 128,
	VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM	= 129,
};

/* Which fields of a CQE have a meaning */
#define VIRTIO_RDMA_WC_GRH		(1U << 0)
#define VIRTIO_RDMA_WC_WITH_IMM		(1U << 1)
#define VIRTIO_RDMA_WC_WITH_INVALIDATE	(1U << 2)
#define VIRTIO_RDMA_WC_IP_CSUM_OK	(1U << 3)
#define VIRTIO_RDMA_WC_WITH_VLAN	(1U << 5)

/**
 * struct virtio_rdma_cqe - a completion
 * @wr_id: of the work request
 * @status: enum virtio_rdma_wc_status
 * @opcode: enum virtio_rdma_wc_opcode, valid whatever the status is
 * @vlan_id: the VLAN that a datagram came by (VIRTIO_RDMA_WC_WITH_VLAN)
 * @vendor_err: a number that says more of an error, for logs only
 * @byte_len: bytes received; for READ and atomics, bytes read
 * @imm_data: immediate data, network byte order (VIRTIO_RDMA_WC_WITH_IMM)
 * @invalidate_rkey: key that was invalidated (VIRTIO_RDMA_WC_WITH_INVALIDATE)
 * @qp_num: the QP
 * @src_qp: the sender's QP (UD, GSI)
 * @wc_flags: VIRTIO_RDMA_WC_*
 * @pkey_index: index of the P_Key (GSI)
 * @sl: service level (UD, GSI)
 * @port_num: port (UD, GSI)
 *
 * The driver posts descriptors of this size to a completion queue, the device
 * uses one for each completion.
 */
struct virtio_rdma_cqe {
	__le64 wr_id;
	__u8   status;
	__u8   opcode;
	__le16 vlan_id;
	__le32 vendor_err;
	__le32 byte_len;
	union {
		__be32 imm_data;
		__le32 invalidate_rkey;
	} ex;
	__le32 qp_num;
	__le32 src_qp;
	__le32 wc_flags;
	__le16 pkey_index;
	__u8   sl;
	__u8   port_num;
};

/* ---- Event virtqueue (VIRTIO_RDMA_F_EVENTS) ---------------------------- */

/* Asynchronous events */
enum virtio_rdma_event_type {
	VIRTIO_RDMA_EVENT_CQ_ERR		= 0,
	VIRTIO_RDMA_EVENT_QP_FATAL		= 1,
	VIRTIO_RDMA_EVENT_QP_REQ_ERR		= 2,
	VIRTIO_RDMA_EVENT_QP_ACCESS_ERR		= 3,
	VIRTIO_RDMA_EVENT_COMM_EST		= 4,
	VIRTIO_RDMA_EVENT_SQ_DRAINED		= 5,
	VIRTIO_RDMA_EVENT_DEVICE_FATAL		= 8,
	VIRTIO_RDMA_EVENT_PORT_ACTIVE		= 9,
	VIRTIO_RDMA_EVENT_PORT_ERR		= 10,
	VIRTIO_RDMA_EVENT_SRQ_ERR		= 14,
	VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED	= 15,
	VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED	= 16,
};

/**
 * struct virtio_rdma_event - an asynchronous event
 * @event: enum virtio_rdma_event_type
 * @handle: CQ number, QP number, SRQ number or port that it concerns
 *
 * The driver posts descriptors of this size to the event queue.
 */
struct virtio_rdma_event {
	__le32 event;
	__le32 handle;
};

/* ---- Rings (VIRTIO_RDMA_F_RINGS) --------------------------------------- */

/**
 * struct virtio_rdma_qp_ring - head of the region of a QP
 * @sq_producer: number of send work requests posted since RESET, modulo 2^32;
 *	written by the driver or the program with release semantics
 * @rq_producer: the same for receive work requests
 * @sq_wake: written by the device: not 0 if it does not look at @sq_producer
 *	and wants a doorbell; the producer may clear it and then ring
 * @rq_wake: the same for @rq_producer
 *
 * Each group stands in a cache line of its own. Entry i of a ring is at
 * offset + (i modulo depth) * stride of the region.
 */
struct virtio_rdma_qp_ring {
	__le32 sq_producer;
	__u8   reserved_04[60];
	__le32 rq_producer;
	__u8   reserved_44[60];
	__le32 sq_wake;
	__le32 rq_wake;
	__u8   reserved_88[120];
};

/**
 * struct virtio_rdma_srq_ring - head of the region of an SRQ
 * @producer: number of work requests posted, modulo 2^32; written by the driver
 *	or the program with release semantics
 * @consumer: number of work requests taken, modulo 2^32; written by the device
 *	with release semantics: it has copied them, and their places are free
 * @wake: written by the device: not 0 if a QP waits for a work request and the
 *	device wants a doorbell; the producer may clear it and then ring
 *
 * Each stands in a cache line of its own. Entry i is at offset +
 * (i modulo depth) * stride of the region.
 */
struct virtio_rdma_srq_ring {
	__le32 producer;
	__u8   reserved_04[60];
	__le32 consumer;
	__u8   reserved_44[60];
	__le32 wake;
	__u8   reserved_84[124];
};

/**
 * struct virtio_rdma_cq_ring - head of the region of a CQ
 * @consumer: number of CQEs taken, modulo 2^32; written by the driver or the
 *	program with release semantics
 * @closed: written by a driver to the ring of a program: not 0 when no more CQEs
 *	come, because the device failed or is taken away; no concern of the
 *	device
 * @arm_next: a number that the driver or the program changes to ask for an
 *	event at the next CQE
 * @arm_solicited: the same for the next CQE that is solicited or an error
 *
 * What a consumer writes at each poll and what a device reads after each CQE
 * stand in cache lines of their own. The CQEs follow: CQE i is at offset
 * 128 + (i modulo depth) * 64.
 */
struct virtio_rdma_cq_ring {
	__le32 consumer;
	__le32 closed;
	__u8   reserved_08[56];
	__le32 arm_next;
	__le32 arm_solicited;
	__u8   reserved_48[56];
};

/**
 * struct virtio_rdma_ring_sq_wqe - send work request of an RC or UC QP
 * @wr_id: opaque to the device, comes back in the CQE
 * @opcode: enum virtio_rdma_wr_opcode
 * @num_sge: number of struct virtio_rdma_sge that follow; 0 with SEND_INLINE
 * @send_flags: VIRTIO_RDMA_SEND_*
 * @ex: immediate data, network byte order, or the key to invalidate
 * @inline_len: bytes of data that follow, with SEND_INLINE
 * @rkey: key of the remote side (RDMA, atomics)
 * @remote_addr: address of the remote side (RDMA, atomics)
 * @compare_add: operand of an atomic; what an ATOMIC_WRITE without SGEs writes,
 *	in the order of memory
 * @swap: operand of compare and swap
 */
struct virtio_rdma_ring_sq_wqe {
	__le64 wr_id;
	__u8   opcode;
	__u8   num_sge;
	__le16 send_flags;
	union {
		__be32 imm_data;
		__le32 invalidate_rkey;
	} ex;
	__le16 inline_len;
	__le16 reserved_12;
	__le32 rkey;
	__le64 remote_addr;
	__le64 compare_add;
	__le64 swap;
};

/**
 * struct virtio_rdma_ring_xrc_wqe - send work request of an XRC_INI QP
 * @base: as of an RC QP
 * @remote_srqn: the SRQ at the other end that the message is for
 */
struct virtio_rdma_ring_xrc_wqe {
	struct virtio_rdma_ring_sq_wqe base;
	__le32 remote_srqn;
	__u8   reserved_34[12];
};

/**
 * struct virtio_rdma_ring_reg_wqe - REG_MR in the ring of a privileged QP
 * @wr_id: opaque to the device, comes back in the CQE
 * @opcode: VIRTIO_RDMA_WR_REG_MR
 * @num_sge: must be 0
 * @send_flags: VIRTIO_RDMA_SEND_*
 * @access: VIRTIO_RDMA_ACCESS_*
 * @npages: entries of the page list: the pages that [@iova, @iova + @length)
 *	touches
 * @page_shift: log2 of the bytes of a page: a bit of page_size_cap
 * @key: the new key of the region
 * @iova: address by which work requests name the first byte; its offset within
 *	a page is the offset of the first byte within the first page
 * @pages: address of the page list: @npages times a __le64 page address, in one
 *	contiguous block that the device reads before the work request completes
 * @length: bytes
 */
struct virtio_rdma_ring_reg_wqe {
	__le64 wr_id;
	__u8   opcode;
	__u8   num_sge;
	__le16 send_flags;
	__le32 access;
	__le16 npages;
	__u8   page_shift;
	__u8   reserved_13;
	__le32 key;
	__le64 iova;
	__le64 pages;
	__le64 length;
};

/**
 * struct virtio_rdma_ring_bind_wqe - BIND_MW in the ring of an RC or UC QP
 * @wr_id: opaque to the device, comes back in the CQE
 * @opcode: VIRTIO_RDMA_WR_BIND_MW
 * @num_sge: must be 0
 * @send_flags: VIRTIO_RDMA_SEND_*
 * @access: VIRTIO_RDMA_ACCESS_* of those who have the new key; with
 *	ZERO_BASED (type 2) they name the first byte 0
 * @mw_rkey: key of the window; the low 8 bits do not count
 * @new_rkey: its low 8 bits are those of the window's key from now on, whose
 *	upper 24 bits stay those of @mw_rkey
 * @addr: address of the first byte in the MR
 * @length: bytes; 0 takes the window from its MR (type 1)
 * @lkey: key of the MR; of no account if @length is 0
 * @reserved_2c: zero
 */
struct virtio_rdma_ring_bind_wqe {
	__le64 wr_id;
	__u8   opcode;
	__u8   num_sge;
	__le16 send_flags;
	__le32 access;
	__le32 mw_rkey;
	__le32 new_rkey;
	__le64 addr;
	__le64 length;
	__le32 lkey;
	__le32 reserved_2c;
};

/* What a FLUSH is to have done */
#define VIRTIO_RDMA_FLUSH_GLOBAL	(1U << 0)
#define VIRTIO_RDMA_FLUSH_PERSISTENT	(1U << 1)

/* Which memory a FLUSH is for */
enum virtio_rdma_flush_level {
	VIRTIO_RDMA_FLUSH_RANGE	= 0,
	VIRTIO_RDMA_FLUSH_MR	= 1,
};

/**
 * struct virtio_rdma_ring_flush_wqe - FLUSH in the ring of an RC QP
 * @wr_id: opaque to the device, comes back in the CQE
 * @opcode: VIRTIO_RDMA_WR_FLUSH
 * @num_sge: must be 0
 * @send_flags: VIRTIO_RDMA_SEND_*
 * @type: VIRTIO_RDMA_FLUSH_GLOBAL, VIRTIO_RDMA_FLUSH_PERSISTENT or both
 * @level: enum virtio_rdma_flush_level
 * @reserved_0e: zero
 * @reserved_10: zero
 * @rkey: key of the remote side
 * @remote_addr: address of the first byte there; of no account with FLUSH_MR
 * @length: bytes, less than 2^32; of no account with FLUSH_MR
 * @reserved_28: zero
 */
struct virtio_rdma_ring_flush_wqe {
	__le64 wr_id;
	__u8   opcode;
	__u8   num_sge;
	__le16 send_flags;
	__u8   type;
	__u8   level;
	__le16 reserved_0e;
	__le32 reserved_10;
	__le32 rkey;
	__le64 remote_addr;
	__le64 length;
	__le64 reserved_28;
};

/**
 * struct virtio_rdma_ring_ud_wqe - send work request of a UD or GSI QP
 * @wr_id: opaque to the device, comes back in the CQE
 * @opcode: enum virtio_rdma_wr_opcode
 * @num_sge: number of struct virtio_rdma_sge that follow; 0 with SEND_INLINE
 * @send_flags: VIRTIO_RDMA_SEND_*
 * @ex: immediate data, network byte order
 * @inline_len: bytes of data that follow, with SEND_INLINE
 * @remote_qpn: destination QP
 * @remote_qkey: Q_Key
 * @av: destination
 */
struct virtio_rdma_ring_ud_wqe {
	__le64 wr_id;
	__u8   opcode;
	__u8   num_sge;
	__le16 send_flags;
	union {
		__be32 imm_data;
		__le32 invalidate_rkey;
	} ex;
	__le16 inline_len;
	__le16 reserved_12;
	__le32 remote_qpn;
	__le32 remote_qkey;
	struct virtio_rdma_av av;
	__u8   reserved_48[8];
};

/* A receive work request is a struct virtio_rdma_rq_wqe and its SGEs. */

/**
 * struct virtio_rdma_ring_cqe - a completion
 * @wr_id: of the work request
 * @status: enum virtio_rdma_wc_status
 * @opcode: enum virtio_rdma_wc_opcode, valid whatever the status is
 * @sl: service level (UD, GSI)
 * @port_num: port (UD, GSI)
 * @vendor_err: a number that says more of an error, for logs only
 * @byte_len: bytes received; for READ and atomics, bytes read
 * @ex: immediate data, network byte order, or the key that was invalidated
 * @qp_num: the QP
 * @src_qp: the sender's QP (UD, GSI)
 * @wc_flags: VIRTIO_RDMA_WC_*
 * @pkey_index: index of the P_Key (GSI)
 * @vlan_id: the VLAN that a datagram came by (VIRTIO_RDMA_WC_WITH_VLAN)
 * @wqe_index: index of the work request in its ring, modulo 2^32: what the
 *	producer was before it was posted; the ring is that of the SRQ if it
 *	came from there
 * @srqn: the SRQ of a receive of an XRC_TGT QP; 0 otherwise
 *	(VIRTIO_RDMA_F_XRC)
 * @timestamp: nanoseconds of the device's clock, 0 if it keeps none
 * @lap: written last, with release semantics: i / depth + 1 modulo 2^32 of
 *	CQE i, where i counts modulo 2^32, so that a consumer need not read
 *	anything else to find it
 */
struct virtio_rdma_ring_cqe {
	__le64 wr_id;
	__u8   status;
	__u8   opcode;
	__u8   sl;
	__u8   port_num;
	__le32 vendor_err;
	__le32 byte_len;
	union {
		__be32 imm_data;
		__le32 invalidate_rkey;
	} ex;
	__le32 qp_num;
	__le32 src_qp;
	__le32 wc_flags;
	__le16 pkey_index;
	__le16 vlan_id;
	__le32 wqe_index;
	__le32 srqn;
	__le64 timestamp;
	__le32 reserved_38;
	__le32 lap;
};

/* Which ring a doorbell is for. */
enum virtio_rdma_doorbell_queue {
	VIRTIO_RDMA_DOORBELL_SQ		= 0,
	VIRTIO_RDMA_DOORBELL_RQ		= 1,
	VIRTIO_RDMA_DOORBELL_SRQ	= 2,
};

/**
 * struct virtio_rdma_doorbell - a doorbell; a buffer holds one or several
 * @number: QP number; SRQ number if @queue is VIRTIO_RDMA_DOORBELL_SRQ
 * @queue: enum virtio_rdma_doorbell_queue
 */
struct virtio_rdma_doorbell {
	__le32 number;
	__le32 queue;
};

/**
 * struct virtio_rdma_comp_event - an entry of a completion event virtqueue
 * @cqn: the CQ
 * @reserved_04: zero
 */
struct virtio_rdma_comp_event {
	__le32 cqn;
	__le32 reserved_04;
};

#endif /* _UAPI_LINUX_VIRTIO_RDMA_H */
