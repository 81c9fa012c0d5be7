// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of the states of a QP: which work requests are flushed, in which order,
 * and that a drain ends.
 */
#include "kverbs.h"

#define COUNT	8

/*
 * The states in which a QP is drained. RESET is not among them: it has no
 * transition to ERR (ib_modify_qp_is_ok()), and the core would print a warning. UD is
 * not among the types: the core drains a send queue by an RDMA WRITE, which UD lacks.
 */
struct drained {
	const char *name;
	enum ib_qp_type type;
	enum ib_qp_state state;
};

static const struct drained states[] = {
	{ "init", IB_QPT_RC, IB_QPS_INIT },
	{ "rtr", IB_QPT_RC, IB_QPS_RTR },
	{ "rts", IB_QPT_RC, IB_QPS_RTS },
	{ "sqd", IB_QPT_RC, IB_QPS_SQD },
	{ "err", IB_QPT_RC, IB_QPS_ERR },
	{ "sqe_uc", IB_QPT_UC, IB_QPS_SQE },
};

KUNIT_ARRAY_PARAM_DESC(states, states, name);

/* Brings a QP from RESET to a state. For SQE it stops in RTS; then a send must fail. */
static void go_to(struct kunit *test, struct kv_qp *qp, struct kv_qp *peer,
		  enum ib_qp_state state)
{
	KUNIT_ASSERT_EQ(test, 0, kv_reset_to_init(qp));
	if (state == IB_QPS_INIT)
		return;
	KUNIT_ASSERT_EQ(test, 0, kv_init_to_rtr(qp, peer->qp->qp_num));
	if (state == IB_QPS_RTR)
		return;
	KUNIT_ASSERT_EQ(test, 0, kv_rtr_to_rts(qp));
	if (state == IB_QPS_SQD || state == IB_QPS_ERR)
		KUNIT_ASSERT_EQ(test, 0, kv_modify(qp, state));
}

static enum ib_qp_state state_of(struct kunit *test, struct kv_qp *qp)
{
	struct ib_qp_init_attr init = {};
	struct ib_qp_attr attr = {};

	KUNIT_ASSERT_EQ(test, 0, ib_query_qp(qp->qp, &attr, IB_QP_STATE, &init));
	return attr.qp_state;
}

/* Posts a send that fails at the sender, because no MR has its key. */
static int post_failing(struct kv_qp *qp, u64 id)
{
	struct ib_sge sge = { .addr = 0, .length = 8, .lkey = 0xdead00 };
	struct ib_ud_wr wr = {
		.wr = {
			.wr_id = id,
			.opcode = IB_WR_SEND,
			.send_flags = IB_SEND_SIGNALED,
			.sg_list = &sge,
			.num_sge = 1,
		},
		.ah = qp->kv->ah,
		.remote_qpn = qp->qp->qp_num,
		.remote_qkey = KV_QKEY,
	};

	return ib_post_send(qp->qp, &wr.wr, NULL);
}

/* Work requests that are outstanding when a drain begins. */
struct pending {
	struct kv_wr failing;
	struct kv_wr sends[COUNT];
	struct kv_wr recvs[COUNT];
	atomic_t sent;
	atomic_t received;
};

static struct pending *pending_new(struct kunit *test)
{
	struct pending *p = kunit_kzalloc(test, sizeof(*p), GFP_KERNEL);
	int i;

	KUNIT_ASSERT_NOT_NULL(test, p);
	kv_wr_init(&p->failing, NULL);
	for (i = 0; i < COUNT; i++) {
		kv_wr_init(&p->sends[i], &p->sent);
		kv_wr_init(&p->recvs[i], &p->received);
	}
	return p;
}

static void expect_flushed(struct kunit *test, struct kv_wr *wrs)
{
	int i;

	for (i = 0; i < COUNT; i++) {
		KUNIT_EXPECT_TRUE_MSG(test, completion_done(&wrs[i].done), "%d", i);
		KUNIT_EXPECT_EQ_MSG(test, wrs[i].wc.status, IB_WC_WR_FLUSH_ERR, "%d", i);
		KUNIT_EXPECT_EQ(test, wrs[i].order, i);
	}
}

