// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of memory that work requests register and invalidate.
 */
#include <linux/sizes.h>

#include "kverbs.h"

#define PAGES	4
#define REMOTE	(IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE)

/* Two connected QPs, each with a CQ, memory at both ends, and an MR that @b registers. */
struct sides {
	struct kv_qp *a;
	struct kv_qp *b;
	struct kv_buf *here;
	struct kv_buf *there;
	struct ib_mr *mr;
};

static struct sides sides_new(struct kunit *test)
{
	struct kv *kv = test->priv;
	struct sides s;

	if (!kv_has_fast_reg(kv->dev))
		kunit_skip(test, "the device has no fast registration");
	s = (struct sides) {
		.a = kv_qp(test, IB_QPT_RC, kv_cq(test, 2 * KV_DEPTH), NULL),
		.b = kv_qp(test, IB_QPT_RC, kv_cq(test, 2 * KV_DEPTH), NULL),
		.here = kv_buf(test, PAGES * PAGE_SIZE),
		.there = kv_buf(test, PAGES * PAGE_SIZE),
		.mr = kv_mr(test, PAGES),
	};
	kv_pair(test, s.a, s.b);
	return s;
}

/* Brings the QPs to RTS again after an error, with empty CQs. */
static void again(struct kunit *test, struct sides *s)
{
	KUNIT_ASSERT_EQ(test, 0, kv_modify(s->a, IB_QPS_RESET));
	KUNIT_ASSERT_EQ(test, 0, kv_modify(s->b, IB_QPS_RESET));
	kv_expect_none(test, s->a->cq);
	kv_expect_none(test, s->b->cq);
	kv_pair(test, s->a, s->b);
}

/* Posts a WRITE or READ with this key to QP a, and expects this status. */
static void access(struct kunit *test, struct sides *s, enum ib_wr_opcode opcode, u64 addr,
		   u32 rkey, u32 len, enum ib_wc_status status)
{
	struct ib_sge sge = kv_sge(test->priv, s->here, 0, len);
	struct kv_op op = {
		.id = 50,
		.opcode = opcode,
		.flags = IB_SEND_SIGNALED,
		.sge = &sge,
		.num_sge = 1,
		.remote_addr = addr,
		.rkey = rkey,
	};

	KUNIT_ASSERT_EQ(test, 0, kv_post(s->a, &op));
	kv_expect(test, s->a->cq, 50, status);
	if (status != IB_WC_SUCCESS)
		again(test, s);
}

static void invalidate(struct kunit *test, struct kv_qp *qp, u32 key, enum ib_wc_status status)
{
	struct kv_op op = {
		.id = 60,
		.opcode = IB_WR_LOCAL_INV,
		.flags = IB_SEND_SIGNALED,
		.inv = key,
	};
	struct ib_wc wc;

	KUNIT_ASSERT_EQ(test, 0, kv_post(qp, &op));
	wc = kv_expect(test, qp->cq, 60, status);
	if (status == IB_WC_SUCCESS)
		KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_LOCAL_INV);
}

/* An MR begins and ends within a page, and is registered and invalidated many times. */
static void registered(struct kunit *test)
{
	struct sides s = sides_new(test);
	size_t offset = 1000, len = 2 * PAGE_SIZE + 24;
	unsigned int round;
	u32 old;

	for (round = 0; round < DIV_ROUND_UP(kv_rounds, 10); round++) {
		kv_map_reg(test, s.b, s.mr, s.there, offset, len, REMOTE);
		KUNIT_EXPECT_EQ(test, s.mr->length, len);
		kv_fill(s.here->data, len, round);
		access(test, &s, IB_WR_RDMA_WRITE, s.mr->iova, s.mr->rkey, len, IB_WC_SUCCESS);
		KUNIT_EXPECT_TRUE(test, kv_filled(s.there->data + offset, len, round));
		memset(s.here->data, 0, len);
		access(test, &s, IB_WR_RDMA_READ, s.mr->iova, s.mr->rkey, len, IB_WC_SUCCESS);
		KUNIT_EXPECT_TRUE(test, kv_filled(s.here->data, len, round));
		invalidate(test, s.b, s.mr->rkey, IB_WC_SUCCESS);
	}
	KUNIT_EXPECT_EQ(test, s.there->data[offset - 1], 0);
	KUNIT_EXPECT_EQ(test, s.there->data[offset + len], 0);

	/* These fail: an access beyond the MR, an earlier key, and a key that was invalidated. */
	kv_map_reg(test, s.b, s.mr, s.there, offset, len, REMOTE);
	access(test, &s, IB_WR_RDMA_WRITE, s.mr->iova + len - 7, s.mr->rkey, 8,
	       IB_WC_REM_ACCESS_ERR);
	old = s.mr->rkey;
	access(test, &s, IB_WR_RDMA_READ, s.mr->iova, old - 1, 8, IB_WC_REM_ACCESS_ERR);
	access(test, &s, IB_WR_RDMA_READ, s.mr->iova, old, 8, IB_WC_SUCCESS);
	invalidate(test, s.b, old, IB_WC_SUCCESS);
	access(test, &s, IB_WR_RDMA_READ, s.mr->iova, old, 8, IB_WC_REM_ACCESS_ERR);
}

