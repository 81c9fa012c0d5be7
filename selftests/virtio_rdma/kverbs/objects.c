// SPDX-License-Identifier: GPL-2.0
/*
 * Objects of verbs, which are destroyed when the test ends, and work requests.
 */
#include <linux/gfp.h>
#include <linux/irqflags.h>
#include <linux/jiffies.h>
#include <linux/preempt.h>
#include <linux/sched.h>
#include <rdma/ib_cache.h>

#include "kverbs.h"

KUNIT_DEFINE_ACTION_WRAPPER(kv_dealloc_pd, ib_dealloc_pd, struct ib_pd *);
KUNIT_DEFINE_ACTION_WRAPPER(kv_destroy_cq, ib_destroy_cq, struct ib_cq *);
KUNIT_DEFINE_ACTION_WRAPPER(kv_free_cq, ib_free_cq, struct ib_cq *);
KUNIT_DEFINE_ACTION_WRAPPER(kv_destroy_qp, ib_destroy_qp, struct ib_qp *);
KUNIT_DEFINE_ACTION_WRAPPER(kv_dereg_mr, ib_dereg_mr, struct ib_mr *);
KUNIT_DEFINE_ACTION_WRAPPER(kv_put_gid, rdma_put_gid_attr, const struct ib_gid_attr *);

/* Returns the first GID of RoCE v2 that is made from an IPv4 address, or NULL. */
static const struct ib_gid_attr *find_gid(struct ib_device *dev)
{
	int len = dev->port_data[1].immutable.gid_tbl_len;
	const struct ib_gid_attr *attr;
	int i;

	for (i = 0; i < len; i++) {
		attr = rdma_get_gid_attr(dev, 1, i);
		if (IS_ERR(attr))
			continue;
		if (attr->gid_type == IB_GID_TYPE_ROCE_UDP_ENCAP &&
		    ipv6_addr_v4mapped((const struct in6_addr *)attr->gid.raw))
			return attr;
		rdma_put_gid_attr(attr);
	}
	return NULL;
}

static void destroy_ah(void *ah)
{
	rdma_destroy_ah(ah, RDMA_DESTROY_AH_SLEEPABLE);
}

/* Makes what every test has, and puts it into test->priv. */
int kv_init(struct kunit *test, struct ib_device *dev)
{
	struct kv *kv = kunit_kzalloc(test, sizeof(*kv), GFP_KERNEL);
	struct rdma_ah_attr attr;
	int ret;

	if (!kv)
		return -ENOMEM;
	kv->dev = dev;
	kv->gid = find_gid(dev);
	if (!kv->gid)
		return -ENODEV;
	ret = kunit_add_action_or_reset(test, kv_put_gid, (void *)kv->gid);
	if (ret)
		return ret;
	ret = rdma_read_gid_l2_fields(kv->gid, NULL, kv->mac);
	if (ret)
		return ret;
	kv->pd = ib_alloc_pd(dev, kv_has_fast_reg(dev) ? 0 : IB_PD_UNSAFE_GLOBAL_RKEY);
	if (IS_ERR(kv->pd))
		return PTR_ERR(kv->pd);
	ret = kunit_add_action_or_reset(test, kv_dealloc_pd, kv->pd);
	if (ret)
		return ret;
	kv_ah_attr(kv, &attr);
	kv->ah = rdma_create_ah(kv->pd, &attr, RDMA_CREATE_AH_SLEEPABLE);
	if (IS_ERR(kv->ah))
		return PTR_ERR(kv->ah);
	test->priv = kv;
	return kunit_add_action_or_reset(test, destroy_ah, kv->ah);
}

static void free_buf(void *data)
{
	struct kv_buf *buf = data;

	ib_dma_unmap_single(buf->dev, buf->addr, buf->len, DMA_BIDIRECTIONAL);
	free_pages_exact(buf->data, buf->len);
}

/* Allocates zeroed memory in pages of its own. The machine must have coherent DMA. */
struct kv_buf *kv_buf(struct kunit *test, size_t len)
{
	struct kv *kv = test->priv;
	struct kv_buf *buf = kunit_kzalloc(test, sizeof(*buf), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, buf);
	buf->dev = kv->dev;
	buf->len = len;
	buf->data = alloc_pages_exact(len, GFP_KERNEL | __GFP_ZERO);
	KUNIT_ASSERT_NOT_NULL(test, buf->data);
	buf->addr = ib_dma_map_single(kv->dev, buf->data, len, DMA_BIDIRECTIONAL);
	if (ib_dma_mapping_error(kv->dev, buf->addr)) {
		free_pages_exact(buf->data, len);
		KUNIT_FAIL_AND_ABORT(test, "memory cannot be mapped");
	}
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, free_buf, buf));
	return buf;
}

