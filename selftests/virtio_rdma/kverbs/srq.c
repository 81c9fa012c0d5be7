// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of shared receive queues.
 */
#include "kverbs.h"

#define SRQ_DEPTH	16

/* An SRQ, memory for its receives, and its limit events. */
struct shared {
	struct ib_srq *srq;
	struct kv_buf *buf;
	atomic_t limits;
	struct completion limit;
};

static void srq_event(struct ib_event *event, void *context)
{
	struct shared *s = context;

	if (event->event != IB_EVENT_SRQ_LIMIT_REACHED)
		return;
	atomic_inc(&s->limits);
	complete(&s->limit);
}

static void end_srq(void *srq)
{
	ib_destroy_srq(srq);
}

static struct shared *shared_new(struct kunit *test)
{
	struct kv *kv = test->priv;
	struct shared *s = kunit_kzalloc(test, sizeof(*s), GFP_KERNEL);
	struct ib_srq_init_attr attr = {
		.event_handler = srq_event,
		.srq_context = s,
		.attr = { .max_wr = SRQ_DEPTH, .max_sge = 2 },
		.srq_type = IB_SRQT_BASIC,
	};

	KUNIT_ASSERT_NOT_NULL(test, s);
	if (!kv->dev->attrs.max_srq) {
		KUNIT_EXPECT_EQ(test, -EOPNOTSUPP, PTR_ERR_OR_ZERO(ib_create_srq(kv->pd, &attr)));
		kunit_skip(test, "the device has no SRQs");
	}
	s->buf = kv_buf(test, SRQ_DEPTH * KV_LEN);
	init_completion(&s->limit);
	s->srq = ib_create_srq(kv->pd, &attr);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, s->srq);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, end_srq, s->srq));
	return s;
}

/* Posts receives with the numbers first to first + count - 1, each with memory of its own. */
static void post(struct kunit *test, struct shared *s, u64 first, unsigned int count)
{
	struct ib_recv_wr wrs[SRQ_DEPTH] = {};
	struct ib_sge sges[SRQ_DEPTH];
	unsigned int i;

	for (i = 0; i < count; i++) {
		sges[i] = kv_sge(test->priv, s->buf, (first + i) % SRQ_DEPTH * KV_LEN, KV_LEN);
		wrs[i].wr_id = first + i;
		wrs[i].sg_list = &sges[i];
		wrs[i].num_sge = 1;
		wrs[i].next = i + 1 < count ? &wrs[i + 1] : NULL;
	}
	KUNIT_ASSERT_EQ(test, 0, ib_post_srq_recv(s->srq, wrs, NULL));
}

/* A connection. Its QP @to receives from an SRQ if there is one. */
struct link {
	struct kv_qp *from;
	struct kv_qp *to;
};

static struct link link_new(struct kunit *test, enum ib_qp_type type, struct ib_srq *srq)
{
	struct link l = {
		.from = kv_qp(test, type, kv_cq(test, KV_DEPTH), NULL),
		.to = kv_qp(test, type, kv_cq(test, KV_DEPTH), srq),
	};

	kv_pair(test, l.from, l.to);
	return l;
}

static void send(struct kunit *test, struct link *l, struct kv_buf *buf, u64 id)
{
	struct ib_sge sge = kv_sge(test->priv, buf, 0, KV_LEN);
	struct kv_op op = {
		.id = id,
		.opcode = IB_WR_SEND,
		.flags = IB_SEND_SIGNALED,
		.sge = &sge,
		.num_sge = 1,
	};

	KUNIT_ASSERT_EQ(test, 0, kv_post(l->from, &op));
}

/* Two connections take receives of one SRQ in the order in which these were posted. */
static void shared(struct kunit *test)
{
	struct shared *s = shared_new(test);
	struct link links[2] = {
		link_new(test, IB_QPT_RC, s->srq),
		link_new(test, IB_QPT_UC, s->srq),
	};
	struct kv_buf *buf = kv_buf(test, KV_LEN);
	unsigned int round;
	struct ib_wc wc;

	post(test, s, 0, SRQ_DEPTH);
	for (round = 0; round < kv_rounds; round++) {
		struct link *l = &links[round % 2];

		kv_fill(buf->data, KV_LEN, round);
		send(test, l, buf, round);
		kv_expect(test, l->from->cq, round, IB_WC_SUCCESS);
		wc = kv_expect(test, l->to->cq, round, IB_WC_SUCCESS);
		KUNIT_EXPECT_PTR_EQ(test, wc.qp, l->to->qp);
		KUNIT_EXPECT_TRUE(test, kv_filled(s->buf->data + round % SRQ_DEPTH * KV_LEN,
						  KV_LEN, round));
		post(test, s, round + SRQ_DEPTH, 1);
	}
}

