#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Process 1 of a guest: runs the commands that the host sends.

One JSON object a line in both directions on a character device (a virtio
serial port, or a terminal of user-mode Linux in raw mode).

Host to guest:
  {"id": N, "run": [ARGV], "env": {...}}    start a command; with "typed": true
                                            it reads what is typed
  {"id": N, "shell": [ROWS, COLS]}          start an interactive shell
  {"id": N, "input": TEXT}                  what it shall read
  {"id": N, "kill": SIGNAL}                 signal a command and its children
  {"end": "off" | "reboot"}                 end this guest, or restart it
Guest to host:
  {"ready": BOOT_ID}                        once a boot
  {"id": N, "out": TEXT}                    output (stdout and stderr)
  {"id": N, "exit": STATUS}                 128 + signal when killed by one
"""

import ctypes
import fcntl
import json
import os
import pty
import selectors
import signal
import socket
import struct
import sys
import termios
import tty

CHUNK = 3000  # bytes of output in one message: a terminal takes 4095 a line
RB_AUTOBOOT = 0x01234567
RB_POWER_OFF = 0x4321FEDC


class Job:
    """A command that runs: its process, and the pipe or terminal it writes."""

    def __init__(self, number, pid, fd):
        self.number = number
        self.pid = pid
        self.fd = fd
        self.status = None
        self.eof = False


class Agent:
    def __init__(self, path):
        self.control = os.open(path, os.O_RDWR | os.O_NOCTTY)
        if os.isatty(self.control):
            tty.setraw(self.control)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.control, selectors.EVENT_READ, None)
        self.jobs = {}
        self.pending = b""

    def send(self, **message):
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.control, data):]

    def start(self, number, argv, env, typed):
        if typed:
            read, write = (end.detach() for end in socket.socketpair())
        else:
            read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(write if typed else null, 0)
            os.dup2(write, 1)
            os.dup2(write, 2)
            self.become(argv, env)
        os.close(write)
        self.add(Job(number, pid, read))

    def shell(self, number, size):
        pid, fd = pty.fork()
        if pid == 0:
            self.become(["bash", "-i"], {"TERM": "xterm"})
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
        self.add(Job(number, pid, fd))

    @staticmethod
    def become(argv, env):
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.closerange(3, 64)
        try:
            os.execvpe(argv[0], argv, {**os.environ, **env})
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)

    def add(self, job):
        os.set_blocking(job.fd, False)
        self.jobs[job.number] = job
        self.selector.register(job.fd, selectors.EVENT_READ, job)

    def output(self, job):
        """Pass on what a job wrote. Returns whether there may be more."""
        try:
            data = os.read(job.fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose last user left
            data = b""
        if data:
            self.send(id=job.number, out=data.decode("latin-1"))
            return True
        self.selector.unregister(job.fd)
        os.close(job.fd)
        job.eof = True
        self.finish(job)
        return False

    def finish(self, job):
        """Report a job that is dead. Its orphans may still hold the pipe."""
        if job.status is None:
            return
        if not job.eof:
            while self.output(job):
                pass
            if not job.eof:
                self.selector.unregister(job.fd)
                os.close(job.fd)
                job.eof = True
        if self.jobs.pop(job.number, None):
            self.send(id=job.number, exit=job.status)

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for job in [j for j in self.jobs.values() if j.pid == pid]:
                code = os.waitstatus_to_exitcode(status)
                job.status = code if code >= 0 else 128 - code
                self.finish(job)

    def message(self, message):
        if "end" in message:
            os.sync()
            how = RB_AUTOBOOT if message["end"] == "reboot" else RB_POWER_OFF
            ctypes.CDLL(None).reboot(how)
            return
        number = message["id"]
        job = self.jobs.get(number)
        if "run" in message:
            self.start(number, message["run"], message.get("env", {}), message.get("typed", False))
        elif "shell" in message:
            self.shell(number, message["shell"])
        elif job and "input" in message:
            os.set_blocking(job.fd, True)
            os.write(job.fd, message["input"].encode("latin-1"))
            os.set_blocking(job.fd, False)
        elif job and "kill" in message:
            try:
                os.killpg(job.pid, message["kill"])
            except ProcessLookupError:
                pass

    def commands(self):
        data = os.read(self.control, 65536)
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in filter(None, lines):
            self.message(json.loads(line))

    def run(self):
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake_read, selectors.EVENT_READ, "reap")
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            self.send(ready=file.read().strip())
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    self.commands()
                elif key.data == "reap":
                    try:
                        os.read(wake_read, 512)
                    except BlockingIOError:
                        pass
                    self.reap()
                elif not key.data.eof:
                    self.output(key.data)


Agent(sys.argv[1]).run()
