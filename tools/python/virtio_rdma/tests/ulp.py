# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Kernel consumers between two guests, by the steps of selftests/virtio_rdma/ulp.sh."""

import re
import signal

from virtio_rdma.tests.networks import HANG_SECONDS, REPORT_LINES

# Connections of SMC-R, two at a time.
STREAMS = 20
RECONNECTS = {("uml", "plain"): 20, ("qemu", "plain"): 5, ("qemu", "debug"): 2}

# isert_create_send_desc() of Linux 7.2.12 syncs a header that isert_init_tx_hdrs() has yet to map. DMA-API debugging
# says so, once.
UNMAPPED = re.compile(r"tries to sync DMA memory it has not allocated \[device address=0x0+\] \[size=76 bytes\]|"
                      r"WARNING: kernel/dma/debug\.c:\d+ at check_sync\+")
# What the kernel's debugging reports of the consumers, and a function that each report names:
# * rds_ib_laddr_check_cm() of Linux 7.2.12 makes a cm_id to bind it, and destroys it in the handler of another. Lockdep
#   takes their two handler_mutex, of one lock class, for one.
# * The timer of iscsi_target_mod for a session without connections takes se_tpg->session_lock in softirqs. That lock is
#   outside of tpg_state_lock, which others hold with softirqs on.
# * nvmet executes a Connect command that comes before its connection is established in the handler of the connection,
#   where it takes nvmet_config_sem. It holds this semaphore when it destroys its listener, whose handler_mutex is
#   another one of the same lock class.
# * If srp_rport_reconnect() cannot make a CQ, as on a device that has failed, it keeps the old send CQ, with the
#   completions that nobody has polled, and puts all IUs into the list of free ones. srp_remove_target() frees the
#   requests of its SCSI host and then polls that CQ: it looks for the handlers of flushed work requests in the freed
#   requests, and puts IUs into the list once more. Both reports come over rxe as well, if a probe lets CQs fail.
# * rds_dma_hdr_alloc() maps each header for both directions, and rds_dma_hdr_free() unmaps it for one. DMA-API
#   debugging says so when the first connection ends.
# * recv_done() of net/9p/trans_rdma.c frees the context of a receive that is flushed, and not its buffer. So a mount
#   whose connection ended under a request leaves a cache of buffers that is not empty.
# * smb_direct_listener_destroy() of ksmbd shuts the listener's socket down, at which the listener's thread may end by
#   itself, and then calls kthread_stop() with that thread, of which it has no reference.
# * When iSER adds its SCSI host, scsi_init_limits() limits the segments of the device that does the DMA to 64 KiB,
#   because iSER does not say how long its segments may be. SMC then maps its buffers of 4 MiB as one segment.
REPORTS = {"WARNING: possible recursive locking detected": "rds_ib_laddr_check+",
           "WARNING: possible irq lock inversion dependency detected": "iscsit_handle_time2retain_timeout+",
           "WARNING: possible circular locking dependency detected": "at: nvmet_find_get_subsys+",
           "BUG: KASAN: use-after-free in __ib_process_cq+": "srp_free_ch_ib+",
           "at __list_add_valid_or_report+": "srp_send_done+",
           "frees DMA memory with different direction": "rds_ib_conn_path_shutdown+",
           "at check_unmap+": "rds_ib_conn_path_shutdown+",
           "at kmem_cache_destroy+": "p9_client_destroy+",
           "refcount_t: ": "ksmbd_rdma_stop_listening+",
           "at refcount_warn_saturate+": "ksmbd_rdma_stop_listening+",
           "at __put_task_struct+": "ksmbd_rdma_stop_listening+",
           "at debug_dma_map_sg+": "smc_ib_buf_map_sg+"}


def is_known(guest, line):
    """Returns whether a report in a kernel log is of a defect of the consumers of Linux 7.2.12."""
    for report, function in REPORTS.items():
        if report in line:
            return any(function in after for after in guest.log_after(line, REPORT_LINES))
    return bool(UNMAPPED.search(line))


def load_driver(guest, *parameters):
    """Loads the driver again, with these module parameters. Its device must be in no use."""
    guest.check(f"rmmod virtio_rdma && insmod /run/vr/virtio_rdma.ko {' '.join(parameters)}")


# The steps that load consumers other than disks until they are told to end.
LOADS = {"nfs": "load_files", "smb": "load_files", "9p": "load_files", "rds": "load_datagrams", "smc": "load_streams"}


class Stop(Exception):
    """Raised where a step failed without which those behind it say nothing."""