/* Peers have the access that was registered, and the owner uses the lkey. */
static void rights(struct kunit *test)
{
	struct sides s = sides_new(test);
	struct ib_sge sge;
	struct kv_op op = {
		.id = 1,
		.opcode = IB_WR_SEND,
		.flags = IB_SEND_SIGNALED,
		.sge = &sge,
		.num_sge = 1,
	};

	kv_map_reg(test, s.b, s.mr, s.there, 0, PAGE_SIZE, IB_ACCESS_REMOTE_READ);
	access(test, &s, IB_WR_RDMA_READ, s.mr->iova, s.mr->rkey, 8, IB_WC_SUCCESS);
	access(test, &s, IB_WR_RDMA_WRITE, s.mr->iova, s.mr->rkey, 8, IB_WC_REM_ACCESS_ERR);

	/* Without LOCAL_WRITE, the lkey is good for the source of a SEND, but not for a READ. */
	sge = (struct ib_sge) { .addr = s.mr->iova, .length = 8, .lkey = s.mr->lkey };
	kv_fill(s.there->data, 8, 12);
	KUNIT_ASSERT_EQ(test, 0, kv_recv(s.a, 2, &(struct ib_sge) {
		.addr = s.here->addr,
		.length = 8,
		.lkey = s.a->kv->pd->local_dma_lkey,
	}, 1));
	KUNIT_ASSERT_EQ(test, 0, kv_post(s.b, &op));
	kv_expect(test, s.b->cq, 1, IB_WC_SUCCESS);
	kv_expect(test, s.a->cq, 2, IB_WC_SUCCESS);
	KUNIT_EXPECT_TRUE(test, kv_filled(s.here->data, 8, 12));
	op.opcode = IB_WR_RDMA_READ;
	op.remote_addr = s.mr->iova;
	op.rkey = s.mr->rkey;
	KUNIT_ASSERT_EQ(test, 0, kv_post(s.b, &op));
	kv_expect(test, s.b->cq, 1, IB_WC_LOC_PROT_ERR);
}

/* SEND_WITH_INV makes a key of the peer invalid. The completion of the receive names the key. */
static void send_with_inv(struct kunit *test)
{
	struct sides s = sides_new(test);
	struct kv_op op = {
		.id = 1,
		.opcode = IB_WR_SEND_WITH_INV,
		.flags = IB_SEND_SIGNALED,
	};
	struct ib_wc wc;

	kv_map_reg(test, s.b, s.mr, s.there, 0, PAGE_SIZE, REMOTE);
	op.inv = s.mr->rkey;
	KUNIT_ASSERT_EQ(test, 0, kv_recv(s.b, 2, NULL, 0));
	KUNIT_ASSERT_EQ(test, 0, kv_post(s.a, &op));
	kv_expect(test, s.a->cq, 1, IB_WC_SUCCESS);
	wc = kv_expect(test, s.b->cq, 2, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.wc_flags & (IB_WC_WITH_INVALIDATE | IB_WC_WITH_IMM),
			IB_WC_WITH_INVALIDATE);
	KUNIT_EXPECT_EQ(test, wc.ex.invalidate_rkey, s.mr->rkey);
	access(test, &s, IB_WR_RDMA_READ, s.mr->iova, s.mr->rkey, 8, IB_WC_REM_ACCESS_ERR);

	/* The MR can be registered again. A key that is invalid cannot be invalidated again. */
	kv_reg(test, s.b, s.mr, REMOTE);
	access(test, &s, IB_WR_RDMA_READ, s.mr->iova, s.mr->rkey, 8, IB_WC_SUCCESS);
	KUNIT_ASSERT_EQ(test, 0, kv_recv(s.b, 2, NULL, 0));
	KUNIT_ASSERT_EQ(test, 0, kv_post(s.a, &op));
	kv_expect(test, s.b->cq, 2, IB_WC_REM_INV_REQ_ERR);
	/* The responder sends no NAK for an error of class J (IBA 9.9.3.1). */
	kv_expect(test, s.a->cq, 1, IB_WC_RETRY_EXC_ERR);
}