/*
 * ib_drain_qp() returns. By then the callbacks of all work requests that were
 * posted before have run, in the order of posting.
 */
static void drain_in(struct kunit *test, enum ib_poll_context context)
{
	const struct drained *param = test->param_value;
	struct ib_cq *cq = kv_cq_in(test, context);
	struct kv_qp *qp = kv_qp(test, param->type, cq, NULL);
	struct kv_qp *peer = kv_qp(test, param->type, cq, NULL);
	bool sends = param->state != IB_QPS_INIT && param->state != IB_QPS_RTR;
	struct pending *p = pending_new(test);
	struct kv_op op = { .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };
	int i;

	go_to(test, peer, qp, IB_QPS_RTR);
	go_to(test, qp, peer, param->state);
	if (param->state == IB_QPS_SQE) {
		KUNIT_ASSERT_EQ(test, 0, post_failing(qp, kv_wr_id(&p->failing)));
		KUNIT_EXPECT_TRUE(test, kv_wait(cq, &p->failing.done));
		KUNIT_EXPECT_EQ(test, p->failing.wc.status, IB_WC_LOC_PROT_ERR);
		KUNIT_EXPECT_EQ(test, state_of(test, qp), IB_QPS_SQE);
	}
	for (i = 0; i < COUNT; i++) {
		KUNIT_ASSERT_EQ(test, 0, kv_recv(qp, kv_wr_id(&p->recvs[i]), NULL, 0));
		op.id = kv_wr_id(&p->sends[i]);
		/* The peer has no receives, so messages of RC QPs wait. */
		if (sends)
			KUNIT_ASSERT_EQ(test, 0, kv_post(qp, &op));
	}
	ib_drain_qp(qp->qp);
	expect_flushed(test, p->recvs);
	if (sends)
		expect_flushed(test, p->sends);
	KUNIT_EXPECT_EQ(test, state_of(test, qp), IB_QPS_ERR);
	/* A QP can be drained when no work request is outstanding. */
	ib_drain_qp(qp->qp);
	ib_drain_qp(peer->qp);
}

static void drain(struct kunit *test)
{
	drain_in(test, IB_POLL_DIRECT);
	drain_in(test, IB_POLL_SOFTIRQ);
	drain_in(test, IB_POLL_WORKQUEUE);
}

/* In ERR, outstanding work requests and those that are posted later are flushed in order. */
static void flush(struct kunit *test)
{
	struct kv_qp *a = kv_qp(test, IB_QPT_RC, kv_cq(test, 4 * KV_DEPTH), NULL);
	struct kv_qp *b = kv_qp(test, IB_QPT_RC, kv_cq(test, 4 * KV_DEPTH), NULL);
	struct kv_op op = { .opcode = IB_WR_SEND };
	unsigned int round;
	struct ib_wc wc;
	u64 send, recv;
	int i;

	for (round = 0; round < DIV_ROUND_UP(kv_rounds, 20); round++) {
		kv_pair(test, a, b);
		/* Unsignaled work requests have completions, too, if they fail. */
		for (op.id = 0; op.id < COUNT; op.id++) {
			op.flags = op.id % 2 ? IB_SEND_SIGNALED : 0;
			KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
			KUNIT_ASSERT_EQ(test, 0, kv_recv(a, 100 + op.id, NULL, 0));
		}
		KUNIT_ASSERT_EQ(test, 0, kv_modify(a, IB_QPS_ERR));
		for (; op.id < 2 * COUNT; op.id++) {
			KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
			KUNIT_ASSERT_EQ(test, 0, kv_recv(a, 100 + op.id, NULL, 0));
		}
		send = 0;
		recv = 100;
		for (i = 0; i < 4 * COUNT; i++) {
			KUNIT_ASSERT_TRUE(test, kv_poll(a->cq, &wc));
			KUNIT_ASSERT_EQ(test, wc.status, IB_WC_WR_FLUSH_ERR);
			KUNIT_ASSERT_EQ(test, wc.wr_id, wc.wr_id < 100 ? send++ : recv++);
			KUNIT_ASSERT_PTR_EQ(test, wc.qp, a->qp);
		}
		kv_expect_none(test, a->cq);
		KUNIT_ASSERT_EQ(test, 0, kv_modify(a, IB_QPS_RESET));
		KUNIT_ASSERT_EQ(test, 0, kv_modify(b, IB_QPS_RESET));
	}
	kv_pair(test, a, b);
	kv_write_passes(test, a, b);
}