struct ib_sge kv_sge(struct kv *kv, struct kv_buf *buf, size_t offset, u32 len)
{
	return (struct ib_sge) {
		.addr = buf->addr + offset,
		.length = len,
		.lkey = kv->pd->local_dma_lkey,
	};
}

static u8 pattern(size_t i, u32 seed)
{
	return seed + i * 7 + (i >> 8);
}

/* Fills memory with bytes that depend on the seed. */
void kv_fill(u8 *data, size_t len, u32 seed)
{
	size_t i;

	for (i = 0; i < len; i++)
		data[i] = pattern(i, seed);
}

/* Returns whether the bytes are those that kv_fill() writes. */
bool kv_filled(const u8 *data, size_t len, u32 seed)
{
	size_t i;

	for (i = 0; i < len; i++) {
		if (data[i] != pattern(i, seed))
			return false;
	}
	return true;
}

/* Makes a CQ that the test polls. Its completion events and its errors go to handlers, if any. */
struct ib_cq *kv_cq_with(struct kunit *test, int cqe, ib_comp_handler completion,
			 void (*event)(struct ib_event *, void *), void *context)
{
	struct ib_cq_init_attr attr = { .cqe = cqe };
	struct kv *kv = test->priv;
	struct ib_cq *cq;

	cq = ib_create_cq(kv->dev, completion, event, context, &attr);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, cq);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, kv_destroy_cq, cq));
	return cq;
}

/* Makes a CQ that the test polls, without handlers. */
struct ib_cq *kv_cq(struct kunit *test, int cqe)
{
	return kv_cq_with(test, cqe, NULL, NULL, NULL);
}

/* Makes a CQ that the core polls, for work requests with a struct ib_cqe. */
struct ib_cq *kv_cq_in(struct kunit *test, enum ib_poll_context context)
{
	struct kv *kv = test->priv;
	struct ib_cq *cq;

	cq = ib_alloc_cq(kv->dev, NULL, 4 * KV_DEPTH, 0, context);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, cq);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, kv_free_cq, cq));
	return cq;
}

/* Notes an event. The core allows this handler to sleep (struct ib_qp_init_attr). */
static void qp_event(struct ib_event *event, void *context)
{
	struct kv_qp *qp = context;

	if (!in_task() || irqs_disabled())
		qp->cannot_sleep = true;
	set_bit(event->event, &qp->events);
	complete(&qp->event);
}

static struct kv_qp *qp_new(struct kunit *test, enum ib_qp_type type, struct ib_cq *cq,
			    struct ib_srq *srq, u32 max_inline_data)
{
	struct kv_qp *qp = kunit_kzalloc(test, sizeof(*qp), GFP_KERNEL);
	struct ib_qp_init_attr attr = {
		.event_handler = qp_event,
		.qp_context = qp,
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = {
			.max_send_wr = KV_DEPTH,
			.max_recv_wr = srq ? 0 : KV_DEPTH,
			.max_send_sge = 4,
			.max_recv_sge = srq ? 0 : 4,
			.max_inline_data = max_inline_data,
		},
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = type,
	};

	KUNIT_ASSERT_NOT_NULL(test, qp);
	qp->kv = test->priv;
	qp->cq = cq;
	init_completion(&qp->event);
	qp->qp = ib_create_qp(qp->kv->pd, &attr);
	if (max_inline_data && PTR_ERR_OR_ZERO(qp->qp) == -EINVAL)
		kunit_skip(test, "the device has no inline data");
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, qp->qp);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, kv_destroy_qp, qp->qp));
	return qp;
}

/* Makes a QP in RESET. It receives from the SRQ if that is not NULL. */
struct kv_qp *kv_qp(struct kunit *test, enum ib_qp_type type, struct ib_cq *cq,
		    struct ib_srq *srq)
{
	return qp_new(test, type, cq, srq, 0);
}

/* Makes a QP in RESET that has KV_INLINE bytes of inline data. */
struct kv_qp *kv_qp_inline(struct kunit *test, enum ib_qp_type type, struct ib_cq *cq)
{
	return qp_new(test, type, cq, NULL, KV_INLINE);
}

/* Destroys a QP before the test ends. */
void kv_destroy_qp_now(struct kunit *test, struct kv_qp *qp)
{
	kunit_release_action(test, kv_destroy_qp, qp->qp);
}

