// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of posting and polling in every context that verbs allow: callbacks of
 * earlier work requests, timers, code with interrupts disabled, and several
 * threads at a time.
 */
#include <linux/hrtimer.h>
#include <linux/irqflags.h>
#include <linux/spinlock.h>
#include <linux/timer.h>
#include <linux/workqueue.h>

#include "kverbs.h"

#define SLOTS	16

/* A work request at either end, with memory for its message. */
struct slot {
	struct ib_cqe cqe;
	struct stream *stream;
	u8 *data;
	struct ib_sge sge;
};

/* Messages from one QP to another. Callbacks post them and check them. */
struct stream {
	struct kv_qp *from;
	struct kv_qp *to;
	struct slot out[SLOTS];
	struct slot in[SLOTS];
	unsigned int want;
	/* Protects @sent, and keeps the messages in the order of their numbers. */
	spinlock_t lock;
	unsigned int sent;
	/* Only the callbacks of one CQ use each of these, and they run one at a time. */
	unsigned int completed;
	unsigned int received;
	/* The first error, or NULL. */
	const char *error;
	struct completion all_sent;
	struct completion all_received;
};

static void stream_fails(struct stream *s, const char *error)
{
	cmpxchg(&s->error, NULL, error);
	complete_all(&s->all_sent);
	complete_all(&s->all_received);
}

/* Sends the next message from a free slot, unless all were sent. */
static void stream_send(struct stream *s, struct slot *slot)
{
	struct kv_op op = {
		.id = (uintptr_t)&slot->cqe,
		.opcode = IB_WR_SEND_WITH_IMM,
		.flags = IB_SEND_SIGNALED,
		.sge = &slot->sge,
		.num_sge = 1,
	};
	unsigned long flags;
	int ret = 0;

	spin_lock_irqsave(&s->lock, flags);
	if (s->sent != s->want) {
		kv_fill(slot->data, KV_LEN, s->sent);
		op.imm_data = cpu_to_be32(s->sent++);
		ret = kv_post(s->from, &op);
	}
	spin_unlock_irqrestore(&s->lock, flags);
	if (ret)
		stream_fails(s, "a send is refused");
}

static void stream_sent(struct ib_cq *cq, struct ib_wc *wc)
{
	struct slot *slot = container_of(wc->wr_cqe, struct slot, cqe);
	struct stream *s = slot->stream;

	if (wc->status != IB_WC_SUCCESS) {
		stream_fails(s, "a send fails");
		return;
	}
	if (++s->completed == s->want)
		complete(&s->all_sent);
	else
		stream_send(s, slot);
}

static int stream_receive(struct stream *s, struct slot *slot)
{
	return kv_recv(s->to, (uintptr_t)&slot->cqe, &slot->sge, 1);
}

static void stream_received(struct ib_cq *cq, struct ib_wc *wc)
{
	struct slot *slot = container_of(wc->wr_cqe, struct slot, cqe);
	struct stream *s = slot->stream;

	if (wc->status == IB_WC_WR_FLUSH_ERR)
		return;
	if (wc->status != IB_WC_SUCCESS)
		stream_fails(s, "a receive fails");
	else if (!(wc->wc_flags & IB_WC_WITH_IMM) || be32_to_cpu(wc->ex.imm_data) != s->received)
		stream_fails(s, "a message is out of order");
	else if (wc->byte_len != KV_LEN || !kv_filled(slot->data, KV_LEN, s->received))
		stream_fails(s, "a message has other data");
	else if (++s->received == s->want)
		complete(&s->all_received);
	else if (stream_receive(s, slot))
		stream_fails(s, "a receive is refused");
}

static void slot_init(struct stream *s, struct slot *slot, struct kv_buf *buf, int i,
		      void (*done)(struct ib_cq *cq, struct ib_wc *wc))
{
	slot->cqe.done = done;
	slot->stream = s;
	slot->data = buf->data + i * KV_LEN;
	slot->sge = kv_sge(s->from->kv, buf, i * KV_LEN, KV_LEN);
}

