// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The mistakes that a client can make.

use rustix::io::Errno;

/// A mistake of the client or of its guest. The message that has it fails, and nothing else; a write to a BAR is
/// ignored.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, thiserror::Error)]
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
    /// No interrupt has this index, or the interrupt has fewer vectors.
    #[error("no such interrupt")]
    Irq,
    /// A combination of SET_IRQS flags that has no meaning.
    #[error("meaningless interrupt action")]
    IrqAction,
    /// A number of file descriptors that is wrong for the command.
    #[error("wrong number of file descriptors")]
    Descriptors,
    /// A DMA region overlaps another.
    #[error("DMA region exists already")]
    DmaExists,
    /// A DMA region whose addresses, length or offset are not valid, or that goes beyond its file's end.
    #[error("invalid DMA region")]
    DmaInvalid,
    /// A DMA region in a file that is not memory.
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
    /// Returns the errno of the reply.
    pub(crate) fn errno(self) -> u32 {
        let errno = match self {
            Self::UnknownCommand => Errno::NOSYS,
            Self::DmaExists => Errno::EXIST,
            Self::DmaUnknown => Errno::NOENT,
            Self::DmaFile | Self::DescriptorKind => Errno::PERM,
            Self::DmaCount => Errno::NOSPC,
            Self::DmaRefused => Errno::NOMEM,
            Self::DescriptorsLost => Errno::MFILE,
            _ => Errno::INVAL,
        };
        errno.raw_os_error().unsigned_abs()
    }
}
