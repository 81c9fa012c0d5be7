// SPDX-License-Identifier: GPL-2.0
/*
 * UD multicast through the RDMA CM: members of a group, and a sender of
 * numbered datagrams.
 *
 * Usage: mcast_cm receive|send GROUP ADDRESS COUNT
 *
 * ADDRESS is this host's. A member says "joined" and ends after COUNT datagrams;
 * the sender sends when it has joined.
 */
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdint.h>

#include "../check.h"

#define RESOLVE_MS 20000
/* Bytes in front of a received datagram. */
#define GRH 40
#define SIZE 64
#define MAX_COUNT 1000

struct member {
	struct rdma_event_channel *events;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_ah *ah;
	uint32_t qpn;
	uint32_t qkey;
	unsigned int count;
	/* Room for each datagram. */
	char (*places)[GRH + SIZE];
};

static struct sockaddr_in address_of(const char *text)
{
	struct sockaddr_in address = { .sin_family = AF_INET };

	if (inet_pton(AF_INET, text, &address.sin_addr) != 1)
		fail("%s is no IPv4 address", text);
	return address;
}

/* Waits for the next event, which must be this one; returns its UD destination. */
static struct rdma_ud_param wait_for(struct member *member, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;
	struct rdma_ud_param ud;

	check(rdma_get_cm_event(member->events, &event), "rdma_get_cm_event");
	if (event->event != type)
		fail("%s, status %d", rdma_event_str(event->event), event->status);
	ud = event->param.ud;
	check(rdma_ack_cm_event(event), "rdma_ack_cm_event");
	return ud;
}

static void create(struct member *member)
{
	struct ibv_context *verbs = member->id->verbs;
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = member->count,
			.max_recv_wr = member->count,
			.max_send_sge = 1,
			.max_recv_sge = 1,
		},
		.qp_type = IBV_QPT_UD,
		.sq_sig_all = 1,
	};

	member->places = checked(calloc(member->count, sizeof(*member->places)), "calloc");
	member->pd = checked(ibv_alloc_pd(verbs), "ibv_alloc_pd");
	member->cq = checked(ibv_create_cq(verbs, 2 * member->count, NULL, NULL, 0),
			     "ibv_create_cq");
	member->mr = checked(ibv_reg_mr(member->pd, member->places,
					member->count * sizeof(*member->places),
					IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
	attr.send_cq = member->cq;
	attr.recv_cq = member->cq;
	check(rdma_create_qp(member->id, member->pd, &attr), "rdma_create_qp");
}

static struct ibv_sge place(const struct member *member, unsigned int number, unsigned int skip)
{
	return (struct ibv_sge) {
		.addr = (uintptr_t)&member->places[number][skip],
		.length = sizeof(*member->places) - skip,
		.lkey = member->mr->lkey,
	};
}

static void post_receives(struct member *member)
{
	unsigned int number;

	for (number = 0; number < member->count; number++) {
		struct ibv_sge sge = place(member, number, 0);
		struct ibv_recv_wr *bad, wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1 };

		check(ibv_post_recv(member->id->qp, &wr, &bad), "ibv_post_recv");
	}
}

static void join(struct member *member, const char *group, const char *address)
{
	struct sockaddr_in to = address_of(group), from = address_of(address);
	struct rdma_ud_param ud;

	member->events = checked(rdma_create_event_channel(), "rdma_create_event_channel");
	check(rdma_create_id(member->events, &member->id, NULL, RDMA_PS_UDP), "rdma_create_id");
	check(rdma_resolve_addr(member->id, (struct sockaddr *)&from, (struct sockaddr *)&to,
				RESOLVE_MS), "rdma_resolve_addr");
	wait_for(member, RDMA_CM_EVENT_ADDR_RESOLVED);
	create(member);
	post_receives(member);
	check(rdma_join_multicast(member->id, (struct sockaddr *)&to, NULL), "rdma_join_multicast");
	ud = wait_for(member, RDMA_CM_EVENT_MULTICAST_JOIN);
	member->ah = checked(ibv_create_ah(member->pd, &ud.ah_attr), "ibv_create_ah");
	member->qpn = ud.qp_num;
	member->qkey = ud.qkey;
	printf("joined\n");
	fflush(stdout);
}

