// SPDX-License-Identifier: GPL-2.0
/*
 * One shared receive queue behind the connections of many clients, through the
 * RDMA CM: the server sends each message back to its sender.
 *
 * Usage: srq_cm server CLIENTS MESSAGES
 *        srq_cm client ADDRESS CLIENTS MESSAGES
 *
 * The client makes CLIENTS connections, and sends MESSAGES on each of them.
 */
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>

#include "../check.h"

#define PORT 18720
#define RESOLVE_MS 20000
/* Receives of the SRQ, for all connections together. */
#define RECEIVES 32
/* A client has a place a connection to receive into. */
#define MAX_CLIENTS RECEIVES

struct message {
	uint32_t client;
	uint32_t number;
};

struct end {
	struct rdma_event_channel *events;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	/* These are the server's alone. */
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	/* One place a receive; behind them one a connection, to send from. */
	struct message messages[RECEIVES + MAX_CLIENTS];
	struct rdma_cm_id *ids[MAX_CLIENTS];
	unsigned int clients;
	unsigned int count;
};

static void create(struct end *end, struct ibv_context *verbs)
{
	if (end->pd)
		return;
	end->pd = checked(ibv_alloc_pd(verbs), "ibv_alloc_pd");
	end->cq = checked(ibv_create_cq(verbs, RECEIVES + 2 * MAX_CLIENTS, NULL, NULL, 0),
			  "ibv_create_cq");
	end->mr = checked(ibv_reg_mr(end->pd, end->messages, sizeof(end->messages),
				     IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
}

static struct ibv_sge place(const struct end *end, unsigned int number)
{
	return (struct ibv_sge) {
		.addr = (uintptr_t)&end->messages[number],
		.length = sizeof(*end->messages),
		.lkey = end->mr->lkey,
	};
}

static void create_srq(struct end *end)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = RECEIVES, .max_sge = 1 } };

	end->srq = checked(ibv_create_srq(end->pd, &attr), "ibv_create_srq");
}

static void post_shared(struct end *end, unsigned int number)
{
	struct ibv_sge sge = place(end, number);
	struct ibv_recv_wr *bad, wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1 };

	check(ibv_post_srq_recv(end->srq, &wr, &bad), "ibv_post_srq_recv");
}

static void post_receive(struct end *end, unsigned int number)
{
	struct ibv_sge sge = place(end, number);
	struct ibv_recv_wr *bad, wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1 };

	check(ibv_post_recv(end->ids[number]->qp, &wr, &bad), "ibv_post_recv");
}

static void post_send(struct end *end, unsigned int client, unsigned int number)
{
	struct ibv_sge sge = place(end, number);
	struct ibv_send_wr *bad, wr = {
		.wr_id = number,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
	};

	check(ibv_post_send(end->ids[client]->qp, &wr, &bad), "ibv_post_send");
}