/* An SRQ takes as many receives as it was created for. A QP with an SRQ takes no receives. */
static void bounds(struct kunit *test)
{
	struct shared *s = shared_new(test);
	struct link l = link_new(test, IB_QPT_RC, s->srq);
	struct kv *kv = test->priv;
	struct ib_srq_attr attr = {};
	struct ib_sge sges[3] = {
		kv_sge(kv, s->buf, 0, 1), kv_sge(kv, s->buf, 1, 1), kv_sge(kv, s->buf, 2, 1),
	};
	struct ib_recv_wr wr = { .sg_list = sges, .num_sge = 3 };
	const struct ib_recv_wr *bad = NULL;
	struct ib_srq_init_attr init = { .srq_type = IB_SRQT_BASIC };
	int i;

	KUNIT_EXPECT_EQ(test, 0, ib_query_srq(s->srq, &attr));
	KUNIT_EXPECT_EQ(test, attr.max_wr, SRQ_DEPTH);
	KUNIT_EXPECT_EQ(test, attr.max_sge, 2);
	KUNIT_EXPECT_EQ(test, attr.srq_limit, 0);
	KUNIT_EXPECT_EQ(test, -EINVAL, ib_post_srq_recv(s->srq, &wr, &bad));
	KUNIT_EXPECT_PTR_EQ(test, bad, (const struct ib_recv_wr *)&wr);
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_recv(l.to, 1, sges, 1));
	wr.num_sge = 1;
	for (i = 0; i < SRQ_DEPTH; i++)
		KUNIT_ASSERT_EQ(test, 0, ib_post_srq_recv(s->srq, &wr, NULL));
	KUNIT_EXPECT_EQ(test, -ENOMEM, ib_post_srq_recv(s->srq, &wr, &bad));

	init.attr.max_wr = kv->dev->attrs.max_srq_wr + 1;
	KUNIT_EXPECT_EQ(test, -EINVAL, PTR_ERR_OR_ZERO(ib_create_srq(kv->pd, &init)));
	init.attr.max_wr = 1;
	init.attr.max_sge = kv->dev->attrs.max_srq_sge + 1;
	KUNIT_EXPECT_EQ(test, -EINVAL, PTR_ERR_OR_ZERO(ib_create_srq(kv->pd, &init)));
	/* The core does not resize SRQs of the kernel, whose consumers cannot stop posting. */
	attr.max_wr = 2 * SRQ_DEPTH;
	KUNIT_EXPECT_EQ(test, -EOPNOTSUPP, ib_modify_srq(s->srq, &attr, IB_SRQ_MAX_WR));
}

/* Each limit that is set raises one event, when fewer receives than that are left. */
static void limit(struct kunit *test)
{
	struct shared *s = shared_new(test);
	struct link l = link_new(test, IB_QPT_RC, s->srq);
	struct kv_buf *buf = kv_buf(test, KV_LEN);
	struct ib_srq_attr attr = { .srq_limit = 3 };
	u64 id;

	post(test, s, 0, 5);
	KUNIT_ASSERT_EQ(test, 0, ib_modify_srq(s->srq, &attr, IB_SRQ_LIMIT));
	KUNIT_EXPECT_EQ(test, 0, ib_query_srq(s->srq, &attr));
	KUNIT_EXPECT_EQ(test, attr.srq_limit, 3);
	for (id = 0; id < 5; id++) {
		KUNIT_EXPECT_LE(test, atomic_read(&s->limits), id > 2);
		send(test, &l, buf, id);
		kv_expect(test, l.from->cq, id, IB_WC_SUCCESS);
		kv_expect(test, l.to->cq, id, IB_WC_SUCCESS);
	}
	KUNIT_EXPECT_TRUE(test, wait_for_completion_timeout(&s->limit, KV_HANG));
	KUNIT_EXPECT_EQ(test, 0, ib_query_srq(s->srq, &attr));
	KUNIT_EXPECT_EQ(test, attr.srq_limit, 0);
	KUNIT_EXPECT_EQ(test, atomic_read(&s->limits), 1);

	/* The event comes at once if fewer receives are left when the limit is set. */
	attr.srq_limit = 1;
	KUNIT_ASSERT_EQ(test, 0, ib_modify_srq(s->srq, &attr, IB_SRQ_LIMIT));
	KUNIT_EXPECT_TRUE(test, wait_for_completion_timeout(&s->limit, KV_HANG));
	KUNIT_EXPECT_EQ(test, atomic_read(&s->limits), 2);
	attr.srq_limit = SRQ_DEPTH + 1;
	KUNIT_EXPECT_EQ(test, -EINVAL, ib_modify_srq(s->srq, &attr, IB_SRQ_LIMIT));
}

