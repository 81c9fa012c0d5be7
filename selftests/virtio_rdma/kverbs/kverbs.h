/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the tests of verbs in the kernel share. All of them are of one port in
 * loopback. What a test makes goes when it ends, in the reverse order.
 */
#ifndef KVERBS_H
#define KVERBS_H

#include <kunit/test.h>
#include <linux/completion.h>
#include <linux/scatterlist.h>
#include <rdma/ib_verbs.h>

/* Bounds a wait for an event that never comes; others take less than a hundredth of it. */
#define KV_HANG		(60 * HZ)

/* Bytes of a message whose length does not matter. */
#define KV_LEN		256

/* Work requests of a queue. */
#define KV_DEPTH	32
/* Bytes of inline data, where a QP has any. */
#define KV_INLINE 100

/* The Q_Key of datagrams. */
#define KV_QKEY		0x11223344

/* How many messages a test sends that sends many. */
extern unsigned int kv_rounds;

/**
 * struct kv - what every test has
 * @dev: the device
 * @pd: a PD
 * @ah: the way to the port itself
 * @gid: a GID of RoCE v2, of an IPv4 address
 * @mac: the MAC address that belongs to it
 */
struct kv {
	struct ib_device *dev;
	struct ib_pd *pd;
	struct ib_ah *ah;
	const struct ib_gid_attr *gid;
	u8 mac[ETH_ALEN];
};

/**
 * struct kv_buf - memory that the device reaches
 * @dev: the device
 * @data: the memory
 * @addr: its address for the device
 * @len: bytes
 */
struct kv_buf {
	struct ib_device *dev;
	u8 *data;
	u64 addr;
	size_t len;
};

/**
 * struct kv_remote - memory as a peer names it
 * @addr: of the first byte
 * @rkey: its key
 */
struct kv_remote {
	u64 addr;
	u32 rkey;
};

/**
 * struct kv_qp - a QP
 * @kv: what the test has
 * @qp: the QP
 * @cq: of its sends and its receives
 * @events: those that it was told of, a bit for each enum ib_event_type
 * @event: it was told of one
 * @cannot_sleep: it was told of one in a context that cannot sleep
 */
struct kv_qp {
	struct kv *kv;
	struct ib_qp *qp;
	struct ib_cq *cq;
	unsigned long events;
	struct completion event;
	bool cannot_sleep;
};

/**
 * struct kv_op - a send work request, whatever its opcode
 * @id: its name
 * @opcode: what it does
 * @flags: enum ib_send_flags
 * @sge: local memory
 * @num_sge: how many
 * @imm_data: immediate data
 * @inv: the key to invalidate
 * @remote_addr: of the first byte there
 * @rkey: of the memory there
 * @compare_add: operand of an atomic
 * @swap: operand of compare and swap
 */
struct kv_op {
	u64 id;
	enum ib_wr_opcode opcode;
	int flags;
	struct ib_sge *sge;
	int num_sge;
	__be32 imm_data;
	u32 inv;
	u64 remote_addr;
	u32 rkey;
	u64 compare_add;
	u64 swap;
};

/**
 * struct kv_wr - a work request whose completion a CQ of ib_alloc_cq() tells
 * @cqe: its name
 * @done: it has completed
 * @wc: how
 * @order: how many of @counter completed before it
 * @counter: shared by those whose order counts; may be NULL
 */
struct kv_wr {
	struct ib_cqe cqe;
	struct completion done;
	struct ib_wc wc;
	int order;
	atomic_t *counter;
};

/* objects.c */
int kv_init(struct kunit *test, struct ib_device *dev);

struct kv_buf *kv_buf(struct kunit *test, size_t len);
struct ib_sge kv_sge(struct kv *kv, struct kv_buf *buf, size_t offset, u32 len);
void kv_fill(u8 *data, size_t len, u32 seed);
bool kv_filled(const u8 *data, size_t len, u32 seed);

struct ib_cq *kv_cq(struct kunit *test, int cqe);
struct ib_cq *kv_cq_with(struct kunit *test, int cqe, ib_comp_handler completion,
			 void (*event)(struct ib_event *, void *), void *context);
struct ib_cq *kv_cq_in(struct kunit *test, enum ib_poll_context context);
struct kv_qp *kv_qp(struct kunit *test, enum ib_qp_type type, struct ib_cq *cq,
		    struct ib_srq *srq);
struct kv_qp *kv_qp_inline(struct kunit *test, enum ib_qp_type type, struct ib_cq *cq);
void kv_destroy_qp_now(struct kunit *test, struct kv_qp *qp);
void kv_expect_event(struct kunit *test, struct kv_qp *qp, enum ib_event_type event);
void kv_pair(struct kunit *test, struct kv_qp *a, struct kv_qp *b);

int kv_modify(struct kv_qp *qp, enum ib_qp_state state);
int kv_reset_to_init(struct kv_qp *qp);
int kv_init_to_rtr(struct kv_qp *qp, u32 dest_qpn);
int kv_rtr_to_rts(struct kv_qp *qp);
void kv_ah_attr(struct kv *kv, struct rdma_ah_attr *attr);

int kv_post(struct kv_qp *qp, const struct kv_op *op);
int kv_recv(struct kv_qp *qp, u64 id, struct ib_sge *sge, int num_sge);

bool kv_poll(struct ib_cq *cq, struct ib_wc *wc);
struct ib_wc kv_expect(struct kunit *test, struct ib_cq *cq, u64 id,
		       enum ib_wc_status status);
void kv_expect_none(struct kunit *test, struct ib_cq *cq);
void kv_write_passes(struct kunit *test, struct kv_qp *from, struct kv_qp *to);

void kv_wr_init(struct kv_wr *wr, atomic_t *counter);
u64 kv_wr_id(struct kv_wr *wr);
bool kv_wait(struct ib_cq *cq, struct completion *done);

struct ib_mr *kv_mr(struct kunit *test, u32 max_pages);
int kv_map(struct ib_mr *mr, struct kv_buf *buf, size_t offset, size_t len);
int kv_post_reg(struct kv_qp *qp, struct ib_mr *mr, u32 key, int access);
void kv_reg(struct kunit *test, struct kv_qp *qp, struct ib_mr *mr, int access);
void kv_map_reg(struct kunit *test, struct kv_qp *qp, struct ib_mr *mr, struct kv_buf *buf,
		size_t offset, size_t len, int access);
bool kv_has_fast_reg(struct ib_device *dev);
struct kv_remote kv_expose(struct kunit *test, struct kv_qp *qp, struct kv_buf *buf,
			   size_t offset, int access);

/* The tests. */
extern struct kunit_case kv_context_cases[];
extern struct kunit_case kv_data_cases[];
extern struct kunit_case kv_memory_cases[];
extern struct kunit_case kv_state_cases[];
extern struct kunit_case kv_srq_cases[];

#endif /* KVERBS_H */