static void create_qp(struct end *end, unsigned int number)
{
	struct ibv_qp_init_attr attr = {
		/* An echo may be under way still when the next message comes. */
		.cap = { .max_send_wr = 2, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};

	attr.send_cq = end->cq;
	attr.recv_cq = end->cq;
	attr.srq = end->srq;
	check(rdma_create_qp(end->ids[number], end->pd, &attr), "rdma_create_qp");
}

static struct ibv_wc next_completion(struct end *end)
{
	struct ibv_wc wc;
	int polled;

	do
		polled = ibv_poll_cq(end->cq, 1, &wc);
	while (!polled);
	if (polled < 0 || wc.status != IBV_WC_SUCCESS)
		fail("%s", polled < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
	return wc;
}

/* Waits for the next event, other than the end of a time-wait, and acknowledges it. */
static struct rdma_cm_event next_event(struct end *end)
{
	struct rdma_cm_event *event, copy;

	do {
		check(rdma_get_cm_event(end->events, &event), "rdma_get_cm_event");
		copy = *event;
		check(rdma_ack_cm_event(event), "rdma_ack_cm_event");
	} while (copy.event == RDMA_CM_EVENT_TIMEWAIT_EXIT);
	return copy;
}

static void __attribute__((noreturn)) unexpected(const struct rdma_cm_event *event)
{
	fail("%s, status %d", rdma_event_str(event->event), event->status);
}

/* Waits for the next event, which must be this one; returns its connection. */
static struct rdma_cm_id *wait_for(struct end *end, enum rdma_cm_event_type type)
{
	struct rdma_cm_event event = next_event(end);

	if (event.event != type)
		unexpected(&event);
	return event.id;
}

static void destroy(struct end *end)
{
	unsigned int number;

	for (number = 0; number < end->clients; number++) {
		rdma_destroy_qp(end->ids[number]);
		check(rdma_destroy_id(end->ids[number]), "rdma_destroy_id");
	}
	if (end->srq)
		check(ibv_destroy_srq(end->srq), "ibv_destroy_srq");
	check(ibv_dereg_mr(end->mr), "ibv_dereg_mr");
	check(ibv_destroy_cq(end->cq), "ibv_destroy_cq");
	check(ibv_dealloc_pd(end->pd), "ibv_dealloc_pd");
	rdma_destroy_event_channel(end->events);
}

/* The server's part. */

static void accept_one(struct end *end, unsigned int number)
{
	struct rdma_conn_param parameters = { .retry_count = 7, .rnr_retry_count = 7, .srq = 1 };
	unsigned int receive;

	create(end, end->ids[number]->verbs);
	if (!end->srq) {
		create_srq(end);
		for (receive = 0; receive < RECEIVES; receive++)
			post_shared(end, receive);
	}
	create_qp(end, number);
	check(rdma_accept(end->ids[number], &parameters), "rdma_accept");
}

/* The event of one connection may come behind the request of the next. */
static void accept_all(struct end *end)
{
	unsigned int requests = 0, established = 0;

	while (established < end->clients) {
		struct rdma_cm_event event = next_event(end);

		if (event.event == RDMA_CM_EVENT_ESTABLISHED) {
			established++;
		} else if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST && requests < end->clients) {
			end->ids[requests] = event.id;
			accept_one(end, requests++);
		} else {
			unexpected(&event);
		}
	}
}

static unsigned int client_of(const struct end *end, uint32_t qpn)
{
	unsigned int number;

	for (number = 0; number < end->clients; number++)
		if (end->ids[number]->qp->qp_num == qpn)
			return number;
	fail("a completion of QP %u, which nobody has", qpn);
}

/* Sends a message back; then the receive is posted for the next one. */
static void echo(struct end *end)
{
	unsigned int sent = 0;

	while (sent < end->clients * end->count) {
		struct ibv_wc wc = next_completion(end);

		if (wc.opcode == IBV_WC_RECV) {
			post_send(end, client_of(end, wc.qp_num), wc.wr_id);
		} else {
			post_shared(end, wc.wr_id);
			sent++;
		}
	}
}

static void serve(struct end *end)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	struct rdma_cm_id *listener;
	unsigned int number;

	check(rdma_create_id(end->events, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(rdma_bind_addr(listener, (struct sockaddr *)&address), "rdma_bind_addr");
	check(rdma_listen(listener, end->clients), "rdma_listen");
	accept_all(end);
	echo(end);
	for (number = 0; number < end->clients; number++)
		check(rdma_disconnect(wait_for(end, RDMA_CM_EVENT_DISCONNECTED)), "rdma_disconnect");
	check(rdma_destroy_id(listener), "rdma_destroy_id");
}

/* The client's part. */

static void connect_one(struct end *end, unsigned int number, struct sockaddr_in *address)
{
	struct rdma_conn_param parameters = { .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_cm_id *id;

	check(rdma_create_id(end->events, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
	end->ids[number] = id;
	check(rdma_resolve_addr(id, NULL, (struct sockaddr *)address, RESOLVE_MS),
	      "rdma_resolve_addr");
	wait_for(end, RDMA_CM_EVENT_ADDR_RESOLVED);
	check(rdma_resolve_route(id, RESOLVE_MS), "rdma_resolve_route");
	wait_for(end, RDMA_CM_EVENT_ROUTE_RESOLVED);
	create(end, id->verbs);
	create_qp(end, number);
	check(rdma_connect(id, &parameters), "rdma_connect");
	wait_for(end, RDMA_CM_EVENT_ESTABLISHED);
}

/* Sends a message on each connection, and waits for its echo. */
static void turn(struct end *end, unsigned int number)
{
	unsigned int client, done;

	for (client = 0; client < end->clients; client++) {
		post_receive(end, client);
		end->messages[RECEIVES + client] = (struct message) { client, number };
		post_send(end, client, RECEIVES + client);
	}
	for (done = 0; done < 2 * end->clients; done++) {
		struct ibv_wc wc = next_completion(end);
		const struct message *message = &end->messages[wc.wr_id];

		/* A connection receives into the place of its number. */
		if (wc.opcode == IBV_WC_RECV &&
		    (message->client != wc.wr_id || message->number != number))
			fail("message %u of client %u came to client %u instead of message %u",
			     message->number, message->client, (unsigned int)wc.wr_id, number);
	}
}

static void ask(struct end *end, const char *server)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	unsigned int number;

	if (inet_pton(AF_INET, server, &address.sin_addr) != 1)
		fail("%s is no IPv4 address", server);
	for (number = 0; number < end->clients; number++)
		connect_one(end, number, &address);
	for (number = 0; number < end->count; number++)
		turn(end, number);
	for (number = 0; number < end->clients; number++)
		check(rdma_disconnect(end->ids[number]), "rdma_disconnect");
	for (number = 0; number < end->clients; number++)
		wait_for(end, RDMA_CM_EVENT_DISCONNECTED);
	printf("%u messages on each of %u connections\n", end->count, end->clients);
}

int main(int argc, char **argv)
{
	static struct end end;
	int is_server = argc == 4 && !strcmp(argv[1], "server");

	if (!is_server && (argc != 5 || strcmp(argv[1], "client")))
		fail("usage: %s server CLIENTS MESSAGES | client ADDRESS CLIENTS MESSAGES", argv[0]);
	end.clients = atoi(argv[argc - 2]);
	end.count = atoi(argv[argc - 1]);
	if (!end.clients || end.clients > MAX_CLIENTS)
		fail("CLIENTS is from 1 to %d", MAX_CLIENTS);
	end.events = checked(rdma_create_event_channel(), "rdma_create_event_channel");
	if (is_server)
		serve(&end);
	else
		ask(&end, argv[2]);
	destroy(&end);
	return 0;
}