/* RDMA_READ_WITH_INV makes the key of its own memory invalid when it completes. */
static void read_with_inv(struct kunit *test)
{
	struct sides s = sides_new(test);
	struct ib_mr *mine = kv_mr(test, 1);
	struct ib_sge sge;
	struct kv_op op = {
		.id = 1,
		.opcode = IB_WR_RDMA_READ_WITH_INV,
		.flags = IB_SEND_SIGNALED,
		.sge = &sge,
		.num_sge = 1,
	};
	struct ib_wc wc;

	kv_map_reg(test, s.b, s.mr, s.there, 0, PAGE_SIZE, REMOTE);
	kv_map_reg(test, s.a, mine, s.here, 0, PAGE_SIZE, IB_ACCESS_LOCAL_WRITE);
	sge = (struct ib_sge) { .addr = mine->iova, .length = 100, .lkey = mine->lkey };
	op.remote_addr = s.mr->iova;
	op.rkey = s.mr->rkey;
	op.inv = mine->rkey;
	kv_fill(s.there->data, 100, 13);
	KUNIT_ASSERT_EQ(test, 0, kv_post(s.a, &op));
	wc = kv_expect(test, s.a->cq, 1, IB_WC_SUCCESS);
	KUNIT_EXPECT_EQ(test, wc.opcode, IB_WC_RDMA_READ);
	KUNIT_EXPECT_TRUE(test, kv_filled(s.here->data, 100, 13));
	KUNIT_ASSERT_EQ(test, 0, kv_post(s.a, &op));
	kv_expect(test, s.a->cq, 1, IB_WC_LOC_PROT_ERR);
}

/* One list has REG_MR, a READ that needs its key, and LOCAL_INV. They run in this order. */
static void in_order(struct kunit *test)
{
	struct sides s = sides_new(test);
	struct ib_mr *mine = kv_mr(test, 1);
	unsigned int round;
	struct ib_sge sge;
	struct ib_reg_wr reg = {
		.wr = { .opcode = IB_WR_REG_MR, .wr_id = 1 },
		.mr = mine,
		.access = IB_ACCESS_LOCAL_WRITE,
	};
	struct ib_rdma_wr read = {
		.wr = { .opcode = IB_WR_RDMA_READ, .wr_id = 2, .sg_list = &sge, .num_sge = 1 },
	};
	struct ib_send_wr inv = {
		.opcode = IB_WR_LOCAL_INV,
		.wr_id = 3,
		.send_flags = IB_SEND_SIGNALED | IB_SEND_FENCE,
	};

	kv_map_reg(test, s.b, s.mr, s.there, 0, PAGE_SIZE, REMOTE);
	read.remote_addr = s.mr->iova;
	read.rkey = s.mr->rkey;
	reg.wr.next = &read.wr;
	read.wr.next = &inv;
	for (round = 0; round < kv_rounds; round++) {
		KUNIT_ASSERT_EQ(test, 1, kv_map(mine, s.here, 16 * (round % 8), 64));
		ib_update_fast_reg_key(mine, ib_inc_rkey(mine->rkey));
		reg.key = mine->rkey;
		inv.ex.invalidate_rkey = mine->rkey;
		sge = (struct ib_sge) { .addr = mine->iova, .length = 64, .lkey = mine->lkey };
		kv_fill(s.there->data, 64, round);
		KUNIT_ASSERT_EQ(test, 0, ib_post_send(s.a->qp, &reg.wr, NULL));
		kv_expect(test, s.a->cq, 3, IB_WC_SUCCESS);
		KUNIT_ASSERT_TRUE(test, kv_filled(s.here->data + 16 * (round % 8), 64, round));
	}
}

