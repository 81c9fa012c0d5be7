// SPDX-License-Identifier: GPL-2.0
/*
 * Serves a directory by 9P2000.L over RDMA (Documentation/filesystems/9p.rst): the other side of
 * trans=rdma, for which Linux has a client alone. Each message is one SEND. It has what
 * files need: no links, no devices, no extended attributes, no locks and no renames. Each client
 * acts as root.
 *
 * Usage: p9_server ADDRESS DIRECTORY
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#include "check.h"

#define PORT "5640"
#define VERSION "9P2000.L"
/* The largest message, which is the kernel's own limit. */
#define MSIZE (1u << 20)
/* How many requests the kernel's client has under way at most. It allows no RNR NAK. */
#define DEPTH 32
#define FIDS 1024
/* size[4] type[1] tag[2] */
#define HEADER 7
#define NOFID UINT32_MAX

/* include/net/9p/9p.h; a reply has the number that follows its request's. */
enum {
	RLERROR = 7,
	TLOPEN = 12,
	TLCREATE = 14,
	TGETATTR = 24,
	TSETATTR = 26,
	TREADDIR = 40,
	TFSYNC = 50,
	TUNLINKAT = 76,
	TVERSION = 100,
	TATTACH = 104,
	TFLUSH = 108,
	TWALK = 110,
	TREAD = 116,
	TWRITE = 118,
	TCLUNK = 120,
};

enum { QID_FILE = 0, QID_LINK = 0x02, QID_DIRECTORY = 0x80 };
enum { SET_MODE = 1, SET_UID = 2, SET_GID = 4, SET_SIZE = 8, SET_ATIME = 0x10, SET_MTIME = 0x20,
	SET_ATIME_TO = 0x80, SET_MTIME_TO = 0x100 };

/* A message and the place at which it is read or written. One that is too short is bad. */
struct message {
	uint8_t *data;
	size_t at, size;
	bool bad;
};

/* A connection. fids[n] is the file of fid n, opened by O_PATH until TLOPEN, or -1. */
struct session {
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	uint8_t *buffers;
	int fids[FIDS];
};

static int root;

static uint8_t *take(struct message *message, size_t count)
{
	uint8_t *place = message->data + message->at;

	if (count > message->size - message->at) {
		message->bad = true;
		return NULL;
	}
	message->at += count;
	return place;
}

static uint64_t get(struct message *message, size_t count)
{
	uint8_t *place = take(message, count);
	uint64_t value = 0;

	if (place)
		memcpy(&value, place, count);
	return le64toh(value);
}

static void put(struct message *message, uint64_t value, size_t count)
{
	uint8_t *place = take(message, count);

	value = htole64(value);
	if (place)
		memcpy(place, &value, count);
}

/* Gets the name of a file in a directory. Another string makes the message bad. */
static void get_name(struct message *message, char name[NAME_MAX + 1])
{
	size_t length = get(message, 2);
	uint8_t *place = take(message, length);

	name[0] = 0;
	if (!place || length > NAME_MAX || memchr(place, 0, length) || memchr(place, '/', length)) {
		message->bad = true;
		return;
	}
	memcpy(name, place, length);
	name[length] = 0;
}

static void put_string(struct message *message, const char *string)
{
	size_t length = strlen(string);
	uint8_t *place;

	put(message, length, 2);
	place = take(message, length);
	if (place)
		memcpy(place, string, length);
}

static void put_qid(struct message *message, uint8_t type, uint64_t inode)
{
	put(message, type, 1);
	put(message, 0, 4);
	put(message, inode, 8);
}

static int put_qid_of(struct message *message, int file)
{
	struct stat stat;

	if (fstat(file, &stat))
		return errno;
	put_qid(message, S_ISDIR(stat.st_mode) ? QID_DIRECTORY : S_ISLNK(stat.st_mode) ? QID_LINK : QID_FILE,
		stat.st_ino);
	return 0;
}

/* Returns the file of a fid, or -1, which every system call refuses. */
static int get_file(struct session *session, struct message *in)
{
	uint32_t fid = get(in, 4);

	return fid < FIDS ? session->fids[fid] : -1;
}

/* Makes a file that of a fid, or closes it. */
static int set_fid(struct session *session, uint32_t fid, int file)
{
	if (file < 0)
		return errno;
	if (fid >= FIDS) {
		close(file);
		return EMFILE;
	}
	if (session->fids[fid] >= 0)
		close(session->fids[fid]);
	session->fids[fid] = file;
	return 0;
}

/* The path of an open file, by which it can be opened once more. */
static void path_of(int file, char path[32])
{
	snprintf(path, 32, "/proc/self/fd/%d", file);
}