/* Waits until the QP has got this event. */
void kv_expect_event(struct kunit *test, struct kv_qp *qp, enum ib_event_type event)
{
	while (!test_bit(event, &qp->events))
		KUNIT_ASSERT_TRUE_MSG(test, wait_for_completion_timeout(&qp->event, KV_HANG),
				      "no event \"%s\"", ib_event_msg(event));
	KUNIT_EXPECT_FALSE(test, qp->cannot_sleep);
}

/* Changes the state of a QP, and no other attribute. */
int kv_modify(struct kv_qp *qp, enum ib_qp_state state)
{
	struct ib_qp_attr attr = { .qp_state = state };

	return ib_modify_qp(qp->qp, &attr, IB_QP_STATE);
}

int kv_reset_to_init(struct kv_qp *qp)
{
	int mask = IB_QP_STATE | IB_QP_PKEY_INDEX | IB_QP_PORT;
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_INIT,
		.port_num = 1,
		.qkey = KV_QKEY,
		.qp_access_flags = IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE,
	};

	if (qp->qp->qp_type == IB_QPT_RC)
		attr.qp_access_flags |= IB_ACCESS_REMOTE_ATOMIC;
	mask |= qp->qp->qp_type == IB_QPT_UD ? IB_QP_QKEY : IB_QP_ACCESS_FLAGS;
	return ib_modify_qp(qp->qp, &attr, mask);
}

/* Writes the attributes of an AH for the port itself. */
void kv_ah_attr(struct kv *kv, struct rdma_ah_attr *attr)
{
	union ib_gid dgid = kv->gid->gid;

	memset(attr, 0, sizeof(*attr));
	attr->type = RDMA_AH_ATTR_TYPE_ROCE;
	rdma_ah_set_port_num(attr, 1);
	rdma_ah_set_grh(attr, &dgid, 0, kv->gid->index, 64, 0);
	memcpy(attr->roce.dmac, kv->mac, ETH_ALEN);
}

int kv_init_to_rtr(struct kv_qp *qp, u32 dest_qpn)
{
	int mask = IB_QP_STATE;
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.path_mtu = IB_MTU_1024,
		.dest_qp_num = dest_qpn,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = IB_RNR_TIMER_000_01,
	};

	if (qp->qp->qp_type != IB_QPT_UD) {
		kv_ah_attr(qp->kv, &attr.ah_attr);
		mask |= IB_QP_AV | IB_QP_PATH_MTU | IB_QP_DEST_QPN | IB_QP_RQ_PSN;
	}
	if (qp->qp->qp_type == IB_QPT_RC)
		mask |= IB_QP_MAX_DEST_RD_ATOMIC | IB_QP_MIN_RNR_TIMER;
	return ib_modify_qp(qp->qp, &attr, mask);
}

/* Brings a QP to RTS. With this rnr_retry, a message waits until there is a receive. */
int kv_rtr_to_rts(struct kv_qp *qp)
{
	int mask = IB_QP_STATE | IB_QP_SQ_PSN;
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 4,
	};

	if (qp->qp->qp_type == IB_QPT_RC)
		mask |= IB_QP_TIMEOUT | IB_QP_RETRY_CNT | IB_QP_RNR_RETRY |
			IB_QP_MAX_QP_RD_ATOMIC;
	return ib_modify_qp(qp->qp, &attr, mask);
}

/* Brings two QPs to RTS, connected to each other; they may be the same QP. */
void kv_pair(struct kunit *test, struct kv_qp *a, struct kv_qp *b)
{
	KUNIT_ASSERT_EQ(test, 0, kv_reset_to_init(a));
	if (a != b)
		KUNIT_ASSERT_EQ(test, 0, kv_reset_to_init(b));
	KUNIT_ASSERT_EQ(test, 0, kv_init_to_rtr(a, b->qp->qp_num));
	if (a != b)
		KUNIT_ASSERT_EQ(test, 0, kv_init_to_rtr(b, a->qp->qp_num));
	KUNIT_ASSERT_EQ(test, 0, kv_rtr_to_rts(a));
	if (a != b)
		KUNIT_ASSERT_EQ(test, 0, kv_rtr_to_rts(b));
}

