// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of what each operation does to memory, and of work requests that are
 * refused when they are posted.
 */
#include <rdma/ib_cache.h>

#include "kverbs.h"

/* Two connected QPs, each with a CQ, and memory at both ends. */
struct ends {
	struct kv_qp *a;
	struct kv_qp *b;
	struct kv_buf *here;
	struct kv_buf *there;
	/* All of @there, with the address and the key that @a uses. */
	struct kv_remote remote;
};

static struct ends ends_of(struct kunit *test, struct kv_qp *a, struct kv_qp *b)
{
	struct ends e = {
		.a = a,
		.b = b,
		.here = kv_buf(test, PAGE_SIZE),
		.there = kv_buf(test, PAGE_SIZE),
	};

	kv_pair(test, e.a, e.b);
	return e;
}

static struct ends ends_new(struct kunit *test, enum ib_qp_type type)
{
	return ends_of(test, kv_qp(test, type, kv_cq(test, 2 * KV_DEPTH), NULL),
		       kv_qp(test, type, kv_cq(test, 2 * KV_DEPTH), NULL));
}

static void ends_expose(struct kunit *test, struct ends *e, int access)
{
	e->remote = kv_expose(test, e->b, e->there, 0, access);
}

/* Points a work request of QP a at this offset of the memory that ends_expose() exposed. */
static void ends_aim(struct ends *e, struct kv_op *op, size_t offset)
{
	op->rkey = e->remote.rkey;
	op->remote_addr = e->remote.addr + offset;
}

/* Posts a work request to QP a, and waits for its completion, which must have this status. */
static struct ib_wc does(struct kunit *test, struct ends *e, struct kv_op *op,
			 enum ib_wc_status status)
{
	op->flags |= IB_SEND_SIGNALED;
	KUNIT_ASSERT_EQ(test, 0, kv_post(e->a, op));
	return kv_expect(test, e->a->cq, op->id, status);
}

struct type {
	const char *name;
	enum ib_qp_type type;
};

static const struct type types[] = {
	{ "rc", IB_QPT_RC },
	{ "uc", IB_QPT_UC },
};

KUNIT_ARRAY_PARAM_DESC(types, types, name);

static enum ib_qp_type type_of(struct kunit *test)
{
	const struct type *param = test->param_value;

	return param->type;
}

/* A SEND moves data from several SGEs to several others, with and without immediate data. */
static void send(struct kunit *test)
{
	struct ends e = ends_new(test, type_of(test));
	struct kv *kv = test->priv;
	struct ib_sge out[3] = {
		kv_sge(kv, e.here, 0, 100),
		kv_sge(kv, e.here, 100, 0),
		kv_sge(kv, e.here, 100, 156),
	};
	struct ib_sge in[2] = {
		kv_sge(kv, e.there, 1, 31),
		kv_sge(kv, e.there, 32, 1000),
	};
	struct kv_op op = {
		.id = 1,
		.opcode = IB_WR_SEND,
		.sge = out,
		.num_sge = 3,
		.imm_data = cpu_to_be32(0x12345678),
	};
	struct ib_wc wc;

	kv_fill(e.here->data, 256, 3);
	KUNIT_ASSERT_EQ(test, 0, kv_recv(e.b, 2, in, 2));
	wc = does(test, &e, &op, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_SEND);
	KUNIT_EXPECT_PTR_EQ(test, wc.qp, e.a->qp);
	wc = kv_expect(test, e.b->cq, 2, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_RECV);
	KUNIT_EXPECT_EQ(test, wc.byte_len, 256);
	KUNIT_EXPECT_EQ(test, wc.wc_flags & (IB_WC_WITH_IMM | IB_WC_WITH_INVALIDATE), 0);
	KUNIT_EXPECT_PTR_EQ(test, wc.qp, e.b->qp);
	KUNIT_EXPECT_TRUE(test, kv_filled(e.there->data + 1, 256, 3));
	KUNIT_EXPECT_EQ(test, e.there->data[0], 0);
	KUNIT_EXPECT_EQ(test, e.there->data[257], 0);

	/* A message without bytes carries immediate data. */
	op.opcode = IB_WR_SEND_WITH_IMM;
	op.num_sge = 0;
	KUNIT_ASSERT_EQ(test, 0, kv_recv(e.b, 3, NULL, 0));
	does(test, &e, &op, IB_WC_SUCCESS);
	wc = kv_expect(test, e.b->cq, 3, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.byte_len, 0);
	KUNIT_EXPECT_EQ(test, wc.wc_flags & IB_WC_WITH_IMM, IB_WC_WITH_IMM);
	KUNIT_EXPECT_EQ(test, be32_to_cpu(wc.ex.imm_data), 0x12345678);
}