/* Work requests before the one that fails succeed, and those behind it are flushed. */
static void fails_in_the_middle(struct kunit *test)
{
	struct kv_qp *a = kv_qp(test, IB_QPT_RC, kv_cq(test, KV_DEPTH), NULL);
	struct kv_qp *b = kv_qp(test, IB_QPT_RC, kv_cq(test, KV_DEPTH), NULL);
	struct kv_buf *buf = kv_buf(test, KV_LEN);
	struct ib_sge sge = kv_sge(test->priv, buf, 0, KV_LEN);
	struct kv_op op = {
		.flags = IB_SEND_SIGNALED,
		.sge = &sge,
		.num_sge = 1,
	};
	int i;

	kv_pair(test, a, b);
	for (i = 0; i < COUNT / 2; i++)
		KUNIT_ASSERT_EQ(test, 0, kv_recv(b, i, &sge, 1));
	for (op.id = 0; op.id < COUNT; op.id++) {
		op.opcode = op.id == COUNT / 2 ? IB_WR_RDMA_WRITE : IB_WR_SEND;
		op.rkey = 0xdead00;
		KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
	}
	for (i = 0; i < COUNT; i++)
		kv_expect(test, a->cq, i, i < COUNT / 2 ? IB_WC_SUCCESS :
			  i == COUNT / 2 ? IB_WC_REM_ACCESS_ERR : IB_WC_WR_FLUSH_ERR);
	for (i = 0; i < COUNT / 2; i++)
		kv_expect(test, b->cq, i, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, state_of(test, a), IB_QPS_ERR);
	KUNIT_EXPECT_EQ(test, state_of(test, b), IB_QPS_ERR);
	kv_expect_event(test, b, IB_EVENT_QP_ACCESS_ERR);
}

/* RESET discards work requests and refuses new ones, and the QP works again later. */
static void reset(struct kunit *test)
{
	struct kv_qp *a = kv_qp(test, IB_QPT_RC, kv_cq(test, 4 * KV_DEPTH), NULL);
	struct kv_qp *b = kv_qp(test, IB_QPT_RC, kv_cq(test, 4 * KV_DEPTH), NULL);
	struct kv_op op = { .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };
	unsigned int round;
	int i;

	KUNIT_EXPECT_EQ(test, -EINVAL, kv_post(a, &op));
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_recv(a, 1, NULL, 0));
	for (round = 0; round < DIV_ROUND_UP(kv_rounds, 20); round++) {
		kv_pair(test, a, b);
		/* Some have completed and were not polled, some are outstanding. */
		for (i = 0; i < COUNT; i++) {
			KUNIT_ASSERT_EQ(test, 0, kv_recv(a, i, NULL, 0));
			KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
			if (i < COUNT / 2)
				KUNIT_ASSERT_EQ(test, 0, kv_recv(b, i, NULL, 0));
		}
		for (i = 0; i < COUNT / 2; i++)
			kv_expect(test, b->cq, i, IB_WC_SUCCESS);
		KUNIT_ASSERT_EQ(test, 0, kv_modify(a, IB_QPS_RESET));
		kv_expect_none(test, a->cq);
		KUNIT_EXPECT_EQ(test, -EINVAL, kv_post(a, &op));
		KUNIT_EXPECT_EQ(test, -EINVAL, kv_recv(a, 1, NULL, 0));
		KUNIT_ASSERT_EQ(test, 0, kv_modify(b, IB_QPS_RESET));
		kv_expect_none(test, b->cq);
	}
	kv_pair(test, a, b);
	kv_write_passes(test, a, b);
}

