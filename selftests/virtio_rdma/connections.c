// SPDX-License-Identifier: GPL-2.0
/*
 * Connects RC QPs through the RDMA CM, many at a time, sends a message on each,
 * and disconnects them, over and over.
 *
 * Usage: connections server COUNT AT_A_TIME
 *        connections client ADDRESS COUNT AT_A_TIME IN_FLIGHT
 *
 * COUNT connections in all, AT_A_TIME of which exist at the same time; the
 * client has at most IN_FLIGHT that are being made. A message is the number of
 * its connection, and the server wants each number once. Both programs sleep
 * while they wait. The last thing that the client prints is how many connections
 * a second there were after the first AT_A_TIME, from the creation of an ID to
 * its end.
 */
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define PORT 18700
/* Bounds the resolution of addresses and routes, which asks the neighbour alone. */
#define RESOLVE_MS 20000
/* A program that makes no progress for so many seconds hangs, and ends by SIGALRM. */
#define HANG_SECONDS 200
/* enum ib_cm_rej_reason of the kernel: no server listens. */
#define REJECTED_NO_LISTENER 8
#define WAIT_FOR_LISTENER_US 20000

struct side;

/* A connection, by the place that it has among those that exist. */
struct connection {
	struct side *side;
	struct rdma_cm_id *id;
	uint32_t number;
};

/* What the connections of this end share. */
struct side {
	struct rdma_event_channel *events;
	struct ibv_comp_channel *completions;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	/* One word a place. */
	uint32_t *words;
	struct connection *connections;
	/* The server's: places to give out, and the numbers that have come. */
	unsigned int *free;
	unsigned int free_count;
	bool *seen;
	unsigned int count;
	unsigned int at_a_time;
	unsigned int messages;
};

static void side_init(struct side *side, unsigned int count, unsigned int at_a_time)
{
	unsigned int place;

	memset(side, 0, sizeof(*side));
	side->count = count;
	side->at_a_time = at_a_time;
	side->events = checked(rdma_create_event_channel(), "rdma_create_event_channel");
	side->words = checked(calloc(at_a_time, sizeof(*side->words)), "calloc");
	side->connections = checked(calloc(at_a_time, sizeof(*side->connections)), "calloc");
	side->free = checked(calloc(at_a_time, sizeof(*side->free)), "calloc");
	side->seen = checked(calloc(count, sizeof(*side->seen)), "calloc");
	for (place = 0; place < at_a_time; place++) {
		side->connections[place].side = side;
		side->free[place] = place;
	}
	side->free_count = at_a_time;
}

/* What takes a device, which is known from the first connection on. */
static void side_open(struct side *side, struct ibv_context *verbs)
{
	if (side->pd)
		return;
	side->pd = checked(ibv_alloc_pd(verbs), "ibv_alloc_pd");
	side->completions = checked(ibv_create_comp_channel(verbs), "ibv_create_comp_channel");
	side->cq = checked(ibv_create_cq(verbs, side->at_a_time, NULL, side->completions, 0),
			   "ibv_create_cq");
	check(ibv_req_notify_cq(side->cq, 0), "ibv_req_notify_cq");
	side->mr = checked(ibv_reg_mr(side->pd, side->words, side->at_a_time * sizeof(*side->words),
				      IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
}

static void side_close(struct side *side)
{
	check(ibv_dereg_mr(side->mr), "ibv_dereg_mr");
	check(ibv_destroy_cq(side->cq), "ibv_destroy_cq");
	check(ibv_destroy_comp_channel(side->completions), "ibv_destroy_comp_channel");
	check(ibv_dealloc_pd(side->pd), "ibv_dealloc_pd");
	rdma_destroy_event_channel(side->events);
	free(side->words);
	free(side->connections);
	free(side->free);
	free(side->seen);
}

static unsigned int place_of(const struct connection *connection)
{
	return connection - connection->side->connections;
}

static struct ibv_sge word_of(const struct connection *connection)
{
	const struct side *side = connection->side;

	return (struct ibv_sge) {
		.addr = (uintptr_t)&side->words[place_of(connection)],
		.length = sizeof(*side->words),
		.lkey = side->mr->lkey,
	};
}

static void create_qp(struct connection *connection)
{
	struct side *side = connection->side;
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = 1,
			.max_recv_wr = 1,
			.max_send_sge = 1,
			.max_recv_sge = 1,
		},
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};

	side_open(side, connection->id->verbs);
	attr.send_cq = side->cq;
	attr.recv_cq = side->cq;
	check(rdma_create_qp(connection->id, side->pd, &attr), "rdma_create_qp");
}

static void destroy(struct connection *connection)
{
	rdma_destroy_qp(connection->id);
	check(rdma_destroy_id(connection->id), "rdma_destroy_id");
	connection->id = NULL;
}