/* An RDMA WRITE moves data, with and without immediate data. */
static void write(struct kunit *test)
{
	struct ends e = ends_new(test, type_of(test));
	struct kv *kv = test->priv;
	struct ib_sge out = kv_sge(kv, e.here, 0, 500);
	struct kv_op op = {
		.id = 1,
		.opcode = IB_WR_RDMA_WRITE,
		.sge = &out,
		.num_sge = 1,
		.imm_data = cpu_to_be32(77),
	};
	struct ib_wc wc;

	ends_expose(test, &e, IB_ACCESS_REMOTE_WRITE);
	ends_aim(&e, &op, 8);
	kv_fill(e.here->data, 500, 4);
	wc = does(test, &e, &op, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_RDMA_WRITE);

	kv_fill(e.here->data, 500, 5);
	op.opcode = IB_WR_RDMA_WRITE_WITH_IMM;
	ends_aim(&e, &op, 1000);
	KUNIT_ASSERT_EQ(test, 0, kv_recv(e.b, 2, NULL, 0));
	does(test, &e, &op, IB_WC_SUCCESS);
	wc = kv_expect(test, e.b->cq, 2, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_RECV_RDMA_WITH_IMM);
	KUNIT_EXPECT_EQ(test, be32_to_cpu(wc.ex.imm_data), 77);
	KUNIT_EXPECT_EQ(test, wc.byte_len, 500);
	KUNIT_EXPECT_TRUE(test, kv_filled(e.there->data + 8, 500, 4));
	KUNIT_EXPECT_TRUE(test, kv_filled(e.there->data + 1000, 500, 5));
	kv_expect_none(test, e.b->cq);
}

/* An RDMA READ moves data to several SGEs. */
static void read(struct kunit *test)
{
	struct ends e = ends_new(test, IB_QPT_RC);
	struct kv *kv = test->priv;
	struct ib_sge in[2] = { kv_sge(kv, e.here, 0, 200), kv_sge(kv, e.here, 200, 301) };
	struct kv_op op = {
		.id = 1,
		.opcode = IB_WR_RDMA_READ,
		.sge = in,
		.num_sge = 2,
	};
	struct ib_wc wc;

	ends_expose(test, &e, IB_ACCESS_REMOTE_READ);
	ends_aim(&e, &op, 77);
	kv_fill(e.there->data + 77, 501, 6);
	wc = does(test, &e, &op, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_RDMA_READ);
	KUNIT_EXPECT_TRUE(test, kv_filled(e.here->data, 501, 6));
	KUNIT_EXPECT_EQ(test, e.here->data[501], 0);
}

