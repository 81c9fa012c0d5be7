// SPDX-License-Identifier: GPL-2.0
/*
 * RC between two programs that tell each other over TCP where they are: a SEND
 * from the server to the client, an RDMA READ and an RDMA WRITE by the client.
 *
 * Usage: rc_tcp DEVICE GID_INDEX [SERVER]
 */
#include <netdb.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#include "../check.h"

#define SERVICE "18710"
#define SIZE 64
#define SENT "from the server, by SEND"
#define READ "from the server, by RDMA READ"
#define WRITTEN "from the client, by RDMA WRITE"

/* What one end tells the other. Both run this program, on machines of one kind. */
struct place {
	union ibv_gid gid;
	uint64_t address;
	uint32_t rkey;
	uint32_t qpn;
};

struct end {
	int sock;
	bool is_client;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char text[SIZE];
	struct place other;
};

static int tcp_server(const struct addrinfo *address)
{
	int yes = 1, sock, listener = socket(address->ai_family, SOCK_STREAM, 0);

	if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) ||
	    bind(listener, address->ai_addr, address->ai_addrlen) || listen(listener, 1))
		fail("listen: %s", strerror(errno));
	sock = accept(listener, NULL, NULL);
	close(listener);
	return sock;
}

static int tcp_client(const struct addrinfo *address)
{
	int sock = socket(address->ai_family, SOCK_STREAM, 0);

	check(connect(sock, address->ai_addr, address->ai_addrlen), "connect");
	return sock;
}

static int tcp(const char *server)
{
	struct addrinfo *address, hints = {
		.ai_family = AF_INET,
		.ai_socktype = SOCK_STREAM,
		.ai_flags = server ? 0 : AI_PASSIVE,
	};
	int sock, error = getaddrinfo(server, SERVICE, &hints, &address);

	if (error)
		fail("%s: %s", server, gai_strerror(error));
	sock = server ? tcp_client(address) : tcp_server(address);
	if (sock < 0)
		fail("accept: %s", strerror(errno));
	freeaddrinfo(address);
	return sock;
}

/* Trades as many bytes with the other end; returns when both ends have come here. */
static void trade(int sock, const void *mine, void *theirs, size_t size)
{
	if (write(sock, mine, size) != (ssize_t)size ||
	    recv(sock, theirs, size, MSG_WAITALL) != (ssize_t)size)
		fail("the other end has gone");
}

static void step(const struct end *end)
{
	char mine = 's', theirs;

	trade(end->sock, &mine, &theirs, 1);
}

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = checked(ibv_get_device_list(NULL), "ibv_get_device_list");
	struct ibv_context *context = NULL;
	int number;

	for (number = 0; list[number]; number++)
		if (!strcmp(ibv_get_device_name(list[number]), name))
			context = checked(ibv_open_device(list[number]), "ibv_open_device");
	ibv_free_device_list(list);
	if (!context)
		fail("there is no %s", name);
	return context;
}

static void create(struct end *end)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};

	end->pd = checked(ibv_alloc_pd(end->context), "ibv_alloc_pd");
	end->cq = checked(ibv_create_cq(end->context, 2, NULL, NULL, 0), "ibv_create_cq");
	end->mr = checked(ibv_reg_mr(end->pd, end->text, SIZE, IBV_ACCESS_LOCAL_WRITE |
				     IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE),
			  "ibv_reg_mr");
	attr.send_cq = end->cq;
	attr.recv_cq = end->cq;
	end->qp = checked(ibv_create_qp(end->pd, &attr), "ibv_create_qp");
}

static void to_init(struct end *end)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
	};

	check(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    IBV_QP_ACCESS_FLAGS), "to INIT");
}

static void to_rtr(struct end *end, int gid_index)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = end->other.qpn,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1,
			.port_num = 1,
			.grh = { .dgid = end->other.gid, .sgid_index = gid_index, .hop_limit = 64 },
		},
	};

	check(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			    IBV_QP_MIN_RNR_TIMER), "to RTR");
}

static void to_rts(struct end *end)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS,
		.timeout = 18,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = 1,
	};

	check(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			    IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "to RTS");
}

static struct ibv_sge all_of(const struct end *end)
{
	return (struct ibv_sge) { (uintptr_t)end->text, SIZE, end->mr->lkey };
}

static void post_receive(struct end *end)
{
	struct ibv_sge sge = all_of(end);
	struct ibv_recv_wr *bad, wr = { .sg_list = &sge, .num_sge = 1 };

	check(ibv_post_recv(end->qp, &wr, &bad), "ibv_post_recv");
}

static void post(struct end *end, enum ibv_wr_opcode opcode)
{
	struct ibv_sge sge = all_of(end);
	struct ibv_send_wr *bad, wr = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = opcode,
		.wr.rdma = { .remote_addr = end->other.address, .rkey = end->other.rkey },
	};

	check(ibv_post_send(end->qp, &wr, &bad), "ibv_post_send");
}

static void complete(struct end *end, const char *what)
{
	struct ibv_wc wc;
	int polled;

	do
		polled = ibv_poll_cq(end->cq, 1, &wc);
	while (!polled);
	if (polled < 0 || wc.status != IBV_WC_SUCCESS)
		fail("%s: %s", what, polled < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
}

static void expect(const struct end *end, const char *text)
{
	if (strcmp(end->text, text))
		fail("got \"%.*s\" instead of \"%s\"", SIZE, end->text, text);
	printf("%s\n", text);
}

static void meet(struct end *end, int gid_index)
{
	struct place mine = {
		.address = (uintptr_t)end->text,
		.rkey = end->mr->rkey,
		.qpn = end->qp->qp_num,
	};

	check(ibv_query_gid(end->context, 1, gid_index, &mine.gid), "ibv_query_gid");
	trade(end->sock, &mine, &end->other, sizeof(mine));
	to_init(end);
	if (end->is_client)
		post_receive(end);
	to_rtr(end, gid_index);
	to_rts(end);
	step(end);
}

static void serve(struct end *end)
{
	strcpy(end->text, SENT);
	post(end, IBV_WR_SEND);
	complete(end, "SEND");
	strcpy(end->text, READ);
	step(end);
	/* The client reads, and writes, and says so. */
	step(end);
	expect(end, WRITTEN);
}

static void ask(struct end *end)
{
	complete(end, "receive");
	expect(end, SENT);
	step(end);
	post(end, IBV_WR_RDMA_READ);
	complete(end, "RDMA READ");
	expect(end, READ);
	strcpy(end->text, WRITTEN);
	post(end, IBV_WR_RDMA_WRITE);
	complete(end, "RDMA WRITE");
	step(end);
}

static void destroy(struct end *end)
{
	check(ibv_destroy_qp(end->qp), "ibv_destroy_qp");
	check(ibv_dereg_mr(end->mr), "ibv_dereg_mr");
	check(ibv_destroy_cq(end->cq), "ibv_destroy_cq");
	check(ibv_dealloc_pd(end->pd), "ibv_dealloc_pd");
	check(ibv_close_device(end->context), "ibv_close_device");
	close(end->sock);
}

int main(int argc, char **argv)
{
	static struct end end;

	if (argc != 3 && argc != 4)
		fail("usage: %s DEVICE GID_INDEX [SERVER]", argv[0]);
	end.is_client = argc == 4;
	end.context = open_device(argv[1]);
	create(&end);
	end.sock = tcp(argv[3]);
	meet(&end, atoi(argv[2]));
	if (end.is_client)
		ask(&end);
	else
		serve(&end);
	destroy(&end);
	return 0;
}