static int version(struct session *session, struct message *in, struct message *out)
{
	uint32_t msize = get(in, 4);

	(void)session;
	put(out, msize < MSIZE ? msize : MSIZE, 4);
	put_string(out, VERSION);
	return 0;
}

static int attach(struct session *session, struct message *in, struct message *out)
{
	uint32_t fid = get(in, 4);

	return set_fid(session, fid, dup(root)) ?: put_qid_of(out, root);
}

/* Requests are answered one after the other: when this one comes, that which it names is answered. */
static int flush(struct session *session, struct message *in, struct message *out)
{
	(void)session;
	(void)in;
	(void)out;
	return 0;
}

/* Opens a file of a directory. The root has no parent. */
static int step(int directory, const char *name)
{
	struct stat here, top;

	if (!strcmp(name, "..") && !fstat(directory, &here) && !fstat(root, &top) && here.st_ino == top.st_ino)
		name = ".";
	return openat(directory, name, O_PATH | O_NOFOLLOW);
}

static int walk(struct session *session, struct message *in, struct message *out)
{
	int file = dup(get_file(session, in)), next, error;
	uint32_t fid = get(in, 4), names = get(in, 2), done;
	size_t count = out->at;
	char name[NAME_MAX + 1];

	put(out, names, 2);
	for (done = 0; done < names && file >= 0; done++) {
		get_name(in, name);
		next = step(file, name);
		error = next < 0 ? errno : put_qid_of(out, next);
		close(file);
		file = next;
		if (file < 0 && !done)
			return error;
		if (file < 0) {
			/* The fid is as it was, and the client sees how far the names led. */
			out->at = count;
			put(out, done, 2);
			out->at += done * 13;
			return 0;
		}
	}
	return set_fid(session, fid, file);
}

static int clunk(struct session *session, struct message *in, struct message *out)
{
	uint32_t fid = get(in, 4);

	(void)out;
	if (fid >= FIDS || session->fids[fid] < 0)
		return EBADF;
	close(session->fids[fid]);
	session->fids[fid] = -1;
	return 0;
}

static void put_time(struct message *message, struct timespec time)
{
	put(message, time.tv_sec, 8);
	put(message, time.tv_nsec, 8);
}

static int getattr(struct session *session, struct message *in, struct message *out)
{
	/* P9_STATS_BASIC */
	const uint64_t valid = 0x7ff;
	int file = get_file(session, in);
	struct stat stat;

	if (fstat(file, &stat))
		return errno;
	put(out, valid, 8);
	put_qid_of(out, file);
	put(out, stat.st_mode, 4);
	put(out, stat.st_uid, 4);
	put(out, stat.st_gid, 4);
	put(out, stat.st_nlink, 8);
	put(out, stat.st_rdev, 8);
	put(out, stat.st_size, 8);
	put(out, stat.st_blksize, 8);
	put(out, stat.st_blocks, 8);
	put_time(out, stat.st_atim);
	put_time(out, stat.st_mtim);
	put_time(out, stat.st_ctim);
	/* The time of birth, the generation and the data's version, of which "valid" says nothing. */
	put_time(out, (struct timespec){ 0 });
	put(out, 0, 8);
	put(out, 0, 8);
	return 0;
}

static struct timespec get_time(struct message *message, bool set, bool given)
{
	struct timespec time = { .tv_sec = get(message, 8), .tv_nsec = get(message, 8) };

	if (!set)
		time.tv_nsec = UTIME_OMIT;
	else if (!given)
		time.tv_nsec = UTIME_NOW;
	return time;
}

static int setattr(struct session *session, struct message *in, struct message *out)
{
	int file = get_file(session, in);
	uint32_t valid = get(in, 4), mode = get(in, 4), uid = get(in, 4), gid = get(in, 4);
	uint64_t size = get(in, 8);
	struct timespec times[2];
	char path[32];

	(void)out;
	times[0] = get_time(in, valid & SET_ATIME, valid & SET_ATIME_TO);
	times[1] = get_time(in, valid & SET_MTIME, valid & SET_MTIME_TO);
	path_of(file, path);
	if ((valid & SET_MODE && chmod(path, mode & ~S_IFMT)) ||
	    (valid & (SET_UID | SET_GID) &&
	     chown(path, valid & SET_UID ? uid : (uid_t)-1, valid & SET_GID ? gid : (gid_t)-1)) ||
	    (valid & SET_SIZE && truncate(path, size)) || utimensat(AT_FDCWD, path, times, 0))
		return errno;
	return 0;
}

/* Gives a fid an opened file, and says which. */
static int opened(struct session *session, uint32_t fid, int file, struct message *out)
{
	int error = set_fid(session, fid, file);

	if (error)
		return error;
	error = put_qid_of(out, file);
	/* The client finds out how many bytes a message takes. */
	put(out, 0, 4);
	return error;
}