/* Makes a stream of messages between two QPs that are connected. */
static struct stream *stream_new(struct kunit *test, struct kv_qp *from, struct kv_qp *to,
				 unsigned int want)
{
	struct stream *s = kunit_kzalloc(test, sizeof(*s), GFP_KERNEL);
	struct kv_buf *buf = kv_buf(test, 2 * SLOTS * KV_LEN);
	int i;

	KUNIT_ASSERT_NOT_NULL(test, s);
	s->from = from;
	s->to = to;
	s->want = want;
	spin_lock_init(&s->lock);
	init_completion(&s->all_sent);
	init_completion(&s->all_received);
	for (i = 0; i < SLOTS; i++) {
		slot_init(s, &s->out[i], buf, i, stream_sent);
		slot_init(s, &s->in[i], buf, SLOTS + i, stream_received);
	}
	return s;
}

static void stream_start(struct kunit *test, struct stream *s)
{
	int i;

	for (i = 0; i < SLOTS; i++)
		KUNIT_ASSERT_EQ(test, 0, stream_receive(s, &s->in[i]));
	/* Each slot has at most one message outstanding. The callbacks post the other messages. */
	for (i = 0; i < SLOTS; i++)
		stream_send(s, &s->out[i]);
}

static bool stream_is_over(struct stream *s)
{
	return s->error || (s->completed == s->want && s->received == s->want);
}

static void stream_end(struct kunit *test, struct stream *s)
{
	KUNIT_EXPECT_TRUE(test, kv_wait(s->to->cq, &s->all_received));
	KUNIT_EXPECT_TRUE(test, kv_wait(s->from->cq, &s->all_sent));
	KUNIT_EXPECT_STREQ(test, s->error ?: "", "");
	KUNIT_EXPECT_EQ(test, s->received, s->want);
}

struct context {
	const char *name;
	enum ib_poll_context poll;
};

static const struct context polls[] = {
	{ "direct", IB_POLL_DIRECT },
	{ "softirq", IB_POLL_SOFTIRQ },
	{ "workqueue", IB_POLL_WORKQUEUE },
	{ "unbound_workqueue", IB_POLL_UNBOUND_WORKQUEUE },
};

KUNIT_ARRAY_PARAM_DESC(polls, polls, name);

/* Sends messages in both directions at once. Each callback posts the next message. */
static void poll_context(struct kunit *test)
{
	const struct context *context = test->param_value;
	unsigned long end = jiffies + KV_HANG;
	struct stream *there, *back;
	struct kv_qp *qps[2];
	int i;

	for (i = 0; i < 2; i++)
		qps[i] = kv_qp(test, IB_QPT_RC, kv_cq_in(test, context->poll), NULL);
	kv_pair(test, qps[0], qps[1]);
	there = stream_new(test, qps[0], qps[1], kv_rounds);
	back = stream_new(test, qps[1], qps[0], kv_rounds);
	stream_start(test, there);
	stream_start(test, back);
	/* Each direction needs both CQs. */
	while (context->poll == IB_POLL_DIRECT && time_before(jiffies, end) &&
	       !(stream_is_over(there) && stream_is_over(back))) {
		ib_process_cq_direct(qps[0]->cq, 4);
		ib_process_cq_direct(qps[1]->cq, 4);
		cond_resched();
	}
	stream_end(test, there);
	stream_end(test, back);
	/* After this no callback runs, so the memory of the test can be freed. */
	for (i = 0; i < 2; i++)
		ib_drain_qp(qps[i]->qp);
}

/* Work requests that timers or other contexts post, and their completions. */
struct timed {
	struct timer_list soft;
	struct hrtimer hard;
	struct kv_qp *qp;
	struct kv_op op;
	struct ib_cq *cq;
	unsigned int left;
	unsigned int polled;
	int error;
	struct completion done;
};