/* The other QPs can take the receives that a QP in error did not take. */
static void last_wqe(struct kunit *test)
{
	struct shared *s = shared_new(test);
	struct link one = link_new(test, IB_QPT_RC, s->srq);
	struct link other = link_new(test, IB_QPT_RC, s->srq);
	struct kv_buf *buf = kv_buf(test, KV_LEN);
	u64 id;

	post(test, s, 0, 4);
	send(test, &one, buf, 0);
	kv_expect(test, one.from->cq, 0, IB_WC_SUCCESS);
	KUNIT_ASSERT_EQ(test, 0, kv_modify(one.to, IB_QPS_ERR));
	kv_expect_event(test, one.to, IB_EVENT_QP_LAST_WQE_REACHED);
	kv_expect(test, one.to->cq, 0, IB_WC_SUCCESS);
	kv_expect_none(test, one.to->cq);
	for (id = 1; id < 4; id++) {
		send(test, &other, buf, id);
		kv_expect(test, other.from->cq, id, IB_WC_SUCCESS);
		kv_expect(test, other.to->cq, id, IB_WC_SUCCESS);
	}
}

/*
 * A QP is destroyed before its completions are polled: the completions are gone, and the
 * places of their receives in the SRQ are free again.
 */
static void destroyed(struct kunit *test)
{
	struct shared *s = shared_new(test);
	struct kv_buf *buf = kv_buf(test, KV_LEN);
	struct link l;
	u64 round, i;

	for (round = 0; round < 3; round++) {
		l = link_new(test, IB_QPT_RC, s->srq);
		post(test, s, 0, SRQ_DEPTH);
		for (i = 0; i < SRQ_DEPTH; i++) {
			send(test, &l, buf, i);
			kv_expect(test, l.from->cq, i, IB_WC_SUCCESS);
		}
		kv_destroy_qp_now(test, l.to);
		kv_expect_none(test, l.to->cq);
	}
}

/* ib_drain_qp() of a QP with an SRQ returns when the QP has taken its last work request. */
static void drained(struct kunit *test)
{
	static const enum ib_poll_context polls[] = {
		IB_POLL_DIRECT, IB_POLL_SOFTIRQ, IB_POLL_WORKQUEUE,
	};
	struct shared *s = shared_new(test);
	struct kv_wr send, recv;
	struct kv_qp *from, *to;
	struct ib_recv_wr wr = {};
	struct ib_cq *cq;
	struct kv_op op = { .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };
	int i;

	for (i = 0; i < ARRAY_SIZE(polls); i++) {
		cq = kv_cq_in(test, polls[i]);
		from = kv_qp(test, IB_QPT_RC, cq, NULL);
		to = kv_qp(test, IB_QPT_RC, cq, s->srq);
		kv_pair(test, from, to);
		kv_wr_init(&send, NULL);
		kv_wr_init(&recv, NULL);
		wr.wr_cqe = &recv.cqe;
		op.id = kv_wr_id(&send);
		KUNIT_ASSERT_EQ(test, 0, ib_post_srq_recv(s->srq, &wr, NULL));
		KUNIT_ASSERT_EQ(test, 0, kv_post(from, &op));
		KUNIT_EXPECT_TRUE(test, kv_wait(cq, &send.done));
		/* The receive has completed, or completes soon. */
		ib_drain_qp(to->qp);
		kv_expect_event(test, to, IB_EVENT_QP_LAST_WQE_REACHED);
		KUNIT_EXPECT_TRUE(test, kv_wait(cq, &recv.done));
		KUNIT_EXPECT_EQ(test, recv.wc.status, IB_WC_SUCCESS);
		ib_drain_qp(from->qp);
	}
}

struct kunit_case kv_srq_cases[] = {
	KUNIT_CASE(shared),
	KUNIT_CASE(bounds),
	KUNIT_CASE(limit),
	KUNIT_CASE(last_wqe),
	KUNIT_CASE(destroyed),
	KUNIT_CASE(drained),
	{}
};