/* FETCH AND ADD and COMPARE AND SWAP return the old value and change the word. */
static void atomics(struct kunit *test)
{
	struct ends e = ends_new(test, IB_QPT_RC);
	struct kv *kv = test->priv;
	struct ib_sge in = kv_sge(kv, e.here, 0, 8);
	u64 *old = (u64 *)e.here->data;
	u64 *word = (u64 *)(e.there->data + 16);
	struct kv_op op = {
		.id = 1,
		.sge = &in,
		.num_sge = 1,
	};
	struct ib_wc wc;

	if (kv->dev->attrs.atomic_cap == IB_ATOMIC_NONE)
		kunit_skip(test, "the device has no atomic operations");
	ends_expose(test, &e, IB_ACCESS_REMOTE_ATOMIC);
	ends_aim(&e, &op, 16);
	*word = 40;
	op.opcode = IB_WR_ATOMIC_FETCH_AND_ADD;
	op.compare_add = 2;
	wc = does(test, &e, &op, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_FETCH_ADD);
	KUNIT_EXPECT_EQ(test, *old, 40ULL);
	KUNIT_EXPECT_EQ(test, *word, 42ULL);

	op.opcode = IB_WR_ATOMIC_CMP_AND_SWP;
	op.compare_add = 41;
	op.swap = 1;
	wc = does(test, &e, &op, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_COMP_SWAP);
	KUNIT_EXPECT_EQ(test, *old, 42ULL);
	KUNIT_EXPECT_EQ(test, *word, 42ULL);
	op.compare_add = 42;
	does(test, &e, &op, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, *word, 1ULL);

	op.remote_addr++;
	does(test, &e, &op, IB_WC_REM_INV_REQ_ERR);
}

/* An ATOMIC WRITE writes 8 bytes, if the device has it, and is refused otherwise. */
static void atomic_write(struct kunit *test)
{
	struct ends e = ends_new(test, IB_QPT_RC);
	struct kv *kv = test->priv;
	struct ib_sge out[2] = { kv_sge(kv, e.here, 0, 3), kv_sge(kv, e.here, 3, 5) };
	struct kv_op op = {
		.id = 1,
		.opcode = IB_WR_ATOMIC_WRITE,
		.sge = out,
		.num_sge = 2,
	};
	struct ib_wc wc;

	if (!(kv->dev->attrs.device_cap_flags & IB_DEVICE_ATOMIC_WRITE)) {
		KUNIT_EXPECT_EQ(test, -EINVAL, kv_post(e.a, &op));
		kunit_skip(test, "the device has no ATOMIC WRITE");
	}
	ends_expose(test, &e, IB_ACCESS_REMOTE_WRITE);
	ends_aim(&e, &op, 24);
	kv_fill(e.here->data, 8, 15);
	wc = does(test, &e, &op, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_ATOMIC_WRITE);
	KUNIT_EXPECT_TRUE(test, kv_filled(e.there->data + 24, 8, 15));
	KUNIT_EXPECT_EQ(test, e.there->data[32], 0);
	op.remote_addr++;
	does(test, &e, &op, IB_WC_REM_INV_REQ_ERR);
}

/* A datagram arrives behind its header and names its sender. Another Q_Key keeps it away. */
static void datagram(struct kunit *test)
{
	struct ends e = ends_new(test, IB_QPT_UD);
	struct kv *kv = test->priv;
	struct ib_sge out = kv_sge(kv, e.here, 0, 300);
	struct ib_sge in = kv_sge(kv, e.there, 0, sizeof(struct ib_grh) + 300);
	struct rdma_ah_attr attr;
	struct ib_ud_wr wr = {
		.wr = {
			.wr_id = 1,
			.opcode = IB_WR_SEND_WITH_IMM,
			.send_flags = IB_SEND_SIGNALED,
			.sg_list = &out,
			.num_sge = 1,
			.ex.imm_data = cpu_to_be32(5),
		},
		.remote_qpn = e.b->qp->qp_num,
		.remote_qkey = KV_QKEY + 1,
	};
	struct ib_wc wc;

	kv_ah_attr(kv, &attr);
	wr.ah = rdma_create_ah(kv->pd, &attr, RDMA_CREATE_AH_SLEEPABLE);
	KUNIT_ASSERT_NOT_ERR_OR_NULL(test, wr.ah);
	kv_fill(e.here->data, 300, 8);
	KUNIT_EXPECT_EQ(test, 0, kv_recv(e.b, 2, &in, 1));
	/* No QP gets a datagram with another Q_Key, and the sender is not told. */
	KUNIT_EXPECT_EQ(test, 0, ib_post_send(e.a->qp, &wr.wr, NULL));
	wr.wr.wr_id = 3;
	wr.remote_qkey = KV_QKEY;
	KUNIT_EXPECT_EQ(test, 0, ib_post_send(e.a->qp, &wr.wr, NULL));
	/* The AH is not needed after the work request is posted. */
	rdma_destroy_ah(wr.ah, RDMA_DESTROY_AH_SLEEPABLE);
	kv_expect(test, e.a->cq, 1, IB_WC_SUCCESS);
	kv_expect(test, e.a->cq, 3, IB_WC_SUCCESS);
	wc = kv_expect(test, e.b->cq, 2, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.src_qp, e.a->qp->qp_num);
	KUNIT_EXPECT_EQ(test, wc.byte_len, (u32)in.length);
	KUNIT_EXPECT_EQ(test, wc.wc_flags & (IB_WC_GRH | IB_WC_WITH_IMM),
			IB_WC_GRH | IB_WC_WITH_IMM);
	KUNIT_EXPECT_TRUE(test, kv_filled(e.there->data + sizeof(struct ib_grh), 300, 8));
	kv_expect_none(test, e.b->cq);

	/* A work request without a destination is refused. */
	wr.ah = NULL;
	KUNIT_EXPECT_EQ(test, -EINVAL, ib_post_send(e.a->qp, &wr.wr, NULL));
}