/* Polls, and posts a work request. Returns false when all have completed, or one has failed. */
static bool timed_step(struct timed *t)
{
	struct ib_wc wc;

	while (ib_poll_cq(t->cq, 1, &wc) == 1) {
		t->polled++;
		if (wc.status != IB_WC_SUCCESS)
			t->error = -EIO;
	}
	/* No more work requests are outstanding than half of what the queue holds. */
	if (t->left && !t->error && t->op.id - t->polled < KV_DEPTH / 2) {
		t->error = kv_post(t->qp, &t->op);
		t->op.id++;
		t->left--;
	}
	if (t->error || (!t->left && t->polled == t->op.id)) {
		complete(&t->done);
		return false;
	}
	return true;
}

static void soft_timer(struct timer_list *timer)
{
	struct timed *t = timer_container_of(t, timer, soft);

	if (timed_step(t))
		mod_timer(timer, jiffies + 1);
}

static enum hrtimer_restart hard_timer(struct hrtimer *timer)
{
	struct timed *t = container_of(timer, struct timed, hard);

	if (!timed_step(t))
		return HRTIMER_NORESTART;
	hrtimer_forward_now(timer, us_to_ktime(500));
	return HRTIMER_RESTART;
}

static void end_soft_timer(void *timer)
{
	timer_shutdown_sync(timer);
}

static void end_hard_timer(void *timer)
{
	hrtimer_cancel(timer);
}

/* Makes a pair of QPs, and the WRITE from the first one to memory of the other. */
static struct timed *timed_new(struct kunit *test)
{
	struct timed *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);
	struct kv *kv = test->priv;
	struct kv_buf *buf = kv_buf(test, 2 * PAGE_SIZE);
	struct kv_qp *peer = kv_qp(test, IB_QPT_RC, kv_cq(test, KV_DEPTH), NULL);
	struct kv_remote remote;
	struct ib_sge *sge = kunit_kzalloc(test, sizeof(*sge), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, t);
	KUNIT_ASSERT_NOT_NULL(test, sge);
	t->cq = kv_cq(test, 2 * KV_DEPTH);
	t->qp = kv_qp(test, IB_QPT_RC, t->cq, NULL);
	kv_pair(test, t->qp, peer);
	remote = kv_expose(test, peer, buf, PAGE_SIZE, IB_ACCESS_REMOTE_WRITE);
	kv_fill(buf->data, KV_LEN, 5);
	*sge = kv_sge(kv, buf, 0, KV_LEN);
	t->op = (struct kv_op) {
		.opcode = IB_WR_RDMA_WRITE,
		.flags = IB_SEND_SIGNALED,
		.sge = sge,
		.num_sge = 1,
		.remote_addr = remote.addr,
		.rkey = remote.rkey,
	};
	t->left = KV_DEPTH;
	init_completion(&t->done);
	return t;
}

static void timed_end(struct kunit *test, struct timed *t)
{
	KUNIT_EXPECT_TRUE(test, wait_for_completion_timeout(&t->done, KV_HANG));
	KUNIT_EXPECT_EQ(test, t->error, 0);
	KUNIT_EXPECT_EQ(test, t->polled, KV_DEPTH);
}

/* Posts and polls in softirq context. */
static void timer(struct kunit *test)
{
	struct timed *t = timed_new(test);

	timer_setup(&t->soft, soft_timer, 0);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, end_soft_timer, &t->soft));
	mod_timer(&t->soft, jiffies + 1);
	timed_end(test, t);
}

/* Posts and polls in hardirq context, if the kernel runs these timers in that context. */
static void hardirq(struct kunit *test)
{
	struct timed *t = timed_new(test);

	hrtimer_setup(&t->hard, hard_timer, CLOCK_MONOTONIC, HRTIMER_MODE_REL);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, end_hard_timer, &t->hard));
	hrtimer_start(&t->hard, us_to_ktime(500), HRTIMER_MODE_REL);
	timed_end(test, t);
}

