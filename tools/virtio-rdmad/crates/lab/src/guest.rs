// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest: a user-mode Linux kernel, a process of this machine.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread::{sleep, spawn, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::{fcntl_setfd, FdFlags};

use crate::child::die_with_parent;
use crate::error::Error;
use crate::event::Event;
use crate::job::{End, Job, Size, Tell};
use crate::options;
use crate::payload::Payload;
use crate::plan::Plan;

/// Bytes of a line after which it is written, though it has no end.
const LONG_LINE: u64 = 64 << 10;
/// How long the output of a guest that was killed may take until it is written.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often the guest looks whether it is.
const LOOK: Duration = Duration::from_millis(10);

/// A serial line: the end of this machine, and that of the kernel.
struct Line {
    own: UnixStream,
    other: OwnedFd,
}

impl Line {
    fn new() -> Result<Self, Error> {
        let (own, other) = UnixStream::pair()?;
        let other = OwnedFd::from(other);
        // The next process that is started has it. This process starts its children one after the other.
        fcntl_setfd(&other, FdFlags::empty())?;
        Ok(Self { own, other })
    }

    fn channel(&self) -> String {
        format!("fd:{}", self.other.as_raw_fd())
    }
}

/// A running guest, which is killed when this is dropped.
pub struct Guest {
    plan: Plan,
    child: Child,
    pumps: Vec<JoinHandle<()>>,
    signals: UnixStream,
    /// The input of the kernel's console, to which nothing is written.
    _console: Option<ChildStdin>,
}

impl Guest {
    /// Boots a guest, which does its job. An event tells if its output cannot be written.
    pub fn boot(
        payload: &Payload,
        plan: &Plan,
        options: &options::Guests,
        job: &Job,
        events: &Sender<Event>,
    ) -> Result<Self, Error> {
        job.write(&plan.directory)?;
        let [output, errors, signals] = [Line::new()?, Line::new()?, Line::new()?];
        let Plan { number, directory, mac, address } = plan;
        let options::Guests { memory, cpus, mtu, count, is_verbose, .. } = options;
        let mut command = Command::new(payload.kernel.path());
        command
            .args([format!("mem={memory}M"), format!("ncpus={cpus}"), "seccomp=auto".to_owned()])
            .arg(format!("initrd={}", payload.initramfs.path().display()))
            .args([format!("uml_dir={}/", directory.display()), "umid=uml".to_owned()])
            .arg(format!("lab.directory={}", directory.display()))
            .arg(format!("virtio_uml.device={}:42", plan.rdma_socket().display()))
            .arg(format!(
                "vec0:transport=bess,dst={},depth=64,gro=1,mtu={mtu},mac={mac}",
                plan.nic_socket().display()
            ))
            .arg(format!("ip={address}:::255.255.255.0:{}:vec0:off", plan.name()))
            .args(["con=null", "con0=fd:0,fd:2", "ssl=null", "panic=-1"])
            .arg(format!("ssl0={}", output.channel()))
            .arg(format!("ssl1={}", errors.channel()))
            .arg(format!("ssl2={}", signals.channel()))
            .args(if *is_verbose { &[][..] } else { &["quiet", "loglevel=1"] })
            // The kernel polls the input of its console, and complains about one that epoll does not take: /dev/null, also
            // if it opens that itself (`null`).
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // The kernel would change the settings of a terminal.
            .stderr(if *is_verbose { Stdio::piped() } else { Stdio::null() })
            // The kernel takes these for directories where its memory is to be, and a memfd needs none.
            .env_remove("TMPDIR")
            .env_remove("TMP")
            .env_remove("TEMP")
            // A signal of the terminal is for the command in the guest, and comes to it by a serial line.
            .process_group(0);
        let child = die_with_parent(&mut command).spawn();
        let mut child = child.map_err(|error| format!("guest {number} does not start: {error}"))?;
        let prefix = if *count > 1 { format!("{}: ", plan.name()) } else { String::new() };
        // The kernel fails if an end of a serial line is closed while it runs.
        let of_output = if job.terminal.is_some() { String::new() } else { prefix.clone() };
        let mut pumps = vec![
            pump(output.own.try_clone()?, of_output, io::stdout(), events.clone()),
            pump(errors.own, prefix, io::stderr(), events.clone()),
        ];
        if job.terminal.is_some() {
            type_into(output.own);
        }
        let of_kernel = format!("{} kernel: ", plan.name());
        let messages = child.stderr.take();
        pumps.extend(messages.map(|from| pump(from, of_kernel, io::stderr(), events.clone())));
        let console = child.stdin.take();
        Ok(Self { plan: plan.clone(), child, pumps, signals: signals.own, _console: console })
    }