/* Waits for so many completions of one kind; the sender gets its own datagrams as well. */
static void complete(struct member *member, enum ibv_wc_opcode opcode)
{
	unsigned int done = 0;
	struct ibv_wc wc;
	int polled;

	while (done < member->count) {
		polled = ibv_poll_cq(member->cq, 1, &wc);
		if (polled < 0 || (polled && wc.status != IBV_WC_SUCCESS))
			fail("completion %u: %s", done,
			     polled < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
		if (polled && wc.opcode == opcode && opcode == IBV_WC_RECV &&
		    (wc.byte_len != GRH + SIZE || !(wc.wc_flags & IBV_WC_GRH)))
			fail("a datagram of %u bytes, flags %#x", wc.byte_len, wc.wc_flags);
		done += polled && wc.opcode == opcode;
	}
}

/* Datagrams of one sender come in order. */
static void receive(struct member *member)
{
	unsigned int number, got;

	complete(member, IBV_WC_RECV);
	for (number = 0; number < member->count; number++)
		if (sscanf(&member->places[number][GRH], "datagram %u", &got) != 1 || got != number)
			fail("place %u holds \"%.*s\"", number, SIZE, &member->places[number][GRH]);
	printf("%u datagrams received\n", member->count);
}

static void send_all(struct member *member)
{
	unsigned int number;
	char texts[MAX_COUNT][SIZE] = { 0 };
	struct ibv_mr *mr = checked(ibv_reg_mr(member->pd, texts, sizeof(texts), 0), "ibv_reg_mr");

	for (number = 0; number < member->count; number++) {
		struct ibv_sge sge = { (uintptr_t)texts[number], SIZE, mr->lkey };
		struct ibv_send_wr *bad, wr = {
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IBV_WR_SEND,
			.wr.ud = { member->ah, member->qpn, member->qkey },
		};

		snprintf(texts[number], SIZE, "datagram %u", number);
		check(ibv_post_send(member->id->qp, &wr, &bad), "ibv_post_send");
	}
	complete(member, IBV_WC_SEND);
	check(ibv_dereg_mr(mr), "ibv_dereg_mr");
	printf("%u datagrams sent\n", member->count);
}

static void leave(struct member *member, const char *group)
{
	struct sockaddr_in to = address_of(group);

	check(rdma_leave_multicast(member->id, (struct sockaddr *)&to), "rdma_leave_multicast");
	check(ibv_destroy_ah(member->ah), "ibv_destroy_ah");
	rdma_destroy_qp(member->id);
	check(ibv_dereg_mr(member->mr), "ibv_dereg_mr");
	check(ibv_destroy_cq(member->cq), "ibv_destroy_cq");
	check(ibv_dealloc_pd(member->pd), "ibv_dealloc_pd");
	check(rdma_destroy_id(member->id), "rdma_destroy_id");
	rdma_destroy_event_channel(member->events);
	free(member->places);
}

int main(int argc, char **argv)
{
	struct member member = { 0 };
	bool sends = argc == 5 && !strcmp(argv[1], "send");

	if (argc != 5 || (!sends && strcmp(argv[1], "receive")))
		fail("usage: %s receive|send GROUP ADDRESS COUNT", argv[0]);
	member.count = atoi(argv[4]);
	if (!member.count || member.count > MAX_COUNT)
		fail("COUNT is from 1 to %d", MAX_COUNT);
	join(&member, argv[2], argv[3]);
	if (sends)
		send_all(&member);
	else
		receive(&member);
	leave(&member, argv[2]);
	return 0;
}