/* The largest MR has as many pages as the device allows, at addresses that are not contiguous. */
static void largest(struct kunit *test)
{
	struct sides s = sides_new(test);
	u32 max = s.a->kv->dev->attrs.max_fast_reg_page_list_len;
	struct scatterlist *sg;
	struct ib_mr *mr;
	u32 i;

	KUNIT_ASSERT_GT(test, max, 1);
	KUNIT_EXPECT_EQ(test, -EINVAL,
			PTR_ERR_OR_ZERO(ib_alloc_mr(s.a->kv->pd, IB_MR_TYPE_MEM_REG, max + 1)));
	KUNIT_EXPECT_EQ(test, -EINVAL,
			PTR_ERR_OR_ZERO(ib_alloc_mr(s.a->kv->pd, IB_MR_TYPE_MEM_REG, 0)));
	KUNIT_EXPECT_EQ(test, -EINVAL,
			PTR_ERR_OR_ZERO(ib_alloc_mr(s.a->kv->pd, IB_MR_TYPE_SG_GAPS, 1)));
	mr = kv_mr(test, max);
	sg = kunit_kcalloc(test, max + 1, sizeof(*sg), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, sg);
	sg_init_table(sg, max + 1);
	/* A page that is listed twice counts twice. In reverse order pages are not contiguous. */
	for (i = 0; i <= max; i++) {
		sg_dma_address(&sg[i]) = s.there->addr + (PAGES - 1 - i % PAGES) * PAGE_SIZE;
		sg_dma_len(&sg[i]) = PAGE_SIZE;
	}
	/* ib_map_mr_sg() leaves out the page that does not fit, and does not count it. */
	KUNIT_EXPECT_EQ(test, max, ib_map_mr_sg(mr, sg, max + 1, NULL, PAGE_SIZE));
	KUNIT_EXPECT_EQ(test, mr->length, (u64)max * PAGE_SIZE);
	kv_reg(test, s.b, mr, REMOTE);
	kv_fill(s.here->data, PAGE_SIZE, 14);
	access(test, &s, IB_WR_RDMA_WRITE, mr->iova + (u64)(max - 1) * PAGE_SIZE, mr->rkey,
	       PAGE_SIZE, IB_WC_SUCCESS);
	KUNIT_EXPECT_TRUE(test, kv_filled(s.there->data +
					  (PAGES - 1 - (max - 1) % PAGES) * PAGE_SIZE,
					  PAGE_SIZE, 14));
	access(test, &s, IB_WR_RDMA_WRITE, mr->iova + (u64)max * PAGE_SIZE, mr->rkey, 1,
	       IB_WC_REM_ACCESS_ERR);
}

/*
 * The consumer chooses the size of pages when it maps them. Each page has one
 * entry of the list, however many pages of the kernel it consists of.
 */