class Ulp:
    """The steps of one consumer in two guests, the target's and the host's. `prefix` stands in front of the names of
    its results."""

    def __init__(self, results, guests, kind, prefix=""):
        self.results = results
        self.kind = kind
        self.name = prefix + kind
        self.load = LOADS.get(kind, "load_fs")
        self.target, self.host = guests
        self.env = {"ADDRESS": self.target.address, "CLIENT": self.host.address}

    def result(self, name, passed=True):
        """Reports a result."""
        return self.results.result(f"{self.name}: {name}", passed)

    def start(self, guest, *words):
        """Starts a step in a guest."""
        command = f"cd /mnt/virtio_rdma && exec ./ulp.sh {self.kind} {' '.join(words)}"
        return guest.start(command, self.env | {"RDMA_DEVICE": guest.link[0]})

    def step(self, guest, *words):
        """Runs a step in a guest, and returns its status and output."""
        job = self.start(guest, *words)
        return job.wait(HANG_SECONDS), job.text

    def missing(self):
        """Returns what the guests need and do not have, or ""."""
        for guest in (self.target, self.host):
            status, text = self.step(guest, "missing")
            if status or text.strip():
                return text.strip().replace("\n", ", ")
        return ""

    def do(self, guest, *words, name=None):
        """Runs a step that must succeed, or what follows makes no sense."""
        status, text = self.step(guest, *words)
        if status:
            self.results.note(text)
            self.results.note(guest.run("dmesg | tail -n 40")[1])
        self.result(name or words[0], status == 0)
        if status:
            raise Stop

    def fault(self, guest, *words, name):
        """Runs a step of fault.sh in a guest."""
        command = f"cd /mnt/virtio_rdma && exec ./fault.sh {' '.join(words)}"
        status, text = guest.run(command, {"RDMA_DEVICE": guest.link[0]}, timeout=HANG_SECONDS)
        if status:
            self.results.note(text)
            self.results.note(guest.run("echo w >/proc/sysrq-trigger; dmesg | tail -n 60")[1])
        self.result(name, status == 0)
        if status:
            raise Stop

    def run(self, *parts):
        """Runs the parts of a consumer's test. After a failure the rest is left out, and what is left behind is not
        looked at. A consumer that the guests do not have is skipped."""
        missing = self.missing()
        if missing:
            self.results.result(self.name, skip=missing)
            return
        try:
            for part in parts:
                part()
            for guest in (self.target, self.host):
                self.do(guest, "wait_for", "no_connections", name=f"nothing_left_in_guest_{guest.number}")
        except Stop:
            self.results.note(f"{self.kind}: the rest was left out")

    def blocks(self):
        """A remote disk: blocks, a file system, and the same after it was connected again."""
        self.do(self.target, "target_up")
        if self.kind == "srp":
            self.env["GUID"] = self.step(self.target, "guid")[1].strip()
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "raw", name="raw_blocks")
        self.do(self.host, "verify", name="fio_verify")
        self.do(self.host, "write_tree", name="ext4_written")
        self.do(self.host, "read_tree", name="ext4_read")
        self.do(self.host, "disconnect")

    def files(self):
        """A remote file system: files, and the same after it was mounted again."""
        self.do(self.target, "target_up")
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "write_tree", name="files_written")
        self.do(self.target, "stored")
        self.do(self.host, "read_tree", name="files_read")
        self.do(self.host, "verify_files", name="fio_verify")
        self.do(self.host, "disconnect")

    def large(self):
        """A file of a remote file system that is as large as the memory of the host."""
        self.do(self.target, "target_up")
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "large", name="1_GiB_there_and_back")
        self.do(self.host, "disconnect")

    def serves_again(self):
        """The target goes and comes back while no host is connected, and has the same bytes."""
        self.do(self.target, "target_gone")
        self.do(self.target, "target_back")
        self.do(self.host, "connect", name="connect_again")
        self.do(self.host, "read_tree", name="files_read_again")
        self.do(self.host, "disconnect", name="disconnect_again")

    def streams(self):
        """Connections whose bytes come back, each over the RDMA device."""
        for guest in (self.target, self.host):
            self.do(guest, "up", name=f"group_of_guest_{guest.number}")
        server = self.start(self.target, "serve")
        server.shows("listening", HANG_SECONDS)
        status, text = self.step(self.host, "ask", str(STREAMS))
        if not self.result("streams", status == 0 and f"devices: {self.host.link[0]}" in text.splitlines()):
            self.results.note(text + server.text)
        self.do(self.host, "ask_large", name="buffers_that_no_registration_takes")
        server.kill(signal.SIGTERM)
        server.wait(HANG_SECONDS)
        for guest in (self.target, self.host):
            self.do(guest, "down", name=f"ends_in_guest_{guest.number}")

    def reconnects(self):
        """The same bytes each time the host connects."""
        options = self.host.options
        for _ in range(RECONNECTS[options.vmm, options.kernel]):
            for word in ("connect", "read_tree", "disconnect"):
                status, text = self.step(self.host, word)
                if status:
                    self.results.note(f"{word}: {text}")
                    self.results.note(self.host.run("dmesg | tail -n 40")[1])
                    self.result("reconnects", False)
                    raise Stop
        self.result("reconnects")

    def loaded(self, *words):
        """Starts a load that runs until it is told to end. Stops the test if it does not run."""
        job = self.start(self.host, *words)
        if not job.shows("running", HANG_SECONDS):
            self.results.note(job.text)
            self.result("load_runs", False)
            raise Stop
        return job

    def loses_target(self):
        """Under load the target goes away and comes back, and no byte is lost."""
        self.do(self.host, "connect")
        job = self.loaded("load_fs")
        for _ in range(3):
            self.do(self.target, "target_gone")
            self.do(self.host, "wait_for", "is_away", name="host_notices")
            self.do(self.target, "target_back")
            self.do(self.host, "wait_for", "is_live", name="host_reconnects")
        self.do(self.host, "touch", "/tmp/ulp/stop", name="load_told_to_end")
        passed = job.wait(HANG_SECONDS) == 0
        if not passed:
            self.results.note(job.text)
        self.result("load_unharmed", passed)
        self.do(self.host, "check_fs", name="ext4_consistent")
        self.do(self.host, "read_tree", name="ext4_read_again")

    def loses_device(self):
        """Under load the host's device is reset beneath its driver, which takes it into service again, and no byte is
        lost. The second time and the third, the host is about to connect again."""
        self.do(self.target, "target_up")
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "write_tree", name="files_written")
        job = self.loaded("load_fs")
        for _ in range(3):
            self.do(self.host, "wait_for", "has_connections", name="host_connects")
            self.do(self.host, "lose_device", name="device_comes_back")
        self.do(self.host, "touch", "/tmp/ulp/stop", name="load_told_to_end")
        passed = job.wait(HANG_SECONDS) == 0
        if not passed:
            self.results.note(job.text)
        self.result("load_unharmed", passed)
        self.do(self.host, "read_tree", name="files_read")
        self.do(self.host, "disconnect")

    def unloads(self):
        """The target's driver is unloaded while it waits for the target to let go of a device that has failed. nvmet
        does that when its keep-alive timer expires. The timer gets a minute, because it must not expire before the
        driver is unloaded."""
        self.env["KEEP_ALIVE"] = "60"
        self.do(self.target, "target_up")
        self.do(self.host, "store_up", name="place")
        self.do(self.host, "connect")
        self.do(self.host, "write_tree", name="files_written")
        self.fault(self.target, "unload_waiting", name="unloads")
        self.fault(self.target, "load_driver", name="loads_again")
        self.do(self.target, "target_gone", name="target_stops")
        self.do(self.host, "wait_for", "is_away", name="host_notices")
        self.do(self.target, "target_back", name="target_listens_again")
        self.do(self.host, "wait_for", "is_live", name="host_reconnects")
        self.do(self.host, "read_tree", name="files_read")
        self.do(self.host, "disconnect")

    def gives_up(self):
        """The host lets go of a target that is away: its disk is gone, and what used that fails."""
        job = self.loaded("load")
        self.do(self.target, "target_gone", name="target_gone_for_long")
        self.do(self.host, "wait_for", "is_away", name="host_notices_again")
        self.do(self.host, "disconnect", name="host_gives_up")
        self.result("load_fails", job.wait(HANG_SECONDS) != 0)
        self.do(self.target, "target_back", name="target_back_at_last")
        self.do(self.host, "connect", name="connect_again")
        self.do(self.host, "verify", name="fio_verify_again")
        self.do(self.host, "disconnect", name="disconnect_again")

    def ends(self):
        """Target and host are taken down."""
        self.do(self.target, "target_down")
        self.do(self.host, "store_down", name="place_gone")