/* SQE can be left for RTS; work requests behind the send that failed are flushed. */
static void sqe(struct kunit *test)
{
	struct kv_qp *ud = kv_qp(test, IB_QPT_UD, kv_cq(test, KV_DEPTH), NULL);
	struct kv_qp *a = kv_qp(test, IB_QPT_UC, kv_cq(test, KV_DEPTH), NULL);
	struct kv_qp *b = kv_qp(test, IB_QPT_UC, kv_cq(test, KV_DEPTH), NULL);
	struct kv_op op = { .id = 2, .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };
	struct ib_qp_attr attr = { .qp_state = IB_QPS_RTS, .cur_qp_state = IB_QPS_SQE };

	kv_pair(test, a, b);
	KUNIT_ASSERT_EQ(test, 0, kv_recv(b, 3, NULL, 0));
	KUNIT_ASSERT_EQ(test, 0, post_failing(a, 1));
	kv_expect(test, a->cq, 1, IB_WC_LOC_PROT_ERR);
	KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
	kv_expect(test, a->cq, 2, IB_WC_WR_FLUSH_ERR);
	KUNIT_ASSERT_EQ(test, 0, ib_modify_qp(a->qp, &attr, IB_QP_STATE | IB_QP_CUR_STATE));
	op.id = 4;
	KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
	kv_expect(test, a->cq, 4, IB_WC_SUCCESS);
	kv_expect(test, b->cq, 3, IB_WC_SUCCESS);

	kv_pair(test, ud, ud);
	KUNIT_ASSERT_EQ(test, 0, post_failing(ud, 5));
	kv_expect(test, ud->cq, 5, IB_WC_LOC_PROT_ERR);
	KUNIT_EXPECT_EQ(test, state_of(test, ud), IB_QPS_SQE);
	KUNIT_ASSERT_EQ(test, 0, ib_modify_qp(ud->qp, &attr, IB_QP_STATE | IB_QP_CUR_STATE));
	KUNIT_EXPECT_EQ(test, state_of(test, ud), IB_QPS_RTS);
}

/* Work requests that are posted in SQD wait until RTS. */
static void sqd(struct kunit *test)
{
	struct kv_qp *a = kv_qp(test, IB_QPT_RC, kv_cq(test, KV_DEPTH), NULL);
	struct kv_qp *b = kv_qp(test, IB_QPT_RC, kv_cq(test, KV_DEPTH), NULL);
	struct kv_op op = { .id = 1, .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };

	kv_pair(test, a, b);
	KUNIT_ASSERT_EQ(test, 0, kv_recv(b, 2, NULL, 0));
	KUNIT_ASSERT_EQ(test, 0, kv_modify(a, IB_QPS_SQD));
	KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
	KUNIT_EXPECT_EQ(test, state_of(test, a), IB_QPS_SQD);
	kv_expect_none(test, a->cq);
	KUNIT_ASSERT_EQ(test, 0, kv_modify(a, IB_QPS_RTS));
	kv_expect(test, a->cq, 1, IB_WC_SUCCESS);
	kv_expect(test, b->cq, 2, IB_WC_SUCCESS);
}

/* A QP is destroyed with work requests and completions outstanding: no completion is left. */
static void destroyed(struct kunit *test)
{
	struct ib_cq *cq = kv_cq(test, 4 * KV_DEPTH);
	struct kv_qp *peer = kv_qp(test, IB_QPT_RC, kv_cq(test, 4 * KV_DEPTH), NULL);
	struct kv_op op = { .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };
	unsigned int round;
	struct kv_qp *qp;
	int i;

	for (round = 0; round < DIV_ROUND_UP(kv_rounds, 20); round++) {
		qp = kv_qp(test, IB_QPT_RC, cq, NULL);
		kv_pair(test, qp, peer);
		for (i = 0; i < COUNT; i++) {
			KUNIT_ASSERT_EQ(test, 0, kv_post(qp, &op));
			KUNIT_ASSERT_EQ(test, 0, kv_recv(qp, i, NULL, 0));
			if (i < COUNT / 2)
				KUNIT_ASSERT_EQ(test, 0, kv_recv(peer, i, NULL, 0));
		}
		for (i = 0; i < COUNT / 2; i++)
			kv_expect(test, peer->cq, i, IB_WC_SUCCESS);
		kv_destroy_qp_now(test, qp);
		kv_expect_none(test, cq);
		KUNIT_ASSERT_EQ(test, 0, kv_modify(peer, IB_QPS_RESET));
		kv_expect_none(test, peer->cq);
	}
}

