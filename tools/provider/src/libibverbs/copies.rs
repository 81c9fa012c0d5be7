// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Finds the copies of libibverbs in the process.
//!
//! A copy is a loaded object that defines symbol versions as libibverbs does: `IBVERBS_1.N`, of which
//! the highest says what it can do, and `IBVERBS_PRIVATE_P`, the number of its interface for
//! providers. Its file name says nothing: the tools that make Python wheels change it.

use crate::bindings::*;
use core::{
    ffi::{CStr, c_char, c_int, c_void},
    mem::offset_of,
    ptr,
};

/// The most copies that are looked at.
const COPIES: usize = 16;

/// A copy of libibverbs.
#[derive(Clone, Copy)]
pub struct Copy {
    /// The path of its file, as the loader knows it.
    pub path: &'static CStr,
    /// N of its newest symbol version `IBVERBS_1.N`.
    pub public: u32,
    /// P of its symbol version `IBVERBS_PRIVATE_P`.
    pub private: u32,
}

/// The copies of libibverbs in the process.
#[derive(Default)]
pub struct Copies {
    found: [Option<Copy>; COPIES],
}

impl Copies {
    /// Finds the copies that are loaded now.
    pub fn find() -> Self {
        let mut copies = Self::default();
        // SAFETY: the function calls `visit` before it returns, with the pointer that it is given.
        unsafe { dl_iterate_phdr(Some(visit), (&raw mut copies).cast()) };
        copies
    }

    /// Returns the copies.
    pub fn iter(&self) -> impl Iterator<Item = Copy> + '_ {
        self.found.iter().filter_map(|copy| *copy)
    }

    fn add(&mut self, copy: Copy) {
        if let Some(place) = self.found.iter_mut().find(|place| place.is_none()) {
            *place = Some(copy);
        }
    }
}

/// Adds a loaded object to the `Copies` at `copies`, if it is a copy.
unsafe extern "C" fn visit(info: *mut dl_phdr_info, len: usize, copies: *mut c_void) -> c_int {
    const { assert!(offset_of!(dl_phdr_info, dlpi_phnum) < offset_of!(dl_phdr_info, dlpi_adds)) };
    if len < offset_of!(dl_phdr_info, dlpi_adds) {
        return 0;
    }
    // SAFETY: the loader describes an object that is loaded, and `Copies::find` lends the copies.
    unsafe {
        if let Some(copy) = copy(&*info) {
            (*copies.cast::<Copies>()).add(copy);
        }
    }
    0
}

/// Returns the object as a copy of libibverbs, if it is one.
///
/// # Safety
///
/// The object is loaded, and stays so as long as its path is used: the loader's lock is held while the provider is
/// loaded, and [`super::Library`] keeps the copies that it serves.
unsafe fn copy(info: &dl_phdr_info) -> Option<Copy> {
    // SAFETY: the object has these headers and sections in memory.
    unsafe {
        let sections = Sections::of(info)?;
        let (mut public, mut private) = (None, None);
        sections.versions(|name| {
            public = public.max(number(name, b"IBVERBS_1."));
            private = private.or(number(name, b"IBVERBS_PRIVATE_"));
        });
        let path = CStr::from_ptr::<'static>(info.dlpi_name);
        Some(Copy { path, public: public?, private: private? })
    }
}

/// Returns the number that stands behind a prefix.
fn number(name: &[u8], prefix: &[u8]) -> Option<u32> {
    let digits = name.strip_prefix(prefix).filter(|digits| !digits.is_empty())?;
    digits.iter().try_fold(0u32, |number, digit| {
        let digit = digit.checked_sub(b'0').filter(|&digit| digit < 10)?;
        number.checked_mul(10)?.checked_add(digit.into())
    })
}

/// The sections of a loaded object that name its symbol versions (System V ABI, symbol versioning).
struct Sections {
    /// The names.
    strings: *const c_char,
    /// The first definition, and how many there are.
    definitions: *const u8,
    count: u64,
}