static void page_sizes(struct kunit *test)
{
	static const unsigned int sizes[] = { SZ_4K, SZ_16K, SZ_64K, SZ_128K };
	struct sides s = sides_new(test);
	struct kv_buf *large = kv_buf(test, SZ_256K);
	/* @large has room for an aligned page of any of these sizes. */
	size_t first = ALIGN(large->addr, SZ_128K) - large->addr;
	struct ib_mr *one = kv_mr(test, 1);
	struct scatterlist sg;
	unsigned int i;

	sg_init_table(&sg, 1);
	for (i = 0; i < ARRAY_SIZE(sizes); i++) {
		unsigned int size = sizes[i];

		if (size < PAGE_SIZE)
			continue;
		sg_dma_address(&sg) = large->addr + first;
		sg_dma_len(&sg) = size;
		KUNIT_ASSERT_EQ(test, 1, ib_map_mr_sg(one, &sg, 1, NULL, size));
		KUNIT_EXPECT_EQ(test, one->length, size);
		kv_reg(test, s.b, one, REMOTE);
		kv_fill(s.here->data, PAGE_SIZE, 20 + i);
		/* The MR reaches to the end of the page, and not beyond. */
		access(test, &s, IB_WR_RDMA_WRITE, one->iova + size - PAGE_SIZE, one->rkey,
		       PAGE_SIZE, IB_WC_SUCCESS);
		KUNIT_EXPECT_TRUE(test, kv_filled(large->data + first + size - PAGE_SIZE, PAGE_SIZE,
						  20 + i));
		access(test, &s, IB_WR_RDMA_READ, one->iova + size, one->rkey, 1,
		       IB_WC_REM_ACCESS_ERR);
		invalidate(test, s.b, one->rkey, IB_WC_SUCCESS);
		/* Half a page from its middle fits, but a whole page takes two entries. */
		sg_dma_address(&sg) = large->addr + first + size / 2;
		sg_dma_len(&sg) = size / 2;
		KUNIT_ASSERT_EQ(test, 1, ib_map_mr_sg(one, &sg, 1, NULL, size));
		kv_reg(test, s.b, one, REMOTE);
		access(test, &s, IB_WR_RDMA_WRITE, one->iova, one->rkey, size / 2 < PAGE_SIZE ?
		       size / 2 : PAGE_SIZE, IB_WC_SUCCESS);
		KUNIT_EXPECT_EQ(test, large->data[first + size / 2], s.here->data[0]);
		invalidate(test, s.b, one->rkey, IB_WC_SUCCESS);
		sg_dma_len(&sg) = size;
		KUNIT_EXPECT_NE(test, 1, ib_map_mr_sg(one, &sg, 1, NULL, size));
	}
	/* A size that is no power of two is refused. */
	KUNIT_EXPECT_EQ(test, -EINVAL, ib_map_mr_sg(one, &sg, 1, NULL, 3 * PAGE_SIZE));
}

/* A wrong registration fails when it is posted, or when it completes. */
static void bad_registration(struct kunit *test)
{
	struct sides s = sides_new(test);
	int ret;

	/* Posting fails if nothing is mapped, for the key of another MR, and for other flags. */
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_post_reg(s.b, s.mr, s.mr->rkey, REMOTE));
	KUNIT_ASSERT_EQ(test, 1, kv_map(s.mr, s.there, 0, PAGE_SIZE));
	KUNIT_EXPECT_EQ(test, -EINVAL, kv_post_reg(s.b, s.mr, s.mr->rkey ^ 0x100, REMOTE));
	ret = kv_post_reg(s.b, s.mr, s.mr->rkey, REMOTE | IB_ACCESS_ON_DEMAND);
	KUNIT_EXPECT_EQ(test, -EOPNOTSUPP, ret);
	kv_expect_none(test, s.b->cq);

	/* It completes with an error if peers may write and the owner may not. */
	KUNIT_ASSERT_EQ(test, 0, kv_post_reg(s.b, s.mr, s.mr->rkey, IB_ACCESS_REMOTE_WRITE));
	kv_expect(test, s.b->cq, 900, IB_WC_MW_BIND_ERR);
	again(test, &s);

	/* It completes with an error if the MR is registered already. */
	kv_reg(test, s.b, s.mr, REMOTE);
	KUNIT_ASSERT_EQ(test, 0, kv_post_reg(s.b, s.mr, ib_inc_rkey(s.mr->rkey), REMOTE));
	kv_expect(test, s.b->cq, 900, IB_WC_MW_BIND_ERR);
	again(test, &s);
	access(test, &s, IB_WR_RDMA_READ, s.mr->iova, s.mr->rkey, 8, IB_WC_SUCCESS);

	/* LOCAL_INV fails for a key of no MR, and for an MR that is not for fast registration. */
	invalidate(test, s.b, s.mr->rkey ^ 0x100, IB_WC_MW_BIND_ERR);
	again(test, &s);
	invalidate(test, s.b, s.b->kv->pd->local_dma_lkey, IB_WC_MW_BIND_ERR);
	again(test, &s);
	invalidate(test, s.b, s.mr->rkey, IB_WC_SUCCESS);
	/* LOCAL_INV succeeds for an MR that is free already. */
	invalidate(test, s.b, s.mr->rkey, IB_WC_SUCCESS);
}

struct kunit_case kv_memory_cases[] = {
	KUNIT_CASE(registered),
	KUNIT_CASE(rights),
	KUNIT_CASE(send_with_inv),
	KUNIT_CASE(read_with_inv),
	KUNIT_CASE(in_order),
	KUNIT_CASE(largest),
	KUNIT_CASE(page_sizes),
	KUNIT_CASE(bad_registration),
	{}
};
