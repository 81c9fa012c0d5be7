// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtqueue whose memory is full of the fuzzer's bytes.
//!
//! For any bytes, the following must hold:
//! - A chain consists of guest memory, has no more descriptors than the queue has entries, and has less
//!   than 4 GiB.
//! - The device takes no more buffers than were made available.
//! - The device writes only to the used ring and to writable buffers.

#![no_main]

use fuzz::Program;
use libfuzzer_sys::fuzz_target;
use memory::GuestMemory;
use ring::{Chain, Layout, SplitQueue};

/// The regions of the memory, with a hole between them.
const REGIONS: [(u64, u64); 2] = [(0, 0x2000), (0x3000, 0x1000)];
const DESC: u64 = 0;
const AVAIL: u64 = 0x800;
const USED: u64 = 0xa00;
/// The bytes of all areas of the rings.
const RINGS: usize = 0xc00;
/// Addresses near which buffers and tables begin.
const ANCHORS: [u64; 6] = [0x1000, 0x1ff0, 0x2000, 0x3000, 0x3ff8, u64::MAX - 7];

/// A virtqueue, its memory, and the chains that the device has taken.
struct World {
    memory: GuestMemory,
    layout: Layout,
    queue: SplitQueue,
    held: Vec<Chain>,
}

impl World {
    fn new(program: &mut Program<'_>) -> Option<Self> {
        let memory = GuestMemory::anonymous(&REGIONS).expect("memory for a guest");
        let size = program.pick(&[1, 2, 4, 8, 16, 0, 3, 0x8000]);
        let shift = u64::from(program.u8());
        let layout = Layout {
            size,
            desc: DESC + shift,
            avail: AVAIL + shift,
            used: USED + shift,
            event_idx: program.flag(),
        };
        let queue = SplitQueue::new(&memory, layout, program.u16()).ok()?;
        Some(Self { memory, layout, queue, held: Vec::new() })
    }

    /// Reads all of memory.
    fn bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for (start, len) in REGIONS {
            let mut bytes = vec![0; usize::try_from(len).expect("a small region")];
            self.memory.read(start, &mut bytes).expect("the memory is there");
            all.extend(bytes);
        }
        all
    }

    /// Calls `f`, which may write the used ring and nothing else.
    fn only_used<R>(&mut self, f: impl FnOnce(&mut SplitQueue) -> R) -> R {
        let before = self.bytes();
        let result = f(&mut self.queue);
        let after = self.bytes();
        let used = usize::try_from(self.layout.used).expect("a small address");
        let end = used + 6 + usize::from(self.layout.size) * 8;
        let rest = |bytes: &[u8]| [&bytes[..used], &bytes[end..]].concat();
        assert!(rest(&before) == rest(&after), "wrote beyond the used ring");
        result
    }

    fn store(&mut self, addr: u64, bytes: &[u8]) {
        self.memory.write(addr, bytes).expect("an address within memory");
    }

    /// Writes a descriptor that can be part of a chain.
    fn descriptor(&mut self, program: &mut Program<'_>) {
        let at = program.pick(&[self.layout.desc, 0x1000, 0x3000]);
        let index = u64::from(program.u8() & 31);
        let addr = program.pick(&ANCHORS).wrapping_add(u64::from(program.u8()));
        let len = match program.u8() {
            255 => program.u32(),
            small => u32::from(small),
        };
        let flags = program.u8() & 7;
        // The length of an indirect table is a multiple of 16, the bytes of an entry.
        let len = if flags & 4 != 0 && len < 256 { len / 4 * 16 } else { len };
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend([flags, 0, program.u8() & 31, 0]);
        self.store(at + index * 16, &bytes);
    }

    /// Makes one more head available, or moves the index by any number of entries.
    fn offer(&mut self, program: &mut Program<'_>) {
        let avail = self.layout.avail;
        let count: u16 = self.memory.read_obj(avail + 2).expect("the available ring");
        let slot = u64::from(count % self.layout.size);
        let head = u16::from(program.u8());
        self.store(avail + 4 + slot * 2, &head.to_le_bytes());
        let step = match program.u8() {
            255 => program.u16(),
            _ => 1,
        };
        self.store(avail + 2, &count.wrapping_add(step).to_le_bytes());
    }

    /// Takes a chain, and checks it.
    fn pop(&mut self) {
        let before = self.queue.next_avail();
        let pending = self.queue.pending();
        match self.only_used(SplitQueue::pop) {
            Ok(Some(chain)) => {
                assert!(pending.is_ok_and(|count| count > 0 && count <= self.layout.size));
                assert_eq!(self.queue.next_avail(), before.wrapping_add(1));
                self.check(&chain);
                self.held.push(chain);
                self.held.truncate(64);
            }
            Ok(None) => assert_eq!(pending, Ok(0)),
            Err(_) => assert_eq!(self.queue.next_avail(), before, "an error takes nothing"),
        }
    }

    /// Checks that a chain is as large as it may be, and in guest memory.
    fn check(&self, chain: &Chain) {
        let buffers = || chain.readable().iter().chain(chain.writable());
        assert!(buffers().count() <= usize::from(self.layout.size));
        assert!(u32::try_from(chain.readable_len() + chain.writable_len()).is_ok());
        for buffer in buffers() {
            assert!(buffer.len > 0 && self.memory.contains(buffer.addr, buffer.len.into()));
        }
        let mut bytes = vec![0; chain.readable_len().min(0x4000)];
        assert_eq!(chain.read(&mut bytes), Ok(bytes.len()));
    }

    /// Fills a chain and gives it back.
    fn push(&mut self, program: &mut Program<'_>) {
        if self.held.is_empty() {
            return;
        }
        let chain = self.held.swap_remove(program.below(self.held.len()));
        let bytes = vec![0xee; usize::from(program.u8())];
        let room = chain.writable_len().min(bytes.len());
        let written = chain.write(&bytes).expect("the chain is memory");
        assert_eq!(written as usize, room);
        let result = self.only_used(|queue| queue.push(chain.head, written));
        assert_eq!(result, Ok(()));
    }

    /// Does one operation of the program.
    fn step(&mut self, operation: u8, program: &mut Program<'_>) {
        match operation % 12 {
            0 | 1 => self.descriptor(program),
            2 | 3 => self.offer(program),
            4 => self.pop(),
            5 => self.push(program),
            6 => drop(self.only_used(SplitQueue::publish)),
            7 => drop(self.only_used(SplitQueue::signal_needed)),
            8 => drop(self.only_used(SplitQueue::enable_notify)),
            9 => drop(self.only_used(SplitQueue::disable_notify)),
            10 => drop(self.only_used(SplitQueue::pop_head)),
            _ => {
                let at = usize::from(program.u16()) % RINGS;
                let len = usize::from(program.u8()).min(RINGS - at);
                let bytes = program.bytes(len);
                self.store(at as u64, bytes);
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut program = Program::new(bytes);
    let Some(mut world) = World::new(&mut program) else { return };
    while let Some(operation) = program.operation() {
        world.step(operation, &mut program);
    }
    let _ = world.queue.wants_signal();
});