/* Posts a send work request. Returns the errno of the driver. May be called in any context. */
int kv_post(struct kv_qp *qp, const struct kv_op *op)
{
	union {
		struct ib_send_wr wr;
		struct ib_rdma_wr rdma;
		struct ib_atomic_wr atomic;
	} u = {};

	u.wr.wr_id = op->id;
	u.wr.opcode = op->opcode;
	u.wr.send_flags = op->flags;
	u.wr.sg_list = op->sge;
	u.wr.num_sge = op->num_sge;
	switch (op->opcode) {
	case IB_WR_RDMA_READ_WITH_INV:
		u.wr.ex.invalidate_rkey = op->inv;
		u.rdma.remote_addr = op->remote_addr;
		u.rdma.rkey = op->rkey;
		break;
	case IB_WR_SEND_WITH_INV:
	case IB_WR_LOCAL_INV:
		u.wr.ex.invalidate_rkey = op->inv;
		break;
	case IB_WR_ATOMIC_CMP_AND_SWP:
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		u.atomic.remote_addr = op->remote_addr;
		u.atomic.rkey = op->rkey;
		u.atomic.compare_add = op->compare_add;
		u.atomic.swap = op->swap;
		break;
	default:
		u.wr.ex.imm_data = op->imm_data;
		u.rdma.remote_addr = op->remote_addr;
		u.rdma.rkey = op->rkey;
	}
	return ib_post_send(qp->qp, &u.wr, NULL);
}

/* Posts a receive work request. May be called in any context. */
int kv_recv(struct kv_qp *qp, u64 id, struct ib_sge *sge, int num_sge)
{
	struct ib_recv_wr wr = { .wr_id = id, .sg_list = sge, .num_sge = num_sge };

	return ib_post_recv(qp->qp, &wr, NULL);
}

/* Waits for a completion of a CQ that the test polls. Returns false if it does not come. */
bool kv_poll(struct ib_cq *cq, struct ib_wc *wc)
{
	unsigned long end = jiffies + KV_HANG;

	for (;;) {
		if (ib_poll_cq(cq, 1, wc) == 1)
			return true;
		if (time_after(jiffies, end))
			return false;
		cond_resched();
	}
}

/* Waits for the next completion, which must have this work request and this status. */
struct ib_wc kv_expect(struct kunit *test, struct ib_cq *cq, u64 id,
		       enum ib_wc_status status)
{
	struct ib_wc wc = {};

	KUNIT_ASSERT_TRUE_MSG(test, kv_poll(cq, &wc), "work request %llu", id);
	KUNIT_ASSERT_EQ_MSG(test, wc.wr_id, id, "%s", ib_wc_status_msg(wc.status));
	KUNIT_ASSERT_EQ_MSG(test, wc.status, status, "work request %llu: %s", id,
			    ib_wc_status_msg(wc.status));
	return wc;
}

/* Fails the test if there is a completion. */
void kv_expect_none(struct kunit *test, struct ib_cq *cq)
{
	struct ib_wc wc;

	KUNIT_EXPECT_EQ(test, 0, ib_poll_cq(cq, 1, &wc));
}

/* Sends a message and checks it. The test polls the CQs, which must be empty. */
void kv_write_passes(struct kunit *test, struct kv_qp *from, struct kv_qp *to)
{
	struct kv *kv = test->priv;
	struct kv_buf *buf = kv_buf(test, 2 * KV_LEN);
	struct ib_sge out = kv_sge(kv, buf, 0, KV_LEN);
	struct ib_sge in = kv_sge(kv, buf, KV_LEN, KV_LEN);
	struct kv_op op = {
		.id = 1001,
		.opcode = IB_WR_SEND,
		.flags = IB_SEND_SIGNALED,
		.sge = &out,
		.num_sge = 1,
	};
	struct ib_wc first, second;

	kv_fill(buf->data, KV_LEN, 99);
	KUNIT_ASSERT_EQ(test, 0, kv_recv(to, 1002, &in, 1));
	KUNIT_ASSERT_EQ(test, 0, kv_post(from, &op));
	if (from->cq == to->cq) {
		/* The completions of the send and of the receive come in either order. */
		KUNIT_ASSERT_TRUE(test, kv_poll(from->cq, &first));
		KUNIT_ASSERT_TRUE(test, kv_poll(from->cq, &second));
		KUNIT_EXPECT_EQ(test, first.status, IB_WC_SUCCESS);
		KUNIT_EXPECT_EQ(test, second.status, IB_WC_SUCCESS);
		KUNIT_EXPECT_EQ(test, first.wr_id + second.wr_id, 1001ULL + 1002ULL);
	} else {
		kv_expect(test, to->cq, 1002, IB_WC_SUCCESS);
		kv_expect(test, from->cq, 1001, IB_WC_SUCCESS);
	}
	KUNIT_EXPECT_TRUE(test, kv_filled(buf->data + KV_LEN, KV_LEN, 99));
}