/* A completion says that all earlier work requests are done, too. */
static void unsignaled(struct kunit *test)
{
	struct ends e = ends_new(test, IB_QPT_RC);
	struct kv *kv = test->priv;
	struct ib_sge out = kv_sge(kv, e.here, 0, 16);
	struct kv_op op = {
		.opcode = IB_WR_RDMA_WRITE,
		.sge = &out,
		.num_sge = 1,
	};
	unsigned int round, i;

	ends_expose(test, &e, IB_ACCESS_REMOTE_WRITE);
	ends_aim(&e, &op, 0);
	for (round = 0; round < DIV_ROUND_UP(kv_rounds, KV_DEPTH); round++) {
		/* The queue is filled in each round, so all of its places must be free again. */
		for (i = 1; i <= KV_DEPTH; i++) {
			op.id = i;
			op.flags = i == KV_DEPTH ? IB_SEND_SIGNALED : 0;
			KUNIT_ASSERT_EQ(test, 0, kv_post(e.a, &op));
		}
		kv_expect(test, e.a->cq, KV_DEPTH, IB_WC_SUCCESS);
	}
	kv_expect_none(test, e.a->cq);
}

/* The work requests before a bad one are posted, those behind it are not, and bad_wr names it. */
static void lists(struct kunit *test)
{
	enum { BAD = 2, COUNT = 5 };
	struct ends e = ends_new(test, IB_QPT_RC);
	struct kv *kv = test->priv;
	struct ib_sge sges[17], in = kv_sge(kv, e.there, 0, KV_LEN);
	struct ib_send_wr wrs[COUNT] = {};
	const struct ib_send_wr *bad = NULL;
	struct ib_recv_wr recvs[COUNT] = {};
	const struct ib_recv_wr *bad_recv = NULL;
	int i;

	for (i = 0; i < ARRAY_SIZE(sges); i++)
		sges[i] = kv_sge(kv, e.here, i, 1);
	for (i = 0; i < COUNT; i++) {
		wrs[i].wr_id = i;
		wrs[i].opcode = IB_WR_SEND;
		wrs[i].send_flags = IB_SEND_SIGNALED;
		wrs[i].sg_list = sges;
		wrs[i].num_sge = 1;
		wrs[i].next = i < COUNT - 1 ? &wrs[i + 1] : NULL;
		recvs[i].wr_id = 10 + i;
		recvs[i].sg_list = &in;
		recvs[i].num_sge = 1;
		recvs[i].next = i < COUNT - 1 ? &recvs[i + 1] : NULL;
	}
	/* The third one of each list has more SGEs than the QP was created for. */
	recvs[BAD].sg_list = sges;
	recvs[BAD].num_sge = ARRAY_SIZE(sges);
	KUNIT_EXPECT_EQ(test, -EINVAL, ib_post_recv(e.b->qp, recvs, &bad_recv));
	KUNIT_EXPECT_PTR_EQ(test, bad_recv, (const struct ib_recv_wr *)&recvs[BAD]);
	wrs[BAD].num_sge = ARRAY_SIZE(sges);
	KUNIT_EXPECT_EQ(test, -EINVAL, ib_post_send(e.a->qp, wrs, &bad));
	KUNIT_EXPECT_PTR_EQ(test, bad, (const struct ib_send_wr *)&wrs[BAD]);
	for (i = 0; i < BAD; i++) {
		kv_expect(test, e.a->cq, i, IB_WC_SUCCESS);
		kv_expect(test, e.b->cq, 10 + i, IB_WC_SUCCESS);
	}
	kv_expect_none(test, e.a->cq);
	kv_expect_none(test, e.b->cq);
	kv_write_passes(test, e.a, e.b);
}