/* Posts and polls with interrupts disabled, as a consumer does that holds a lock. */
static void irqs_off(struct kunit *test)
{
	struct timed *t = timed_new(test);
	unsigned long end = jiffies + KV_HANG;
	unsigned long flags;
	bool more;

	do {
		local_irq_save(flags);
		more = timed_step(t);
		local_irq_restore(flags);
		cond_resched();
	} while (more && time_before(jiffies, end));
	timed_end(test, t);
}

#define THREADS	4

KUNIT_DEFINE_ACTION_WRAPPER(end_workqueue, destroy_workqueue, struct workqueue_struct *);

/* One of several threads that post to the same QP. */
struct poster {
	struct work_struct work;
	struct kv_qp *qp;
	struct kv_op op;
	struct kv_wr wrs[KV_DEPTH / THREADS];
	int error;
};

static void post_all(struct work_struct *work)
{
	struct poster *p = container_of(work, struct poster, work);
	int i;

	for (i = 0; i < ARRAY_SIZE(p->wrs) && !p->error; i++) {
		p->op.id = kv_wr_id(&p->wrs[i]);
		p->error = kv_post(p->qp, &p->op);
	}
}

/* Several threads post to one QP at a time. Each work request completes once. */
static void concurrent(struct kunit *test)
{
	struct workqueue_struct *wq = alloc_workqueue("kverbs", WQ_UNBOUND, THREADS);
	struct ib_cq *cq = kv_cq_in(test, IB_POLL_SOFTIRQ);
	struct kv_qp *qp = kv_qp(test, IB_QPT_RC, cq, NULL);
	struct poster *posters;
	struct timed *t;
	unsigned int round;
	atomic_t count;
	int i, j;

	KUNIT_ASSERT_NOT_NULL(test, wq);
	KUNIT_ASSERT_EQ(test, 0, kunit_add_action_or_reset(test, end_workqueue, wq));
	posters = kunit_kcalloc(test, THREADS, sizeof(*posters), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, posters);
	t = timed_new(test);
	kv_pair(test, qp, qp);
	for (round = 0; round < DIV_ROUND_UP(kv_rounds, KV_DEPTH); round++) {
		atomic_set(&count, 0);
		for (i = 0; i < THREADS; i++) {
			posters[i].qp = qp;
			posters[i].op = t->op;
			for (j = 0; j < ARRAY_SIZE(posters[i].wrs); j++)
				kv_wr_init(&posters[i].wrs[j], &count);
			INIT_WORK(&posters[i].work, post_all);
			queue_work(wq, &posters[i].work);
		}
		flush_workqueue(wq);
		for (i = 0; i < THREADS; i++) {
			KUNIT_EXPECT_EQ(test, posters[i].error, 0);
			for (j = 0; j < ARRAY_SIZE(posters[i].wrs); j++) {
				KUNIT_ASSERT_TRUE(test, kv_wait(cq, &posters[i].wrs[j].done));
				KUNIT_ASSERT_EQ(test, posters[i].wrs[j].wc.status, IB_WC_SUCCESS);
			}
			/* The work requests of a thread complete in the order of posting. */
			for (j = 1; j < ARRAY_SIZE(posters[i].wrs); j++)
				KUNIT_EXPECT_LT(test, posters[i].wrs[j - 1].order,
						posters[i].wrs[j].order);
		}
		KUNIT_EXPECT_EQ(test, atomic_read(&count), KV_DEPTH);
	}
	ib_drain_qp(qp->qp);
}

/* The completion events of a CQ that its consumer arms. */
struct armed {
	atomic_t calls;
	struct completion called;
};

static void armed_called(struct ib_cq *cq, void *context)
{
	struct armed *armed = context;

	atomic_inc(&armed->calls);
	complete(&armed->called);
}

