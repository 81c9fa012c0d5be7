# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The way to the agent in a guest (tools/vm/guest.d/agent.py): lines of JSON in both directions."""

import json
import signal
import socket
import threading
from typing import Any

from virtio_rdma.common import Failure

# The status of a command whose guest died or restarted under it.
GONE = 255


class Job:
    """A command in a guest. `text` is its whole output so far, `status` its exit status once it has ended:
    128 + the signal that ended it, GONE if its guest died or restarted."""

    def __init__(self, guest, number, what, sink):
        self.guest = guest
        self.what = what
        self.number = number
        self.sink = sink
        self.chunks = []
        self.status = None
        self.done = threading.Event()
        self.news = threading.Condition()

    @property
    def text(self):
        return "".join(self.chunks)

    def output(self, text):
        """Takes output as it comes."""
        with self.news:
            self.chunks.append(text)
            self.news.notify_all()
        if self.sink:
            self.sink(text)

    def finish(self, status):
        """Takes the exit status."""
        with self.news:
            self.status = status
            self.done.set()
            self.news.notify_all()

    def shows(self, text, timeout=None, times=1):
        """Waits until the output holds a text this often. Returns False if the command or the time ends before it
        does."""
        with self.news:
            self.news.wait_for(lambda: self.text.count(text) >= times or self.status is not None, timeout)
            return self.text.count(text) >= times

    def wait(self, timeout=None):
        """Waits for the end, and returns the exit status. Raises Failure after timeout seconds."""
        if not self.done.wait(timeout):
            raise Failure(f"guest {self.guest.number}: {self.what} does not end; {self.guest.whereabouts()}; "
                          f"so far:\n{self.text}")
        return self.status

    def kill(self, number=signal.SIGTERM):
        """Sends it a signal."""
        self.guest.agent.send(id=self.number, kill=int(number))

    def type(self, text):
        """Writes to its standard input."""
        self.guest.agent.send(id=self.number, input=text)


class Agent:
    """The host's end of the channel to a guest's agent. `boots` counts how often the agent has started, and
    `booted` is notified of each start and of the end of the channel."""

    def __init__(self, guest):
        self.guest = guest
        self.channel: Any = None
        self.jobs: dict[int, Job] = {}
        self.next_id = 1
        self.lock = threading.Lock()
        self.boots = 0
        self.booted = threading.Condition()

    def connect(self):
        """Makes the channel, and returns the socket that the guest's process inherits."""
        self.channel, theirs = socket.socketpair()
        return theirs

    def read(self):
        """Thread: takes messages until the guest is gone."""
        try:
            with self.channel.makefile("rb") as stream:
                for line in stream:
                    self.message(line)
        except OSError:
            pass
        self.abandon()
        with self.booted:
            self.booted.notify_all()

    def message(self, line):
        """Takes one message."""
        try:
            message = json.loads(line)
        except ValueError:
            return  # what the terminal echoed before the agent made it raw
        if "ready" in message:
            self.abandon()
            with self.booted:
                self.boots += 1
                self.booted.notify_all()
            return
        with self.lock:
            job = self.jobs.get(message["id"])
        if not job:
            return
        if "out" in message:
            job.output(message["out"])
        else:
            with self.lock:
                self.jobs.pop(message["id"], None)
            job.finish(message["exit"])

    def abandon(self):
        """Ends the jobs of a guest that died or restarted, which will not answer."""
        with self.lock:
            jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            job.finish(GONE)

    def send(self, **message: Any):
        """Sends one message. Raises Failure if the guest is gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self.lock:
                self.channel.sendall(data)
        except OSError as error:
            raise Failure(f"guest {self.guest.number} is gone, see {self.guest.log}") from error

    def new_job(self, what, sink):
        """Returns a job with a number of its own."""
        with self.lock:
            job = Job(self.guest, self.next_id, what, sink)
            self.jobs[job.number] = job
            self.next_id += 1
        return job

    def start(self, argv, env, sink=None, typed=False):
        """Starts a command. sink gets its output as it comes. Typed: it reads what Job.type() gives it."""
        if isinstance(argv, str):
            argv = ["bash", "-c", argv]
        job = self.new_job(" ".join(argv), sink)
        self.send(id=job.number, run=argv, env=env, typed=typed)
        return job
