// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory that a guest under attack gives out, and the content of the memory that it keeps for itself.

use std::ops::Range;

use testkit::{Memory, ALL, LOCAL, READ};

use crate::guest::{Guest, REGIONS};
use crate::verbs::{create_pd, reg_mr};

/// The guest's MR with all access.
pub const GIVEN: Range<u64> = 0x8000..0xc000;
/// Its MR without remote access.
pub const OWN: Range<u64> = 0xc000..0xd000;
/// Its MR with all access in a PD of no QP.
pub const OTHER_PD: Range<u64> = 0xd000..0xe000;
/// Its MR with remote read access alone.
pub const READABLE: Range<u64> = 0xe000..0xf000;
/// The word that fills those parts of the guest's memory that nobody else may read.
const SECRET: u64 = 0x2f97_a5c1_0b6e_d843;

/// Returns a number by which a word is compared with the secret. The secret itself is never compared, because the
/// fuzzer learns from comparisons and would then write the secret itself.
const fn trace(word: u64) -> u64 {
    let mixed = word.rotate_left(23) ^ (word >> 7);
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (mixed >> 31)
}

/// Returns `len` bytes of secrets.
pub fn secrets(len: u64) -> Vec<u8> {
    SECRET.to_le_bytes().repeat(len as usize / 8)
}

/// Returns whether the secret is anywhere in these bytes.
pub fn has_secret(bytes: &[u8]) -> bool {
    const PART: usize = 512;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let starts = (0..bytes.len()).step_by(PART);
    let parts = starts.map(|at| &bytes[at..(at + PART + 7).min(bytes.len())]);
    // Most of memory is zeros. One comparison of a part takes less time than one for each word.
    parts
        .filter(|part| **part != [0; PART + 7][..part.len()])
        .any(|part| part.windows(8).any(|bytes| trace(word(bytes)) == const { trace(SECRET) }))
}

/// Fills memory that the guest keeps for itself with secrets: [`OWN`], [`OTHER_PD`], what is behind [`READABLE`] up to
/// `end`, and the second region of memory.
pub fn hide_secrets(guest: &Guest, end: u64) {
    let (second, len) = REGIONS[1];
    for (start, len) in
        [(OWN.start, OTHER_PD.end - OWN.start), (READABLE.end, end - READABLE.end), (second, len)]
    {
        guest.memory.write_bytes(start, &secrets(len));
    }
}

/// Checks that nobody wrote to the second region of memory.
pub fn check_second_region(guest: &Guest) {
    let (start, len) = REGIONS[1];
    assert!(guest.load(start, len as usize) == secrets(len), "its second region was written");
}

/// Registers the MRs besides [`GIVEN`], and returns their keys: of [`OWN`], [`OTHER_PD`] and [`READABLE`].
pub fn reg_others(guest: &mut Guest, pdn: u32) -> [u32; 3] {
    let other_pd = create_pd(guest);
    let regions = [(pdn, OWN, LOCAL), (other_pd, OTHER_PD, ALL), (pdn, READABLE, READ)];
    regions.map(|(pdn, range, access)| reg_mr(guest, pdn, range, access))
}