/* A CQ raises one event each time it is armed, for any completion or for a solicited one. */
static void events(struct kunit *test)
{
	struct kv *kv = test->priv;
	struct armed *armed = kunit_kzalloc(test, sizeof(*armed), GFP_KERNEL);
	struct kv_buf *buf = kv_buf(test, 2 * KV_LEN);
	struct ib_sge out = kv_sge(kv, buf, 0, KV_LEN);
	struct ib_sge in = kv_sge(kv, buf, KV_LEN, KV_LEN);
	struct kv_op op = {
		.opcode = IB_WR_SEND,
		.flags = IB_SEND_SIGNALED,
		.sge = &out,
		.num_sge = 1,
	};
	struct kv_qp *from, *to;
	struct ib_cq *cq;
	u64 id;

	KUNIT_ASSERT_NOT_NULL(test, armed);
	init_completion(&armed->called);
	cq = kv_cq_with(test, KV_DEPTH, armed_called, NULL, armed);
	from = kv_qp(test, IB_QPT_RC, kv_cq(test, KV_DEPTH), NULL);
	to = kv_qp(test, IB_QPT_RC, cq, NULL);
	kv_pair(test, from, to);

	/* The CQ is armed for any completion. */
	KUNIT_EXPECT_EQ(test, 0, ib_req_notify_cq(cq, IB_CQ_NEXT_COMP));
	for (id = 0; id < 4; id++)
		KUNIT_ASSERT_EQ(test, 0, kv_recv(to, id, &in, 1));
	op.id = 0;
	KUNIT_ASSERT_EQ(test, 0, kv_post(from, &op));
	KUNIT_EXPECT_TRUE(test, wait_for_completion_timeout(&armed->called, KV_HANG));
	kv_expect(test, from->cq, 0, IB_WC_SUCCESS);

	/* ib_req_notify_cq() reports a completion that is in the CQ already. */
	KUNIT_EXPECT_GT(test, ib_req_notify_cq(cq, IB_CQ_SOLICITED | IB_CQ_REPORT_MISSED_EVENTS),
			0);
	kv_expect(test, cq, 0, IB_WC_SUCCESS);

	/* The CQ is armed for solicited completions: it raises no event for another one. */
	op.id = 1;
	KUNIT_ASSERT_EQ(test, 0, kv_post(from, &op));
	kv_expect(test, from->cq, 1, IB_WC_SUCCESS);
	kv_expect(test, cq, 1, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, atomic_read(&armed->calls), 1);
	op.id = 2;
	op.flags |= IB_SEND_SOLICITED;
	KUNIT_ASSERT_EQ(test, 0, kv_post(from, &op));
	KUNIT_EXPECT_TRUE(test, wait_for_completion_timeout(&armed->called, KV_HANG));
	kv_expect(test, from->cq, 2, IB_WC_SUCCESS);
	kv_expect(test, cq, 2, IB_WC_SUCCESS);

	/* A completion in error counts as solicited. */
	KUNIT_EXPECT_EQ(test, 0, ib_req_notify_cq(cq, IB_CQ_SOLICITED));
	KUNIT_ASSERT_EQ(test, 0, kv_modify(to, IB_QPS_ERR));
	KUNIT_EXPECT_TRUE(test, wait_for_completion_timeout(&armed->called, KV_HANG));
	kv_expect(test, cq, 3, IB_WC_WR_FLUSH_ERR);
	KUNIT_EXPECT_EQ(test, atomic_read(&armed->calls), 3);
}

struct kunit_case kv_context_cases[] = {
	KUNIT_CASE_PARAM(poll_context, polls_gen_params),
	KUNIT_CASE(timer),
	KUNIT_CASE(hardirq),
	KUNIT_CASE(irqs_off),
	KUNIT_CASE(concurrent),
	KUNIT_CASE(events),
	{}
};