static const struct rdma_conn_param connection_parameters = {
	.responder_resources = 1,
	.initiator_depth = 1,
	.retry_count = 7,
	.rnr_retry_count = 7,
};

static void post_receive(struct connection *connection)
{
	struct ibv_sge sge = word_of(connection);
	struct ibv_recv_wr wr = { .wr_id = place_of(connection), .sg_list = &sge, .num_sge = 1 };
	struct ibv_recv_wr *bad;

	check(ibv_post_recv(connection->id->qp, &wr, &bad), "ibv_post_recv");
}

static void post_send(struct connection *connection)
{
	struct ibv_sge sge = word_of(connection);
	struct ibv_send_wr wr = {
		.wr_id = place_of(connection),
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
	};
	struct ibv_send_wr *bad;

	connection->side->words[place_of(connection)] = connection->number;
	check(ibv_post_send(connection->id->qp, &wr, &bad), "ibv_post_send");
}

/* A message has come: its number must be a new one. */
static void received(struct side *side, unsigned int place)
{
	uint32_t number = side->words[place];

	if (number >= side->count)
		fail("message %u of %u", number, side->count);
	if (side->seen[number])
		fail("message %u a second time", number);
	side->seen[number] = true;
}

/* Polls the completions in the CQ. */
static void drain(struct side *side)
{
	struct ibv_wc wc;
	int polled;

	while ((polled = ibv_poll_cq(side->cq, 1, &wc)) > 0) {
		if (wc.status != IBV_WC_SUCCESS)
			fail("completion of place %u: %s", (unsigned int)wc.wr_id,
			     ibv_wc_status_str(wc.status));
		if (wc.opcode == IBV_WC_RECV)
			received(side, wc.wr_id);
		side->messages++;
	}
	if (polled < 0)
		fail("ibv_poll_cq: %d", polled);
}