/* The error event of a CQ, for which the test waits. */
struct overrun {
	struct completion error;
};

static void cq_event(struct ib_event *event, void *context)
{
	struct overrun *o = context;

	if (event->event == IB_EVENT_CQ_ERR)
		complete(&o->error);
}

/* A CQ that is not polled overruns: an event says so, and the QPs of the CQ fail. */
static void overrun(struct kunit *test)
{
	struct overrun *o = kunit_kzalloc(test, sizeof(*o), GFP_KERNEL);
	struct kv_op op = { .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };
	struct kv_qp *a, *b;
	struct ib_cq *cq;
	struct ib_wc wc;
	int i, entries;

	KUNIT_ASSERT_NOT_NULL(test, o);
	init_completion(&o->error);
	cq = kv_cq_with(test, 4, NULL, cq_event, o);
	entries = cq->cqe;
	KUNIT_ASSERT_GE(test, entries, 4);
	KUNIT_ASSERT_LT(test, entries, KV_DEPTH);
	a = kv_qp(test, IB_QPT_RC, cq, NULL);
	b = kv_qp(test, IB_QPT_RC, kv_cq(test, 2 * KV_DEPTH), NULL);
	kv_pair(test, a, b);
	for (i = 0; i <= entries; i++) {
		op.id = i;
		KUNIT_ASSERT_EQ(test, 0, kv_recv(b, i, NULL, 0));
		KUNIT_ASSERT_EQ(test, 0, kv_post(a, &op));
	}
	KUNIT_EXPECT_TRUE(test, wait_for_completion_timeout(&o->error, KV_HANG));
	kv_expect_event(test, a, IB_EVENT_QP_FATAL);
	KUNIT_EXPECT_EQ(test, state_of(test, a), IB_QPS_ERR);
	/* The completions in the CQ are still valid. */
	for (i = 0; i < entries; i++) {
		KUNIT_ASSERT_TRUE(test, kv_poll(cq, &wc));
		KUNIT_EXPECT_EQ(test, wc.wr_id, (u64)i);
		KUNIT_EXPECT_EQ(test, wc.status, IB_WC_SUCCESS);
	}
}

/* Transitions that IBA does not have are refused. A query returns the attributes that are set. */
static void transitions(struct kunit *test)
{
	struct kv_qp *qp = kv_qp(test, IB_QPT_RC, kv_cq(test, KV_DEPTH), NULL);
	struct ib_qp_init_attr init = {};
	struct ib_qp_attr attr = {};

	KUNIT_EXPECT_EQ(test, -EINVAL, kv_modify(qp, IB_QPS_RTS));
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_modify(qp, IB_QPS_ERR));
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_modify(qp, IB_QPS_INIT));
	kv_pair(test, qp, qp);
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_modify(qp, IB_QPS_INIT));
	KUNIT_EXPECT_EQ(test, 0, ib_query_qp(qp->qp, &attr, 0, &init));
	KUNIT_EXPECT_EQ(test, attr.qp_state, IB_QPS_RTS);
	KUNIT_EXPECT_EQ(test, attr.dest_qp_num, qp->qp->qp_num);
	KUNIT_EXPECT_EQ(test, attr.rnr_retry, 7);
	KUNIT_EXPECT_EQ(test, attr.path_mtu, IB_MTU_1024);
	KUNIT_EXPECT_GE(test, attr.cap.max_send_wr, KV_DEPTH);
	KUNIT_EXPECT_PTR_EQ(test, init.send_cq, qp->cq);
	/* The QP is connected to itself. */
	kv_write_passes(test, qp, qp);
}

struct kunit_case kv_state_cases[] = {
	KUNIT_CASE_PARAM(drain, states_gen_params),
	KUNIT_CASE(flush),
	KUNIT_CASE(fails_in_the_middle),
	KUNIT_CASE(reset),
	KUNIT_CASE(sqe),
	KUNIT_CASE(sqd),
	KUNIT_CASE(destroyed),
	KUNIT_CASE(overrun),
	KUNIT_CASE(transitions),
	{}
};
