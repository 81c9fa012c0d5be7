// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests signals to descriptors that another process has, too.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use descriptor::{is_eventfd, is_harmless, is_socket, send, signal};
use rustix::event::{eventfd, EventfdFlags};
use rustix::fs::{fcntl_getfl, fcntl_setfl, memfd_create, MemfdFlags, OFlags};
use rustix::io::{read, write};

fn count(fd: &OwnedFd) -> u64 {
    let mut value = [0; 8];
    read(fd, &mut value).unwrap();
    u64::from_ne_bytes(value)
}

/// Every signal counts, also when there are many more than the ring for results has room for.
#[test]
fn every_signal_counts() {
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    for _ in 0..10_000 {
        signal(&fd).unwrap();
    }
    assert_eq!(count(&fd), 10_000);
    signal(&fd).unwrap();
    assert_eq!(count(&fd), 1);
}

/// The kind of a descriptor does not depend on the number of results that wait to be taken.
#[test]
fn an_eventfd_is_one_after_any_number_of_signals() {
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    for signals in 0..2_000 {
        assert!(is_eventfd(&fd), "after {signals} signals");
        signal(&fd).unwrap();
    }
}

/// The other process fills the counter and clears O_NONBLOCK. If a signal waited, this test would never
/// end.
#[test]
fn a_full_eventfd_that_blocks_does_not_block() {
    let fd = eventfd(0, EventfdFlags::empty()).unwrap();
    write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fcntl_setfl(&fd, fcntl_getfl(&fd).unwrap() - OFlags::NONBLOCK).unwrap();
    for _ in 0..1000 {
        signal(&fd).unwrap();
    }
    // The kernel's own signals can set the counter to one more than a program can write.
    assert!(count(&fd) >= u64::MAX - 1);
}

#[test]
fn other_files_are_told_apart_and_not_written_to() {
    let (mut reader, writer) = UnixStream::pair().unwrap();
    let (_pipe, pipe) = rustix::pipe::pipe().unwrap();
    let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    assert!(is_eventfd(&event) && !is_socket(&event) && is_harmless(&event));
    for other in [&writer as &dyn std::os::fd::AsFd, &pipe, &memory] {
        assert!(!is_eventfd(other.as_fd()));
        assert!(signal(other.as_fd()).is_err());
    }
    assert!(is_socket(&writer) && is_harmless(&writer) && is_harmless(&memory));
    assert!(!is_socket(&pipe) && !is_harmless(&pipe));
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(!is_harmless(&file));
    // The questions above sent no signal.
    assert!(read(&event, &mut [0; 8]).is_err());
    drop(writer);
    assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);
}

/// A signal to a full socket without O_NONBLOCK does not block, either.
#[test]
fn a_full_socket_does_not_block() {
    let (mut reader, writer) = UnixStream::pair().unwrap();
    (0..100_000).for_each(|_| send(&writer).unwrap());
    let mut first = [0; 8];
    reader.read_exact(&mut first).unwrap();
    assert_eq!(first, 1_u64.to_ne_bytes());
    drop(reader);
    assert!(send(&writer).is_err(), "and no SIGPIPE");
}

#[test]
fn threads_signal_on_their_own() {
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                descriptor::prepare().unwrap();
                (0..1000).for_each(|_| signal(&fd).unwrap());
            });
        }
    });
    assert_eq!(count(&fd), 4000);
}