/* Takes an event of the CQ, and arms it again. */
static void completion_event(struct side *side)
{
	struct ibv_cq *cq;
	void *context;

	check(ibv_get_cq_event(side->completions, &cq, &context), "ibv_get_cq_event");
	ibv_ack_cq_events(cq, 1);
	check(ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
	drain(side);
}

/* Acknowledges the next event of the CM; returns a copy. */
static struct rdma_cm_event next_event(struct side *side)
{
	struct rdma_cm_event *event, copy;

	check(rdma_get_cm_event(side->events, &event), "rdma_get_cm_event");
	copy = *event;
	check(rdma_ack_cm_event(event), "rdma_ack_cm_event");
	return copy;
}

static void __attribute__((noreturn)) unexpected(const struct rdma_cm_event *event)
{
	fail("%s, status %d", rdma_event_str(event->event), event->status);
}

/* The client's part. */

struct client {
	struct side side;
	struct sockaddr_in address;
	unsigned int established;
	unsigned int disconnected;
	/* Whether the server has answered yet. */
	bool has_server;
};

static void start(struct client *client, struct connection *connection)
{
	check(rdma_create_id(client->side.events, &connection->id, connection, RDMA_PS_TCP),
	      "rdma_create_id");
	check(rdma_resolve_addr(connection->id, NULL, (struct sockaddr *)&client->address,
				RESOLVE_MS), "rdma_resolve_addr");
}

/* The server starts at the same time as the client. */
static void rejected(struct client *client, struct connection *connection,
		     const struct rdma_cm_event *event)
{
	if (client->has_server || event->status != REJECTED_NO_LISTENER)
		unexpected(event);
	destroy(connection);
	usleep(WAIT_FOR_LISTENER_US);
	start(client, connection);
}

static void client_event(struct client *client)
{
	struct rdma_cm_event event = next_event(&client->side);
	struct rdma_conn_param parameters = connection_parameters;
	struct connection *connection = event.id->context;

	switch (event.event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		check(rdma_resolve_route(event.id, RESOLVE_MS), "rdma_resolve_route");
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		create_qp(connection);
		check(rdma_connect(event.id, &parameters), "rdma_connect");
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		client->has_server = true;
		client->established++;
		break;
	case RDMA_CM_EVENT_REJECTED:
		rejected(client, connection, &event);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		client->disconnected++;
		break;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		break;
	default:
		unexpected(&event);
	}
}

static void connect_all(struct client *client, unsigned int first, unsigned int n,
			unsigned int in_flight)
{
	struct connection *connection = client->side.connections;
	unsigned int started = 0;

	client->established = 0;
	while (client->established < n) {
		/* One alone until the server has answered. */
		unsigned int most = client->has_server ? in_flight : 1;

		while (started < n && started - client->established < most) {
			connection[started].number = first + started;
			start(client, &connection[started++]);
		}
		client_event(client);
	}
}

static void talk(struct client *client, unsigned int n)
{
	struct side *side = &client->side;
	unsigned int place;

	side->messages = 0;
	for (place = 0; place < n; place++)
		post_send(&side->connections[place]);
	for (drain(side); side->messages < n;)
		completion_event(side);
}

static void disconnect_all(struct client *client, unsigned int n)
{
	struct connection *connections = client->side.connections;
	unsigned int place;

	client->disconnected = 0;
	for (place = 0; place < n; place++)
		check(rdma_disconnect(connections[place].id), "rdma_disconnect");
	while (client->disconnected < n)
		client_event(client);
	for (place = 0; place < n; place++)
		destroy(&connections[place]);
}

static double now(void)
{
	struct timespec time;

	check(clock_gettime(CLOCK_MONOTONIC, &time), "clock_gettime");
	return time.tv_sec + time.tv_nsec / 1e9;
}

static int run_client(const char *address, unsigned int count, unsigned int at_a_time,
		      unsigned int in_flight)
{
	struct client client = {
		.address = { .sin_family = AF_INET, .sin_port = htons(PORT) },
	};
	unsigned int done, n, first = 0;
	double begin = 0;

	if (inet_pton(AF_INET, address, &client.address.sin_addr) != 1)
		fail("%s is no IPv4 address", address);
	side_init(&client.side, count, at_a_time);
	for (done = 0; done < count; done += n) {
		n = count - done < at_a_time ? count - done : at_a_time;
		alarm(HANG_SECONDS);
		connect_all(&client, done, n, in_flight);
		talk(&client, n);
		disconnect_all(&client, n);
		printf("%u connections made and ended\n", done + n);
		fflush(stdout);
		if (!done) {
			first = n;
			begin = now();
		}
	}
	if (count > first)
		printf("connections a second: %.1f\n", (count - first) / (now() - begin));
	side_close(&client.side);
	return 0;
}

/* The server's part. */

static void accept_request(struct side *side, struct rdma_cm_event *event)
{
	struct rdma_conn_param parameters = connection_parameters;
	struct connection *connection;

	if (!side->free_count)
		fail("more than %u connections", side->at_a_time);
	connection = &side->connections[side->free[--side->free_count]];
	connection->id = event->id;
	event->id->context = connection;
	create_qp(connection);
	post_receive(connection);
	check(rdma_accept(event->id, &parameters), "rdma_accept");
}

/* Answers a disconnection; the message came before it. */
static void release(struct side *side, struct connection *connection)
{
	check(rdma_disconnect(connection->id), "rdma_disconnect");
	drain(side);
	destroy(connection);
	side->free[side->free_count++] = place_of(connection);
}

/* Returns whether a connection has ended. */
static bool server_event(struct side *side)
{
	struct rdma_cm_event event = next_event(side);

	alarm(HANG_SECONDS);
	switch (event.event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		accept_request(side, &event);
		return false;
	case RDMA_CM_EVENT_DISCONNECTED:
		release(side, event.id->context);
		return true;
	case RDMA_CM_EVENT_ESTABLISHED:
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		return false;
	default:
		unexpected(&event);
	}
}

/* Waits for the CM or, once there is one, the CQ. */
static bool server_wait(struct side *side)
{
	struct pollfd fds[] = {
		{ .fd = side->events->fd, .events = POLLIN },
		{ .fd = side->completions ? side->completions->fd : -1, .events = POLLIN },
	};

	if (poll(fds, 2, -1) < 0)
		fail("poll: %s", strerror(errno));
	if (fds[1].revents)
		completion_event(side);
	return fds[0].revents && server_event(side);
}

static int run_server(unsigned int count, unsigned int at_a_time)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	struct rdma_cm_id *listener;
	struct side side;
	unsigned int ended;

	side_init(&side, count, at_a_time);
	check(rdma_create_id(side.events, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(rdma_bind_addr(listener, (struct sockaddr *)&address), "rdma_bind_addr");
	check(rdma_listen(listener, at_a_time), "rdma_listen");
	for (ended = 0; ended < count;)
		ended += server_wait(&side);
	if (side.messages != count)
		fail("%u messages on %u connections", side.messages, count);
	check(rdma_destroy_id(listener), "rdma_destroy_id");
	side_close(&side);
	return 0;
}

static unsigned int number(const char *text)
{
	unsigned long value = strtoul(text, NULL, 0);

	if (!value || value > 1000000)
		fail("%s: not from 1 to 1000000", text);
	return value;
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "server"))
		return run_server(number(argv[2]), number(argv[3]));
	if (argc == 6 && !strcmp(argv[1], "client"))
		return run_client(argv[2], number(argv[3]), number(argv[4]), number(argv[5]));
	fail("usage: %s server COUNT AT_A_TIME | client ADDRESS COUNT AT_A_TIME IN_FLIGHT",
	     argv[0]);
}