static int lopen(struct session *session, struct message *in, struct message *out)
{
	uint32_t fid = get(in, 4), flags = get(in, 4);
	char path[32];

	if (fid >= FIDS)
		return EBADF;
	path_of(session->fids[fid], path);
	return opened(session, fid, open(path, flags & (O_ACCMODE | O_TRUNC | O_DIRECTORY)), out);
}

static int lcreate(struct session *session, struct message *in, struct message *out)
{
	uint32_t fid = get(in, 4), flags, mode;
	char name[NAME_MAX + 1];

	get_name(in, name);
	flags = get(in, 4);
	mode = get(in, 4);
	if (in->bad || fid >= FIDS)
		return EBADF;
	return opened(session, fid,
		      openat(session->fids[fid], name, O_CREAT | O_NOFOLLOW | (flags & (O_ACCMODE | O_TRUNC | O_EXCL)),
			     mode & 07777), out);
}

/* Reads into a reply: its count, and the bytes behind that. */
static int read_file(struct session *session, struct message *in, struct message *out)
{
	int file = get_file(session, in);
	uint64_t offset = get(in, 8);
	uint32_t count = get(in, 4);
	uint8_t *place = take(out, 4);
	ssize_t done;

	if (count > out->size - out->at)
		count = out->size - out->at;
	done = pread(file, place + 4, count, offset);
	if (done < 0)
		return errno;
	out->at -= 4;
	put(out, done, 4);
	take(out, done);
	return 0;
}

static int write_file(struct session *session, struct message *in, struct message *out)
{
	int file = get_file(session, in);
	uint64_t offset = get(in, 8);
	uint32_t count = get(in, 4);
	uint8_t *place = take(in, count);
	ssize_t done = place ? pwrite(file, place, count, offset) : 0;

	if (done < 0)
		return errno;
	put(out, done, 4);
	return 0;
}

/* Puts the entries of a directory that have room. "offset" is that of the first one. */
static int read_directory(struct session *session, struct message *in, struct message *out)
{
	int file = get_file(session, in);
	uint64_t offset = get(in, 8);
	uint32_t count = get(in, 4);
	size_t start = out->at;
	uint8_t entries[4096];
	ssize_t bytes, at;

	put(out, 0, 4);
	/* An entry of a reply is as large as that of the system call or smaller. */
	if (count > sizeof(entries))
		count = sizeof(entries);
	if (lseek(file, offset, SEEK_SET) < 0)
		return errno;
	bytes = getdents64(file, entries, count);
	if (bytes < 0)
		return errno;
	for (at = 0; at < bytes;) {
		const struct dirent64 *entry = (const void *)(entries + at);

		put_qid(out, entry->d_type == DT_DIR ? QID_DIRECTORY : QID_FILE, entry->d_ino);
		put(out, entry->d_off, 8);
		put(out, entry->d_type, 1);
		put_string(out, entry->d_name);
		at += entry->d_reclen;
	}
	bytes = out->at - start - 4;
	out->at = start;
	put(out, bytes, 4);
	take(out, bytes);
	return 0;
}

static int sync_file(struct session *session, struct message *in, struct message *out)
{
	(void)out;
	return fsync(get_file(session, in)) ? errno : 0;
}

static int unlink_at(struct session *session, struct message *in, struct message *out)
{
	int directory = get_file(session, in);
	char name[NAME_MAX + 1];
	uint32_t flags;

	(void)out;
	get_name(in, name);
	flags = get(in, 4);
	if (in->bad)
		return EINVAL;
	return unlinkat(directory, name, flags & AT_REMOVEDIR) ? errno : 0;
}

static int (*const operations[UINT8_MAX + 1])(struct session *session, struct message *in, struct message *out) = {
	[TLOPEN] = lopen,
	[TLCREATE] = lcreate,
	[TGETATTR] = getattr,
	[TSETATTR] = setattr,
	[TREADDIR] = read_directory,
	[TFSYNC] = sync_file,
	[TUNLINKAT] = unlink_at,
	[TVERSION] = version,
	[TATTACH] = attach,
	[TFLUSH] = flush,
	[TWALK] = walk,
	[TREAD] = read_file,
	[TWRITE] = write_file,
	[TCLUNK] = clunk,
};

/* Writes the reply to a request. */
static void answer(struct session *session, struct message *in, struct message *out)
{
	uint8_t type;
	uint16_t tag;
	int error = EOPNOTSUPP;
	size_t size;

	take(in, 4);
	type = get(in, 1);
	tag = get(in, 2);
	out->at = HEADER;
	if (operations[type])
		error = operations[type](session, in, out);
	if (in->bad || out->bad)
		error = EPROTO;
	if (error) {
		out->at = HEADER;
		out->bad = false;
		put(out, error, 4);
	}
	size = out->at;
	out->at = 0;
	put(out, size, 4);
	put(out, error ? RLERROR : type + 1, 1);
	put(out, tag, 2);
	out->size = size;
}