/* A queue takes as many work requests as it was created for, and refuses one more. */
static void full(struct kunit *test)
{
	struct ends e = ends_new(test, IB_QPT_RC);
	struct kv_op op = { .opcode = IB_WR_SEND, .flags = IB_SEND_SIGNALED };
	int i;

	/* The peer has no receives yet, so the messages stay in the send queue. */
	for (op.id = 0; op.id < KV_DEPTH; op.id++)
		KUNIT_ASSERT_EQ(test, 0, kv_post(e.a, &op));
	KUNIT_EXPECT_EQ(test, -ENOMEM, kv_post(e.a, &op));
	for (i = 0; i < KV_DEPTH; i++)
		KUNIT_ASSERT_EQ(test, 0, kv_recv(e.a, 100 + i, NULL, 0));
	KUNIT_EXPECT_EQ(test, -ENOMEM, kv_recv(e.a, 100 + i, NULL, 0));
	for (i = 0; i < KV_DEPTH; i++)
		KUNIT_ASSERT_EQ(test, 0, kv_recv(e.b, i, NULL, 0));
	for (i = 0; i < KV_DEPTH; i++) {
		kv_expect(test, e.a->cq, i, IB_WC_SUCCESS);
		kv_expect(test, e.b->cq, i, IB_WC_SUCCESS);
	}
	kv_write_passes(test, e.a, e.b);
}

/*
 * These work requests are refused when they are posted, and do not change the QP:
 * operations for which the kernel has no structure (BIND_MW, FLUSH), operations that
 * the type of the QP does not have, and opcodes and flags that do not exist.
 */
static void refused(struct kunit *test)
{
	static const enum ib_wr_opcode rc[] = {
		IB_WR_BIND_MW, IB_WR_LSO, IB_WR_FLUSH,
		IB_WR_MASKED_ATOMIC_CMP_AND_SWP, IB_WR_MASKED_ATOMIC_FETCH_AND_ADD,
		IB_WR_REG_MR_INTEGRITY, IB_WR_RESERVED1, 0xffff,
	};
	static const enum ib_wr_opcode uc[] = {
		IB_WR_RDMA_READ, IB_WR_RDMA_READ_WITH_INV, IB_WR_ATOMIC_CMP_AND_SWP,
		IB_WR_ATOMIC_FETCH_AND_ADD, IB_WR_SEND_WITH_INV, IB_WR_ATOMIC_WRITE,
	};
	struct ends e = ends_new(test, IB_QPT_RC);
	struct ends u = ends_new(test, IB_QPT_UC);
	struct kv *kv = test->priv;
	struct ib_sge out = kv_sge(kv, e.here, 0, 8);
	struct kv_op op = { .sge = &out, .num_sge = 1 };
	int i;

	for (i = 0; i < ARRAY_SIZE(rc); i++) {
		op.opcode = rc[i];
		KUNIT_EXPECT_EQ_MSG(test, -EINVAL, kv_post(e.a, &op), "opcode %d", rc[i]);
	}
	for (i = 0; i < ARRAY_SIZE(uc); i++) {
		op.opcode = uc[i];
		KUNIT_EXPECT_EQ_MSG(test, -EINVAL, kv_post(u.a, &op), "opcode %d", uc[i]);
	}
	op.opcode = IB_WR_SEND;
	op.flags = IB_SEND_IP_CSUM;
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_post(e.a, &op));
	kv_expect_none(test, e.a->cq);
	kv_write_passes(test, e.a, e.b);
	kv_write_passes(test, u.a, u.b);
}

