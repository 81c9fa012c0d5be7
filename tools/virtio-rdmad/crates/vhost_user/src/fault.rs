// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The mistakes that a front end can make.

/// A mistake of the front end. The message that has it fails, and nothing else.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, thiserror::Error)]
pub enum Fault {
    /// A request that is not part of the protocol or not served.
    #[error("unknown request")]
    UnknownRequest,
    /// A payload that has the wrong length for its request.
    #[error("wrong length of a payload")]
    Payload,
    /// A number of file descriptors that is wrong for the request.
    #[error("wrong number of file descriptors")]
    Descriptors,
    /// A feature bit that was not offered.
    #[error("a feature that was not offered")]
    Features,
    /// No queue has this index.
    #[error("no such queue")]
    QueueIndex,
    /// A ring size that the queue cannot have, or an index that goes beyond 16 bits.
    #[error("invalid size or index of a ring")]
    QueueValue,
    /// A ring at an address that is in no memory region.
    #[error("a ring outside of the memory table")]
    QueueAddress,
    /// A queue that the device cannot serve as it was set up.
    #[error("a queue that cannot be served")]
    QueueSetup,
    /// A change to a queue that runs.
    #[error("a queue was changed while it runs")]
    QueueRunning,
    /// A region whose addresses, length or offset are not valid, or that goes beyond its file's end.
    #[error("an invalid memory region")]
    Region,
    /// A region in a file that is not memory.
    #[error("a memory region in a file of another file system than tmpfs and hugetlbfs")]
    RegionFile,
    /// A region that the kernel does not map.
    #[error("a memory region that the kernel refuses to map")]
    RegionRefused,
    /// A message whose file descriptors did not all arrive: it had more than a message may have, or
    /// this process has as many open as it may.
    #[error("file descriptors of a message were lost")]
    DescriptorsLost,
    /// More regions than were offered.
    #[error("too many memory regions")]
    RegionCount,
    /// A file descriptor of another kind than the request needs: memory; an eventfd or a socket of
    /// this machine; for the requests of the back end such a socket.
    #[error("a file descriptor of a kind that the request does not take")]
    DescriptorKind,
    /// No memory region is the one named.
    #[error("no such memory region")]
    RegionUnknown,
    /// A range beyond the configuration space.
    #[error("access beyond the configuration space")]
    ConfigBounds,
    /// A write to the configuration space, which is read-only.
    #[error("write to the configuration space")]
    ConfigWrite,
}