impl Sections {
    /// Finds the sections. Returns `None` for an object without versions.
    ///
    /// # Safety
    ///
    /// The object is loaded.
    unsafe fn of(info: &dl_phdr_info) -> Option<Self> {
        let (mut strings, mut definitions, mut count) = (None, None, 0);
        // SAFETY: the loader keeps the headers and the dynamic section, which DT_NULL ends.
        unsafe {
            let dynamic = headers(info).find(|header| header.p_type == PT_DYNAMIC)?;
            let mut entry = address(info, dynamic.p_vaddr).cast::<Elf64_Dyn>();
            while (*entry).d_tag != DT_NULL.into() {
                match u32::try_from((*entry).d_tag) {
                    Ok(DT_STRTAB) => strings = Some(loaded(info, (*entry).d_un.d_ptr)),
                    Ok(DT_VERDEF) => definitions = Some(loaded(info, (*entry).d_un.d_ptr)),
                    Ok(DT_VERDEFNUM) => count = (*entry).d_un.d_val,
                    _ => {}
                }
                entry = entry.add(1);
            }
        }
        Some(Self { strings: strings?.cast(), definitions: definitions?, count })
    }

    /// Calls `each` with the name of each version that the object defines.
    ///
    /// # Safety
    ///
    /// The object is loaded.
    unsafe fn versions(&self, mut each: impl FnMut(&[u8])) {
        let mut at = self.definitions;
        for _ in 0..self.count {
            // SAFETY: a definition is followed by its name, and the next one stands where it says;
            // the linker aligns both as the structures demand.
            unsafe {
                let definition = &*at.cast::<Elf64_Verdef>();
                let name = &*at.add(definition.vd_aux as usize).cast::<Elf64_Verdaux>();
                each(CStr::from_ptr(self.strings.add(name.vda_name as usize)).to_bytes());
                at = at.add(definition.vd_next as usize);
            }
        }
    }
}

/// Returns the address of what stands at `offset` of an object.
fn address(info: &dl_phdr_info, offset: u64) -> *const u8 {
    ptr::with_exposed_provenance(info.dlpi_addr.wrapping_add(offset) as usize)
}

/// Returns the address that an entry of the dynamic section has. Some loaders replace the address for which the
/// object was linked by the one where it is, others leave it: it is the former if it lies within the object.
///
/// # Safety
///
/// The object is loaded.
unsafe fn loaded(info: &dl_phdr_info, entry: u64) -> *const u8 {
    let is_within = |header: &Elf64_Phdr| {
        let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
        header.p_type == PT_LOAD && entry.wrapping_sub(start) < header.p_memsz
    };
    // SAFETY: the loader keeps the headers.
    let is_address = unsafe { headers(info) }.any(is_within);
    if is_address { ptr::with_exposed_provenance(entry as usize) } else { address(info, entry) }
}

/// Returns the program headers of an object.
///
/// # Safety
///
/// The object is loaded.
unsafe fn headers(info: &dl_phdr_info) -> impl Iterator<Item = &Elf64_Phdr> {
    // SAFETY: there are as many.
    (0..info.dlpi_phnum.into()).map(|at| unsafe { &*info.dlpi_phdr.add(at) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_versions() {
        assert_eq!(number(b"IBVERBS_1.14", b"IBVERBS_1."), Some(14));
        assert_eq!(number(b"IBVERBS_PRIVATE_34", b"IBVERBS_PRIVATE_"), Some(34));
        for name in
            [b"IBVERBS_1.".as_slice(), b"IBVERBS_1.1:", b"IBVERBS_1.-1", b"IBVERBS_2.1", b""]
        {
            assert_eq!(number(name, b"IBVERBS_1."), None);
        }
        assert_eq!(number(b"IBVERBS_1.99999999999", b"IBVERBS_1."), None);
    }

    /// The copy that the tests loaded is found once, with the versions of its release.
    #[test]
    fn the_copy_of_the_tests_is_found() {
        crate::model::opened::library();
        let copies = Copies::find();
        let mut all = copies.iter();
        let copy = all.next().unwrap();
        assert!(copy.path.to_str().unwrap().contains("/libibverbs"), "{:?}", copy.path);
        assert!(copy.public >= 14 && copy.private >= 34);
        assert!(all.next().is_none());
    }
}