static uint8_t *buffer_of(struct session *session, unsigned int slot)
{
	return session->buffers + (size_t)slot * MSIZE;
}

static bool post_receive(struct session *session, unsigned long slot)
{
	return !rdma_post_recv(session->id, (void *)slot, buffer_of(session, slot), MSIZE, session->mr);
}

/* Waits for a request. Returns false if the connection ends. */
static bool receive(struct session *session, struct ibv_wc *wc)
{
	struct rdma_cm_id *id = session->id;
	struct pollfd files[] = {
		{ .fd = id->recv_cq_channel->fd, .events = POLLIN },
		{ .fd = id->channel->fd, .events = POLLIN },
	};
	struct ibv_cq *cq;
	void *context;
	int polled;

	while (!(polled = ibv_poll_cq(id->recv_cq, 1, wc))) {
		if (ibv_req_notify_cq(id->recv_cq, 0))
			return false;
		polled = ibv_poll_cq(id->recv_cq, 1, wc);
		if (polled)
			break;
		if (poll(files, 2, -1) < 0 || files[1].revents || ibv_get_cq_event(id->recv_cq_channel, &cq, &context))
			return false;
		ibv_ack_cq_events(cq, 1);
	}
	return polled == 1 && wc->status == IBV_WC_SUCCESS;
}

/* Sends a reply, and waits until its buffer is free. */
static bool reply(struct session *session, const struct message *out)
{
	struct ibv_wc wc;

	return !rdma_post_send(session->id, NULL, out->data, out->size, session->mr, IBV_SEND_SIGNALED) &&
	       rdma_get_send_comp(session->id, &wc) == 1 && wc.status == IBV_WC_SUCCESS;
}

static bool open_session(struct session *session)
{
	struct rdma_conn_param parameters = { .retry_count = 7, .rnr_retry_count = 7 };
	unsigned int slot;

	/* The last one is that of replies. */
	session->buffers = aligned_alloc(4096, (DEPTH + 1) * (size_t)MSIZE);
	if (!session->buffers)
		return false;
	session->mr = rdma_reg_msgs(session->id, session->buffers, (DEPTH + 1) * (size_t)MSIZE);
	if (!session->mr)
		return false;
	for (slot = 0; slot < FIDS; slot++)
		session->fids[slot] = -1;
	for (slot = 0; slot < DEPTH; slot++)
		if (!post_receive(session, slot))
			return false;
	return !rdma_accept(session->id, &parameters);
}

static void close_session(struct session *session)
{
	unsigned int fid;

	rdma_disconnect(session->id);
	for (fid = 0; session->mr && fid < FIDS; fid++)
		if (session->fids[fid] >= 0)
			close(session->fids[fid]);
	if (session->mr)
		rdma_dereg_mr(session->mr);
	rdma_destroy_ep(session->id);
	free(session->buffers);
	free(session);
}

static void *serve(void *argument)
{
	struct session *session = argument;
	struct ibv_wc wc;

	if (!open_session(session))
		perror("a connection is not taken");
	else
		while (receive(session, &wc)) {
			struct message in = { .data = buffer_of(session, wc.wr_id), .size = wc.byte_len };
			struct message out = { .data = buffer_of(session, DEPTH), .size = MSIZE };

			answer(session, &in, &out);
			if (!post_receive(session, wc.wr_id) || !reply(session, &out))
				break;
		}
	close_session(session);
	return NULL;
}

static struct rdma_cm_id *listen_at(const char *address)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *info;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct rdma_cm_id *id;

	check(rdma_getaddrinfo(address, PORT, &hints, &info), "rdma_getaddrinfo");
	check(rdma_create_ep(&id, info, NULL, &attr), "rdma_create_ep");
	rdma_freeaddrinfo(info);
	check(rdma_listen(id, 16), "rdma_listen");
	return id;
}

int main(int argc, char **argv)
{
	struct rdma_cm_id *listener;
	struct session *session;
	pthread_t thread;

	if (argc != 3)
		fail("usage: p9_server ADDRESS DIRECTORY");
	root = open(argv[2], O_PATH | O_DIRECTORY);
	check(root < 0 ? -1 : 0, argv[2]);
	umask(0);
	listener = listen_at(argv[1]);
	puts("listening");
	fflush(stdout);
	for (;;) {
		session = calloc(1, sizeof(*session));
		if (!session)
			fail("no memory for a connection");
		check(rdma_get_request(listener, &session->id), "rdma_get_request");
		if (pthread_create(&thread, NULL, serve, session))
			fail("no thread for a connection");
		pthread_detach(thread);
	}
}
