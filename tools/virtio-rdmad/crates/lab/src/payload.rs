// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the program carries: an archive (tar, compressed by zstd) behind the program in its own file. The file ends with
//! [`MAGIC`] and the number of bytes of the archive, little endian.
//!
//! Each part goes to a file that has no name (memfd_create(2)). So nothing is written to a disk, no mount option keeps a
//! part from being executed, and nothing is left behind.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{memfd_create, MemfdFlags};
use rustix::io::Errno;
use ruzstd::decoding::StreamingDecoder;

use crate::error::Error;

/// What the file ends with, in front of the length.
const MAGIC: &[u8; 8] = b"vrdmalab";
/// Bytes of the magic and the length.
const TRAILER: usize = MAGIC.len() + size_of::<u64>();

/// The parts.
#[derive(Debug)]
pub struct Payload {
    /// The kernel of the guests, a program.
    pub kernel: Part,
    /// The device, a program.
    pub device: Part,
    /// The initramfs of the guests.
    pub initramfs: Part,
}

/// A part, in a file without a name.
#[derive(Debug)]
pub struct Part(OwnedFd);

impl Part {
    fn new(name: &str, content: &mut impl Read) -> Result<Self, Error> {
        // Before Linux 6.3 all such files are executable, and there is no flag for it.
        let fd = match memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::EXEC) {
            Err(Errno::INVAL) => memfd_create(name, MemfdFlags::CLOEXEC)?,
            result => result?,
        };
        let mut file = File::from(fd);
        io::copy(content, &mut file)?;
        Ok(Self(file.into()))
    }

    /// Returns the path by which the children of this process find the part.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

impl Payload {
    /// Takes the parts from the file of this program.
    pub fn unpack() -> Result<Self, Error> {
        let mut file = File::open("/proc/self/exe")?;
        let mut trailer = [0; TRAILER];
        let end = file.seek(SeekFrom::End(0))?;
        let start = end.checked_sub(TRAILER as u64).ok_or("this program carries nothing")?;
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut trailer)?;
        let (magic, length) = trailer.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err("this program carries no kernel: it is not what `make lab` makes".into());
        }
        let length = u64::from_le_bytes(length.try_into()?);
        file.seek(SeekFrom::Start(start.checked_sub(length).ok_or("this file is damaged")?))?;
        let archive = StreamingDecoder::new(file.take(length))?;
        Self::from_archive(tar::Archive::new(archive))
    }

    fn from_archive(mut archive: tar::Archive<impl Read>) -> Result<Self, Error> {
        let (mut kernel, mut device, mut initramfs) = (None, None, None);
        for entry in archive.entries()? {
            let mut entry = entry?;
            let name = entry.path()?.display().to_string();
            let place = match name.as_str() {
                "linux" => &mut kernel,
                "virtio-rdmad" => &mut device,
                "initramfs" => &mut initramfs,
                _ => return Err(format!("this file has an unknown part {name}").into()),
            };
            *place = Some(Part::new(&name, &mut entry)?);
        }
        let missing = "this file lacks a part";
        Ok(Self {
            kernel: kernel.ok_or(missing)?,
            device: device.ok_or(missing)?,
            initramfs: initramfs.ok_or(missing)?,
        })
    }
}
