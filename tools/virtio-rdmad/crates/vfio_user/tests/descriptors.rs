// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process that has as many descriptors open as it may. This test has a file of its own, because the
//! limit is a property of the process.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use memory::GuestMemory;
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use testkit::socket::new_memory;
use testkit::vfio_user::{dma_map, message};
use vfio_user::Fault;
use virtio_transport::{Backend, QueueSetup};

struct Device;

impl Backend for Device {
    fn features(&self) -> u64 {
        0
    }
    fn set_features(&mut self, _features: u64) {}
    fn config(&self) -> &[u8] {
        &[]
    }
    fn queue_count(&self) -> u16 {
        1
    }
    fn queue_max_size(&self, _queue: u16) -> u16 {
        256
    }
    fn start(&mut self, _memory: &GuestMemory, _queues: Vec<QueueSetup>) -> Result<(), String> {
        Ok(())
    }
    fn set_memory(&mut self, _memory: &GuestMemory) {}
    fn kick(&mut self, _queue: u16) {}
    fn reset(&mut self) {}
    fn freeze(&mut self) {
        unreachable!("vfio-user pauses no device");
    }
    fn thaw(&mut self, _queues: Vec<QueueSetup>) -> Result<(), String> {
        unreachable!("vfio-user pauses no device");
    }
}

/// DMA_MAP whose descriptor does not arrive is refused with EMFILE, and not taken for one of memory
/// that is not shared.
#[test]
fn a_region_that_loses_its_descriptor_is_refused() {
    let (client, other) = UnixStream::pair().unwrap();
    let mut server = vfio_user::serve(other, 42, &Device).unwrap();
    let fd = new_memory(0x1000);
    let send = |bytes: &[u8], with_fd: bool| {
        let fds = if with_fd { &[fd.as_fd()][..] } else { &[] };
        assert_eq!(testkit::socket::send(&client, bytes, fds), Ok(bytes.len()));
    };
    send(&message(0, 1, 0, &[0; 4]), false);
    let map = message(0, 2, 0, &dma_map(0x5000, 0x1000, 0));

    let before = getrlimit(Resource::Nofile);
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let full = (0..used).find(|limit| {
        setrlimit(Resource::Nofile, Rlimit { current: Some(*limit), ..before }).unwrap();
        std::fs::File::open("/dev/null").is_ok()
    });
    let limit = full.map_or(used - 1, |limit| limit - 1);
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..before }).unwrap();
    send(&map, true);
    while server.process(&mut Device).unwrap() {}
    setrlimit(Resource::Nofile, before).unwrap();

    let mut replies = vec![0; 4096];
    let read = (&client).read(&mut replies).unwrap();
    let reply = &replies[read - 16..read];
    assert_eq!(reply[2..4], [2, 0], "the reply to DMA_MAP");
    let errno = rustix::io::Errno::MFILE.raw_os_error().to_le_bytes();
    assert_eq!((reply[8], &reply[12..]), (0x21, &errno[..]));
    assert_eq!(server.protocol().faults().get(Fault::DescriptorsLost), 1);
    // With a descriptor to spare the same is accepted.
    send(&map, true);
    while server.process(&mut Device).unwrap() {}
    assert_eq!(server.memory().ranges().collect::<Vec<_>>(), [(0x5000, 0x1000)]);
}