static void wr_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct kv_wr *wr = container_of(wc->wr_cqe, struct kv_wr, cqe);

	wr->wc = *wc;
	if (wr->counter)
		wr->order = atomic_fetch_inc(wr->counter);
	complete(&wr->done);
}

void kv_wr_init(struct kv_wr *wr, atomic_t *counter)
{
	memset(wr, 0, sizeof(*wr));
	wr->cqe.done = wr_done;
	wr->counter = counter;
	init_completion(&wr->done);
}

/* Returns the wr_id with which the work request is posted. */
u64 kv_wr_id(struct kv_wr *wr)
{
	return (uintptr_t)&wr->cqe;
}

/* Waits for a callback of a CQ that the core polls. Returns false if it does not come. */
bool kv_wait(struct ib_cq *cq, struct completion *done)
{
	unsigned long end = jiffies + KV_HANG;

	if (cq->poll_ctx != IB_POLL_DIRECT)
		return wait_for_completion_timeout(done, KV_HANG);
	while (!try_wait_for_completion(done)) {
		if (time_after(jiffies, end))
			return false;
		if (ib_process_cq_direct(cq, 16) == 0)
			cond_resched();
	}
	return true;
}

/* Makes an MR for fast registration. */
struct ib_mr *kv_mr(struct kunit *test, u32 max_pages)
{
	struct kv *kv = test->priv;
	struct ib_mr *mr = ib_alloc_mr(kv->pd, IB_MR_TYPE_MEM_REG, max_pages);

	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, mr);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, kv_dereg_mr, mr));
	return mr;
}

/* Maps a part of a buffer. Returns the number of elements that were mapped, which must be 1. */
int kv_map(struct ib_mr *mr, struct kv_buf *buf, size_t offset, size_t len)
{
	struct scatterlist sg;

	sg_init_table(&sg, 1);
	sg_dma_address(&sg) = buf->addr + offset;
	sg_dma_len(&sg) = len;
	return ib_map_mr_sg(mr, &sg, 1, NULL, PAGE_SIZE);
}

/* Posts a REG_MR with the wr_id 900. */
int kv_post_reg(struct kv_qp *qp, struct ib_mr *mr, u32 key, int access)
{
	struct ib_reg_wr wr = {
		.wr = {
			.wr_id = 900,
			.opcode = IB_WR_REG_MR,
			.send_flags = IB_SEND_SIGNALED,
		},
		.mr = mr,
		.key = key,
		.access = access,
	};

	return ib_post_send(qp->qp, &wr.wr, NULL);
}

/* Registers what was mapped, under the next key of the MR, and waits for the completion. */
void kv_reg(struct kunit *test, struct kv_qp *qp, struct ib_mr *mr, int access)
{
	struct ib_wc wc;

	ib_update_fast_reg_key(mr, ib_inc_rkey(mr->rkey));
	KUNIT_ASSERT_EQ(test, 0, kv_post_reg(qp, mr, mr->rkey, access));
	wc = kv_expect(test, qp->cq, 900, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_REG_MR);
}

/* Maps a part of a buffer and registers it. */
void kv_map_reg(struct kunit *test, struct kv_qp *qp, struct ib_mr *mr, struct kv_buf *buf,
		size_t offset, size_t len, int access)
{
	KUNIT_ASSERT_EQ(test, 1, kv_map(mr, buf, offset, len));
	kv_reg(test, qp, mr, access);
}

bool kv_has_fast_reg(struct ib_device *dev)
{
	return dev->attrs.device_cap_flags & IB_DEVICE_MEM_MGT_EXTENSIONS;
}

/*
 * Gives the peers of a QP, whose CQ the test polls, access to a page of a buffer.
 * Without fast registration the page is a part of all memory, to which the core
 * gives access for READ and WRITE alone.
 */
struct kv_remote kv_expose(struct kunit *test, struct kv_qp *qp, struct kv_buf *buf,
			   size_t offset, int access)
{
	struct kv *kv = test->priv;
	struct ib_mr *mr;

	if (!kv_has_fast_reg(kv->dev)) {
		if (access & IB_ACCESS_REMOTE_ATOMIC)
			kunit_skip(test, "the device has no fast registration");
		return (struct kv_remote) {
			.addr = buf->addr + offset,
			.rkey = kv->pd->unsafe_global_rkey,
		};
	}
	mr = kv_mr(test, 1);
	kv_map_reg(test, qp, mr, buf, offset, PAGE_SIZE, IB_ACCESS_LOCAL_WRITE | access);
	return (struct kv_remote) { .addr = mr->iova, .rkey = mr->rkey };
}
