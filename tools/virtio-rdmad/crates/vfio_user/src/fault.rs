// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a client can do wrong, counted by kind.

/// A mistake of the client or of its guest. The message it stands in fails, nothing else.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Fault {
    /// A command that is not part of the protocol or not served.
    #[error("unknown command")]
    UnknownCommand,
    /// The payload is shorter than its command needs.
    #[error("payload too short")]
    ShortPayload,
    /// `argsz` is smaller than the structure it stands in.
    #[error("argsz too small")]
    Argsz,
    /// No region has this index.
    #[error("no such region")]
    Region,
    /// The access goes beyond its region, or its length differs from the payload's.
    #[error("access beyond a region")]
    RegionBounds,
    /// No interrupt has this index, or not as many vectors.
    #[error("no such interrupt")]
    Irq,
    /// A combination of SET_IRQS flags that means nothing.
    #[error("meaningless interrupt action")]
    IrqAction,
    /// Not as many file descriptors as the command needs.
    #[error("wrong number of file descriptors")]
    Descriptors,
    /// A DMA region overlaps another.
    #[error("DMA region exists already")]
    DmaExists,
    /// A DMA region of addresses, a length or an offset that no region has, or beyond its file's end.
    #[error("invalid DMA region")]
    DmaInvalid,
    /// A DMA region in a file that is no memory.
    #[error("DMA region in a file of another file system than tmpfs and hugetlbfs")]
    DmaFile,
    /// More DMA regions than this client may have.
    #[error("too many DMA regions")]
    DmaCount,
    /// A DMA region that the kernel does not map.
    #[error("DMA region that the kernel refuses to map")]
    DmaRefused,
    /// A message whose file descriptors did not all arrive: it had more than a message may have, or
    /// this process has as many open as it may.
    #[error("file descriptors of a message were lost")]
    DescriptorsLost,
    /// A file descriptor of another kind than the command needs: an eventfd, or memory.
    #[error("a file descriptor that is neither an eventfd nor memory")]
    DescriptorKind,
    /// No DMA region has this address and size.
    #[error("no such DMA region")]
    DmaUnknown,
    /// The guest kicked a queue that does not exist or is not enabled.
    #[error("kick of a queue that is not enabled")]
    Kick,
    /// The guest wrote a value that the register cannot hold.
    #[error("invalid value for a register")]
    Register,
}

impl Fault {
    const COUNT: usize = Fault::Register as usize + 1;

    /// The errno of the reply.
    pub fn errno(self) -> u32 {
        let errno = match self {
            Self::UnknownCommand => rustix::io::Errno::NOSYS,
            Self::DmaExists => rustix::io::Errno::EXIST,
            Self::DmaUnknown => rustix::io::Errno::NOENT,
            Self::DmaFile | Self::DescriptorKind => rustix::io::Errno::PERM,
            Self::DmaCount => rustix::io::Errno::NOSPC,
            Self::DmaRefused => rustix::io::Errno::NOMEM,
            Self::DescriptorsLost => rustix::io::Errno::MFILE,
            _ => rustix::io::Errno::INVAL,
        };
        errno.raw_os_error().unsigned_abs()
    }
}

/// How often each [`Fault`] happened.
#[derive(Debug, Default)]
pub struct Faults([u64; Fault::COUNT]);

impl Faults {
    /// Counts a fault; the first of its kind is logged.
    pub(crate) fn count(&mut self, fault: Fault) {
        let counter = &mut self.0[fault as usize];
        *counter += 1;
        if *counter == 1 {
            tracing::warn!(%fault, "vfio-user client; further ones are only counted");
        }
    }

    /// How often this one happened.
    pub fn get(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }
}
