// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver in user space: opens a virtio-rdma device over vfio-user, connects two of its QPs, and writes from the memory
//! of the one to that of the other, without a guest and without a kernel's driver.
//!
//!     virtio-rdmad --guest name=g1,vfio-user=/tmp/g1,mac=52:54:00:12:34:01 &
//!     cargo run --release -p conform --example rdma_write -- /tmp/g1

use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use abi::{VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_WR_RDMA_WRITE as WRITE};
use conform::bench::Bench;
use conform::driver::{Driver, MEMORY};
use conform::journal::Journal;
use conform::outcome::{Outcome, Stop};
use conform::port::{Attach, Memory, VfioUser, F_ACCESS_PLATFORM, F_ORDER_PLATFORM, F_VERSION_1};
use rand::SeedableRng as _;
use rand_xorshift::XorShiftRng;

/// The bytes of a WRITE.
const LEN: u32 = 64 << 10;
/// How many WRITEs there are, one after the other.
const COUNT: u32 = 1000;

/// Attaches to the device as the VMM of a guest, and starts it.
fn open(socket: PathBuf) -> Outcome<Bench> {
    let journal =
        Rc::new(Journal::new("D-WQE-30", Duration::from_secs(60), Duration::from_secs(30)));
    let memory = Rc::new(Memory::new(MEMORY));
    let mut port = VfioUser::new(socket).attach(&memory)?;
    port.reset()?;
    let offered = port.offered()?;
    let mut driver = Driver::new(port, memory, Rc::clone(&journal), testkit::gid(1));
    // The base: rings for work, and what the platform asks for.
    driver.wanted = F_VERSION_1 | 1 << VIRTIO_RDMA_F_RINGS;
    driver.wanted |= offered & (F_ACCESS_PLATFORM | F_ORDER_PLATFORM);
    driver.read_config()?;
    driver.begin()?;
    let random = XorShiftRng::seed_from_u64(1);
    Ok(Bench { members: vec![driver], journal, random, far: 0 })
}

/// Writes, and compares what came. Returns how long a WRITE took.
fn write(bench: &mut Bench) -> Outcome<Duration> {
    let (x, y) = bench.connection()?;
    let sent = bench.fill(&x, 0, LEN);
    let begin = Instant::now();
    for wr_id in 0..u64::from(COUNT) {
        bench.post(&x, &x.rdma(&y, wr_id, WRITE, 0, LEN))?;
        bench.succeeds(&x, "D-WQE-30", wr_id)?;
    }
    let took = begin.elapsed() / COUNT;
    let got = bench.bytes(&y, 0, LEN);
    bench.journal.same_bytes("D-TERM-26", "memory of the responder", &got, &sent)?;
    Ok(took)
}

fn main() -> ExitCode {
    let Some(socket) = std::env::args_os().nth(1) else {
        eprintln!("usage: rdma_write SOCKET");
        return ExitCode::from(2);
    };
    match open(socket.into()).and_then(|mut bench| write(&mut bench)) {
        Ok(took) => {
            println!(
                "{COUNT} WRITEs of {LEN} bytes, {} us each, and the data is right",
                took.as_micros()
            );
            return ExitCode::SUCCESS;
        }
        Err(Stop::Failed(failure)) => eprintln!("{failure}"),
        Err(Stop::NotJudged(reason) | Stop::Gone(reason)) => eprintln!("{reason}"),
    }
    ExitCode::FAILURE
}
