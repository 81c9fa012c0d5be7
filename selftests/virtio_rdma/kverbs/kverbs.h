/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the tests of verbs in the kernel share. All of them use one port in
 * loopback. The objects of a test are destroyed when it ends, the last one first.
 */
#ifndef KVERBS_H
#define KVERBS_H

#include <kunit/test.h>
#include <linux/completion.h>
#include <linux/scatterlist.h>
#include <rdma/ib_verbs.h>

/* Bounds a wait for an event that never comes. Any other wait takes less than a hundredth of it. */
#define KV_HANG		(60 * HZ)

/* The bytes of a message whose length does not matter. */
#define KV_LEN		256

/* The work requests that a queue holds. */
#define KV_DEPTH	32
/* The bytes of inline data of a QP that has inline data. */
#define KV_INLINE 100

/* The Q_Key of datagrams. */
#define KV_QKEY		0x11223344

/* The number of messages of a test that sends many. */
extern unsigned int kv_rounds;

/**
 * struct kv - what every test has
 * @dev: the device
 * @pd: a PD
 * @ah: the address of the port itself
 * @gid: a GID of RoCE v2, made from an IPv4 address
 * @mac: the MAC address that belongs to @gid
 */
struct kv {
	struct ib_device *dev;
	struct ib_pd *pd;
	struct ib_ah *ah;
	const struct ib_gid_attr *gid;
	u8 mac[ETH_ALEN];
};

/**
 * struct kv_buf - memory that the device can access
 * @dev: the device
 * @data: the memory
 * @addr: the address of the memory for the device
 * @len: its length in bytes
 */
struct kv_buf {
	struct ib_device *dev;
	u8 *data;
	u64 addr;
	size_t len;
};

/**
 * struct kv_remote - memory as a peer names it
 * @addr: the address of the first byte
 * @rkey: the key of the memory
 */
struct kv_remote {
	u64 addr;
	u32 rkey;
};

/**
 * struct kv_qp - a QP
 * @kv: what the test has
 * @qp: the QP
 * @cq: the CQ of its sends and its receives
 * @events: the events that it has got, a bit for each enum ib_event_type
 * @event: completed by each event
 * @cannot_sleep: whether an event came in a context that cannot sleep
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
 * @id: the wr_id
 * @opcode: the operation
 * @flags: enum ib_send_flags
 * @sge: the SGEs, which name local memory
 * @num_sge: the number of SGEs
 * @imm_data: the immediate data
 * @inv: the key to invalidate
 * @remote_addr: the address of the first byte of the peer's memory
 * @rkey: the key of the peer's memory
 * @compare_add: the operand that an atomic compares or adds
 * @swap: the operand that compare and swap writes
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
 * struct kv_wr - a work request whose completion the core hands to a callback
 * @cqe: the callback; its address is the wr_id
 * @done: completed when the work request has completed
 * @wc: the completion
 * @order: the value of @counter before this completion
 * @counter: counts the completions of all work requests that share it; may be NULL
 */
struct kv_wr {
	struct ib_cqe cqe;
	struct completion done;
	struct ib_wc wc;
	int order;
	atomic_t *counter;
};

/* Objects and work requests, in objects.c. */
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

/* The tests, in the other files. */
extern struct kunit_case kv_context_cases[];
extern struct kunit_case kv_data_cases[];
extern struct kunit_case kv_memory_cases[];
extern struct kunit_case kv_state_cases[];
extern struct kunit_case kv_srq_cases[];

#endif /* KVERBS_H */