class SideBySide:
    """Consumers that share the RDMA devices of two guests, each with a load at the same time. One whose end waits until
    there is no connection at all is last."""

    def __init__(self, results, guests, kinds, prefix=""):
        self.results = results
        self.name = f"{prefix}{' beside '.join(kinds)}"
        self.ulps = [Ulp(results, guests, kind, f"{self.name}: ") for kind in kinds]
        for ulp in self.ulps:
            ulp.env["PLACE"] = f"/tmp/{ulp.kind}"

    def run(self):
        """Runs the steps of all. The first failure ends them."""
        missing = ", ".join(filter(None, (ulp.missing() for ulp in self.ulps)))
        if missing:
            self.results.result(self.name, skip=missing)
        else:
            self.ulps[-1].run(self.begin, self.loads, self.end)

    def begin(self):
        """Every consumer has its files."""
        for ulp in self.ulps:
            ulp.do(ulp.target, "target_up")
            ulp.do(ulp.host, "store_up", name="place")
            ulp.do(ulp.host, "connect")
            ulp.do(ulp.host, "write_tree", name="files_written")

    def loads(self):
        """All loads go on while each of the others runs, and no byte is lost."""
        jobs = [(ulp, ulp.loaded(ulp.load)) for ulp in self.ulps]
        for ulp, job in jobs:
            ulp.result("goes_on", job.shows("running", HANG_SECONDS, job.text.count("running") + 2))
        for ulp, job in jobs:
            ulp.do(ulp.host, "touch", f"{ulp.env['PLACE']}/stop", name="load_told_to_end")
            if not ulp.result("load_unharmed", job.wait(HANG_SECONDS) == 0):
                ulp.results.note(job.text)
            ulp.do(ulp.host, "read_tree", name="files_read")

    def end(self):
        """Every consumer is taken down."""
        for ulp in self.ulps:
            ulp.do(ulp.host, "disconnect")
        for ulp in self.ulps:
            ulp.ends()