/* Inline data is in no MR, and in several SGEs. The consumer may change it after posting. */
static void inline_data(struct kunit *test)
{
	static const u32 sizes[] = { 0, 1, 7, 8, 9, 33, KV_INLINE - 1, KV_INLINE };
	enum ib_qp_type type = type_of(test);
	struct ends e = ends_of(test, kv_qp_inline(test, type, kv_cq(test, 2 * KV_DEPTH)),
				kv_qp(test, type, kv_cq(test, 2 * KV_DEPTH), NULL));
	u8 *data = kunit_kzalloc(test, KV_INLINE, GFP_KERNEL);
	struct ib_sge pieces[3] = {};
	struct kv_op op = {
		.flags = IB_SEND_INLINE | IB_SEND_SIGNALED,
		.sge = pieces,
		.num_sge = ARRAY_SIZE(pieces),
	};
	struct ib_sge in = kv_sge(test->priv, e.there, 0, KV_INLINE);
	struct ib_wc wc;
	int i;

	KUNIT_ASSERT_NOT_NULL(test, data);
	ends_expose(test, &e, IB_ACCESS_REMOTE_WRITE);
	for (i = 0; i < ARRAY_SIZE(sizes); i++) {
		u32 size = sizes[i], third = size / 3;

		pieces[0] = (struct ib_sge) { .addr = (uintptr_t)data, .length = third };
		pieces[1] = (struct ib_sge) { .addr = (uintptr_t)data + third };
		pieces[2] = (struct ib_sge) {
			.addr = (uintptr_t)data + third,
			.length = size - third,
		};
		memset(e.there->data, 0xa5, PAGE_SIZE);
		KUNIT_ASSERT_EQ(test, 0, kv_recv(e.b, 2, &in, 1));
		kv_fill(data, size, i);
		op.id = 2 * i;
		op.opcode = IB_WR_SEND;
		KUNIT_ASSERT_EQ(test, 0, kv_post(e.a, &op));
		kv_fill(data, size, i + 100);
		op.id = 2 * i + 1;
		op.opcode = IB_WR_RDMA_WRITE;
		ends_aim(&e, &op, 1000);
		KUNIT_ASSERT_EQ(test, 0, kv_post(e.a, &op));
		memset(data, 0, KV_INLINE);
		kv_expect(test, e.a->cq, 2 * i, IB_WC_SUCCESS);
		kv_expect(test, e.a->cq, 2 * i + 1, IB_WC_SUCCESS);
		wc = kv_expect(test, e.b->cq, 2, IB_WC_SUCCESS);
		KUNIT_EXPECT_EQ(test, wc.byte_len, size);
		KUNIT_EXPECT_TRUE(test, kv_filled(e.there->data, size, i));
		KUNIT_EXPECT_EQ(test, e.there->data[size], 0xa5);
		KUNIT_EXPECT_TRUE(test, kv_filled(e.there->data + 1000, size, i + 100));
		KUNIT_EXPECT_EQ(test, e.there->data[1000 + size], 0xa5);
	}
	/* More data is refused, and so is an operation that sends no data. */
	pieces[1].length = 1;
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_post(e.a, &op));
	pieces[1].length = 0;
	op.opcode = IB_WR_RDMA_READ;
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_post(e.a, &op));
	kv_expect_none(test, e.a->cq);
	kv_write_passes(test, e.a, e.b);
}