    /// Returns the number of the guest.
    pub fn number(&self) -> u8 {
        self.plan.number
    }

    /// Returns the name of the guest.
    pub fn name(&self) -> String {
        self.plan.name()
    }

    /// Returns a stream that takes signals for the guest's command (`job::Tell`).
    pub fn signals(&self) -> Result<UnixStream, Error> {
        Ok(self.signals.try_clone()?)
    }

    /// Gives a signal to the guest's command.
    pub fn signal(&self, signal: u8) {
        // A guest that has ended needs none.
        let _ = (&self.signals).write_all(&Tell { signal, size: Size::default() }.to_bytes());
    }

    /// Returns how the job ended, and `None` while the guest runs. All output of a guest that has ended is written.
    pub fn try_wait(&mut self) -> Result<Option<End>, Error> {
        let Some(status) = self.child.try_wait()? else { return Ok(None) };
        for pump in self.pumps.drain(..) {
            pump.join().map_err(|_| "a thread has failed")?;
        }
        let end = End::read(&self.plan.directory)?;
        Ok(Some(end.unwrap_or_else(|| End::Failed(format!("its kernel has ended: {status}")))))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both are done already if the guest has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let end = Instant::now() + LAST_WORDS;
        while !self.pumps.iter().all(JoinHandle::is_finished) && Instant::now() < end {
            sleep(LOOK);
        }
    }
}

/// Starts a thread that copies output: lines with a prefix, or what comes as it comes.
fn pump(
    mut from: impl Read + Send + 'static,
    prefix: String,
    mut to: impl Write + Send + 'static,
    events: Sender<Event>,
) -> JoinHandle<()> {
    spawn(move || {
        let result = if prefix.is_empty() {
            copy(&mut from, &mut to)
        } else {
            copy_lines(&mut BufReader::new(&mut from), prefix.into_bytes(), &mut to)
        };
        if let Err(error) = result {
            let _ = events.send(Event::Output(error));
            // Without this, the command and the kernel would complain before the guest is killed.
            let _ = io::copy(&mut from, &mut io::sink());
        }
    })
}

/// Copies lines, each behind a prefix.
fn copy_lines(from: &mut impl BufRead, prefix: Vec<u8>, to: &mut impl Write) -> io::Result<()> {
    let (length, mut line) = (prefix.len(), prefix);
    while from.by_ref().take(LONG_LINE).read_until(b'\n', &mut line)? > 0 {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        // One call for a line, so that the lines of guests do not mix.
        to.write_all(&line)?;
        to.flush()?;
        line.truncate(length);
    }
    Ok(())
}

/// Copies what comes, at once.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        match from.read(&mut bytes)? {
            0 => return Ok(()),
            length => to.write_all(&bytes[..length]).and_then(|()| to.flush())?,
        }
    }
}

/// Starts a thread that copies what the user types.
fn type_into(mut to: UnixStream) {
    spawn(move || copy(&mut io::stdin().lock(), &mut to));
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// What a program is connected to whose reader has ended.
    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_guest_does_not_notice_that_nobody_reads_its_output() {
        for prefix in ["", "guest1: "] {
            let (from, mut guest) = UnixStream::pair().unwrap();
            let (sender, events) = channel();
            let pump = pump(from, prefix.to_owned(), Closed, sender);
            guest.write_all(b"first\n").unwrap();
            assert!(matches!(events.recv(), Ok(Event::Output(_))), "{prefix}");
            // More than the socket holds.
            for _ in 0..1000 {
                guest.write_all(&[b'x'; 1000]).unwrap();
            }
            drop(guest);
            pump.join().unwrap();
        }
    }
}
