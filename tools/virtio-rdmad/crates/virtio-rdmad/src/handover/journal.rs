// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A file in memory that always has a whole record, whenever the process that writes it ends.
//!
//! The file has two slots, which are written by turns. A record is the one with the higher number of those whose
//! checksum is right.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{fstat, ftruncate, memfd_create, MemfdFlags};
use rustix::io::{pread, pwrite, Errno};

/// The first bytes of a slot.
const MAGIC: [u8; 8] = *b"rdmad\0jl";

/// The version of the encoding of records. A process reads no other one.
const VERSION: u32 = 3;

/// Bytes of a slot.
const SLOT: u64 = 1 << 20;

/// Bytes before a record: magic, version, length, number of the record, number of the set, checksum.
const HEAD: usize = 36;

/// The reason why there is no record.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read or written.
    #[error("the journal: {0}")]
    Os(#[from] Errno),
    /// The record is too long.
    #[error("the journal: a record of {0} bytes")]
    Length(usize),
    /// Neither slot has a record.
    #[error("the journal has no whole record")]
    Damaged,
    /// The record has another version.
    #[error("the journal has version {0}, and this process reads version {VERSION}")]
    Version(u32),
}

/// A record that was read.
#[derive(Debug, Eq, PartialEq)]
pub struct Entry {
    /// The number of the set of descriptors that it names.
    pub set: u64,
    /// The record.
    pub record: Vec<u8>,
    number: u64,
}

/// A journal, which has one record.
#[derive(Debug)]
pub struct JournalFile {
    file: OwnedFd,
    /// The number of the last record.
    number: u64,
}

impl JournalFile {
    /// Makes a journal without a record.
    pub fn new() -> Result<Self, JournalError> {
        let file = memfd_create("virtio-rdmad journal", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, 2 * SLOT)?;
        Ok(Self { file, number: 0 })
    }

    /// Takes over the journal of another process, and returns its record.
    pub fn inherit(file: OwnedFd) -> Result<(Self, Entry), JournalError> {
        if fstat(&file)?.st_size.unsigned_abs() != 2 * SLOT {
            return Err(JournalError::Damaged);
        }
        let entries = [0, 1].map(|slot| read(file.as_fd(), slot));
        let version = entries.iter().find_map(|entry| match entry {
            Err(JournalError::Version(version)) => Some(*version),
            _ => None,
        });
        let newest = entries.into_iter().flatten().max_by_key(|entry| entry.number);
        match (newest, version) {
            (Some(entry), _) => Ok((Self { file, number: entry.number }, entry)),
            (None, Some(version)) => Err(JournalError::Version(version)),
            (None, None) => Err(JournalError::Damaged),
        }
    }

    /// Returns the file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Puts a record, which names this set of descriptors, in the place of the one before.
    pub fn write(&mut self, set: u64, record: &[u8]) -> Result<(), JournalError> {
        if (HEAD + record.len()) as u64 > SLOT {
            return Err(JournalError::Length(record.len()));
        }
        let number = self.number + 1;
        let bytes = encode(number, set, record);
        let mut done = 0;
        while done < bytes.len() {
            done += pwrite(&self.file, &bytes[done..], number % 2 * SLOT + done as u64)?;
        }
        self.number = number;
        Ok(())
    }
}

fn encode(number: u64, set: u64, record: &[u8]) -> Vec<u8> {
    let length = u32::try_from(record.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEAD + record.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(length.to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(set.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(record);
    let checksum = crc32fast::hash(&bytes);
    bytes[HEAD - 4..HEAD].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Reads the record of a slot.
fn read(file: BorrowedFd<'_>, slot: u64) -> Result<Entry, JournalError> {
    let mut bytes = vec![0; HEAD];
    read_exactly(file, slot * SLOT, &mut bytes)?;
    let word = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    let long = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if bytes[..8] != MAGIC {
        return Err(JournalError::Damaged);
    }
    // Every version has its number here.
    if word(8) != VERSION {
        return Err(JournalError::Version(word(8)));
    }
    let (length, number, set, checksum) = (word(12) as usize, long(16), long(24), word(32));
    if (HEAD + length) as u64 > SLOT {
        return Err(JournalError::Damaged);
    }
    bytes.resize(HEAD + length, 0);
    read_exactly(file, slot * SLOT + HEAD as u64, &mut bytes[HEAD..])?;
    bytes[HEAD - 4..HEAD].fill(0);
    if crc32fast::hash(&bytes) != checksum {
        return Err(JournalError::Damaged);
    }
    Ok(Entry { set, record: bytes.split_off(HEAD), number })
}

fn read_exactly(file: BorrowedFd<'_>, at: u64, bytes: &mut [u8]) -> Result<(), JournalError> {
    let mut done = 0;
    while done < bytes.len() {
        match pread(file, &mut bytes[done..], at + done as u64)? {
            0 => return Err(JournalError::Damaged),
            more => done += more,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(journal: &JournalFile) -> OwnedFd {
        journal.file.try_clone().unwrap()
    }

    #[test]
    fn the_last_record_is_found() {
        let mut journal = JournalFile::new().unwrap();
        assert!(matches!(JournalFile::inherit(copy(&journal)), Err(JournalError::Damaged)));
        for (set, record) in [(1, "one"), (1, "two"), (5, "a longer one"), (6, "")] {
            journal.write(set, record.as_bytes()).unwrap();
            let (next, entry) = JournalFile::inherit(copy(&journal)).unwrap();
            assert_eq!((entry.set, entry.record.as_slice()), (set, record.as_bytes()));
            assert_eq!(next.number, journal.number);
        }
        assert!(matches!(journal.write(7, &vec![0; 1 << 20]), Err(JournalError::Length(_))));
        assert_eq!(JournalFile::inherit(copy(&journal)).unwrap().1.set, 6);
    }

    /// A process that dies while it writes leaves the record before.
    #[test]
    fn a_record_that_is_altered_is_none() {
        let mut journal = JournalFile::new().unwrap();
        journal.write(1, b"before").unwrap();
        journal.write(2, b"after").unwrap();
        let good = encode(2, 2, b"after");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            pwrite(&journal.file, &bad, 0).unwrap();
            let (_, entry) = JournalFile::inherit(copy(&journal)).unwrap();
            assert_eq!((entry.set, entry.record.as_slice()), (1, &b"before"[..]), "byte {at}");
        }
        pwrite(&journal.file, &good, 0).unwrap();
        assert_eq!(JournalFile::inherit(copy(&journal)).unwrap().1.set, 2);
    }

    #[test]
    fn a_version_that_is_not_known_is_told() {
        let mut journal = JournalFile::new().unwrap();
        journal.write(1, b"x").unwrap();
        pwrite(&journal.file, &9_u32.to_le_bytes(), SLOT + 8).unwrap();
        assert!(matches!(JournalFile::inherit(copy(&journal)), Err(JournalError::Version(9))));
    }

    #[test]
    fn a_file_of_another_size_is_no_journal() {
        let journal = JournalFile::new().unwrap();
        ftruncate(&journal.file, SLOT).unwrap();
        assert!(matches!(JournalFile::inherit(copy(&journal)), Err(JournalError::Damaged)));
    }
}