/* The inline data of a datagram arrives behind its header. */
static void inline_datagram(struct kunit *test)
{
	static const u32 sizes[] = { 0, 1, 9, KV_INLINE };
	struct ends e = ends_of(test, kv_qp_inline(test, IB_QPT_UD, kv_cq(test, 2 * KV_DEPTH)),
				kv_qp(test, IB_QPT_UD, kv_cq(test, 2 * KV_DEPTH), NULL));
	u8 *data = kunit_kzalloc(test, KV_INLINE, GFP_KERNEL);
	u8 *received = e.there->data + sizeof(struct ib_grh);
	struct ib_sge in = kv_sge(test->priv, e.there, 0, sizeof(struct ib_grh) + KV_INLINE);
	struct ib_sge pieces[2] = {};
	struct ib_ud_wr wr = {
		.wr = {
			.opcode = IB_WR_SEND,
			.send_flags = IB_SEND_INLINE | IB_SEND_SIGNALED,
			.sg_list = pieces,
			.num_sge = ARRAY_SIZE(pieces),
		},
		.ah = e.a->kv->ah,
		.remote_qpn = e.b->qp->qp_num,
		.remote_qkey = KV_QKEY,
	};
	struct ib_wc wc;
	int i;

	KUNIT_ASSERT_NOT_NULL(test, data);
	for (i = 0; i < ARRAY_SIZE(sizes); i++) {
		u32 size = sizes[i], half = size / 2;

		pieces[0] = (struct ib_sge) { .addr = (uintptr_t)data, .length = half };
		pieces[1] = (struct ib_sge) {
			.addr = (uintptr_t)data + half,
			.length = size - half,
		};
		memset(e.there->data, 0xa5, PAGE_SIZE);
		KUNIT_EXPECT_EQ(test, 0, kv_recv(e.b, 2, &in, 1));
		kv_fill(data, size, i);
		wr.wr.wr_id = i;
		KUNIT_EXPECT_EQ(test, 0, ib_post_send(e.a->qp, &wr.wr, NULL));
		memset(data, 0, KV_INLINE);
		kv_expect(test, e.a->cq, i, IB_WC_SUCCESS);
		wc = kv_expect(test, e.b->cq, 2, IB_WC_SUCCESS);
		KUNIT_EXPECT_EQ(test, wc.byte_len, sizeof(struct ib_grh) + size);
		KUNIT_EXPECT_TRUE(test, kv_filled(received, size, i));
		KUNIT_EXPECT_EQ(test, received[size], 0xa5);
	}
	pieces[1].length = KV_INLINE;
	pieces[0].length = 1;
	KUNIT_EXPECT_EQ(test, -EINVAL, ib_post_send(e.a->qp, &wr.wr, NULL));
	kv_expect_none(test, e.a->cq);
}

/* A QP without inline data refuses it, and a QP cannot have more than the device allows. */
static void no_inline_data(struct kunit *test)
{
	struct ends e = ends_new(test, IB_QPT_RC);
	struct kv *kv = test->priv;
	u64 data = 0;
	struct ib_sge out = { .addr = (uintptr_t)&data, .length = sizeof(data) };
	struct kv_op op = {
		.opcode = IB_WR_SEND,
		.flags = IB_SEND_INLINE,
		.sge = &out,
		.num_sge = 1,
	};
	struct ib_qp_init_attr attr = {
		.send_cq = e.a->cq,
		.recv_cq = e.a->cq,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_inline_data = 1 << 20 },
		.qp_type = IB_QPT_RC,
	};

	KUNIT_EXPECT_EQ(test, -EINVAL, kv_post(e.a, &op));
	KUNIT_EXPECT_EQ(test, -EINVAL, PTR_ERR_OR_ZERO(ib_create_qp(kv->pd, &attr)));
	kv_expect_none(test, e.a->cq);
	kv_write_passes(test, e.a, e.b);
}

struct kunit_case kv_data_cases[] = {
	KUNIT_CASE_PARAM(inline_data, types_gen_params),
	KUNIT_CASE(inline_datagram),
	KUNIT_CASE(no_inline_data),
	KUNIT_CASE_PARAM(send, types_gen_params),
	KUNIT_CASE_PARAM(write, types_gen_params),
	KUNIT_CASE(read),
	KUNIT_CASE(atomics),
	KUNIT_CASE(atomic_write),
	KUNIT_CASE(datagram),
	KUNIT_CASE(unsignaled),
	KUNIT_CASE(lists),
	KUNIT_CASE(full),
	KUNIT_CASE(refused),
	{}
};
