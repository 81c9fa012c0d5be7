// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The differences between the releases of rdma-core.
//!
//! The provider is compiled with the headers of one release, 56.1. A release is known by its newest
//! public symbol version and by the number of its interface for providers:
//!
//! | rdma-core | `IBVERBS_1.` | `IBVERBS_PRIVATE_` | what is new |
//! |---|---|---|---|
//! | 37 to 56 | 14 | 34 | `struct ibv_qp_ex` grows in 44 and 45 |
//! | 57, 58 | 14 | 57 | ibv_cmd_get_context() takes descriptors |
//! | 59 to 61 | 15 | 59 | three verbs |
//! | 62, 63 | 16 | 59 | two verbs |
//! | 64 | 17 | 64 | two verbs; ibv_cmd_create_qp_ex2() takes attributes of the driver |
//! | 65 | 18 | 65 | ten verbs |
//!
//! A verb moves those that stand behind it in `struct verbs_context_ops`. A release that is newer than
//! the table is refused: nobody knows where its verbs stand.
#![forbid(unsafe_code)]

use core::ffi::CStr;

/// Places of `struct verbs_context_ops` in the release that the provider is compiled with.
pub const PLACES: usize = 76;
/// Places of a table that libibverbs reads: more than any release has.
pub const ROOM: usize = 128;
/// Bytes of `struct verbs_context` in front of `struct ibv_context` in that release.
pub const CONTEXT_HEAD: usize = 320;
/// The address of a verb, or 0 for one that the provider does not have.
pub type Verb = usize;

/// The layouts of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// N of the newest symbol version `IBVERBS_1.N`.
    pub public: u32,
    /// Bytes of `struct verbs_context` in front of its last field, `struct ibv_context`. These are pointers
    /// and numbers, the same on all processors of 64 bits; the C library's mutex in the last field is not.
    pub context_head: usize,
    /// The name of the function by which a provider registers.
    pub register: &'static CStr,
    /// Whether ibv_cmd_get_context() takes descriptors in front of the response.
    pub get_context_takes_fds: bool,
}

/// The verbs that a symbol version brought, by their place in `struct verbs_context_ops` of the release
/// that brought them.
const NEW: [(u32, &[usize]); 4] = [
    (15, &[2, 26, 71]),
    (16, &[41, 64]),
    (17, &[1, 43]),
    (18, &[16, 34, 52, 53, 67, 68, 77, 79, 87, 89]),
];
/// The symbol version that brought query_port_speed(), and its place there.
const PORT_SPEED: (u32, usize) = (16, 64);

impl Layout {
    /// Returns the layouts of the release with these versions, or `None` if no known release has them.
    pub fn of(public: u32, private: u32) -> Option<Self> {
        let (context_head, register) = match (public, private) {
            (14, 34) => (CONTEXT_HEAD, c"verbs_register_driver_34"),
            (14, 57) => (CONTEXT_HEAD, c"verbs_register_driver_57"),
            (15, 59) => (344, c"verbs_register_driver_59"),
            (16, 59) => (352, c"verbs_register_driver_59"),
            (17, 64) => (368, c"verbs_register_driver_64"),
            (18, 65) => (368, c"verbs_register_driver_65"),
            _ => return None,
        };
        Some(Self { public, context_head, register, get_context_takes_fds: private >= 57 })
    }

    /// Returns verbs where this release looks for them. `verbs` has the order of the release that the
    /// provider is compiled with, which does not have `query_port_speed`.
    pub fn table(&self, verbs: &[Verb; PLACES], query_port_speed: Verb) -> [Verb; ROOM] {
        let mut table = [0; ROOM];
        let mut put = |place: usize, verb| {
            if let Some(entry) = table.get_mut(place) {
                *entry = verb;
            }
        };
        for (place, &verb) in verbs.iter().enumerate() {
            put(self.place(place, 14), verb);
        }
        let (public, place) = PORT_SPEED;
        if public <= self.public {
            put(self.place(place, public), query_port_speed);
        }
        table
    }

    /// Returns where a verb stands that has a place in the release with the symbol version `public`.
    fn place(&self, place: usize, public: u32) -> usize {
        let later = |version: u32| public < version && version <= self.public;
        let before = |place, &new: &usize| if new <= place { place + 1 } else { place };
        NEW.iter()
            .filter(|(version, _)| later(*version))
            .fold(place, |place, (_, new)| new.iter().fold(place, before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::array::from_fn;
    use std::{env, fs};

    /// Each verb stands where the headers of its release have it; verbs of later releases are left out.
    #[test]
    fn verbs_move_with_those_in_front() {
        let verbs = from_fn(|place| place + 1);
        let same = Layout::of(14, 34).unwrap().table(&verbs, 1000);
        assert_eq!(same[..PLACES], verbs);
        assert_eq!(same[PLACES..], [0; ROOM - PLACES]);
        assert_eq!(Layout::of(14, 57).unwrap().table(&verbs, 1000), same);
        // Of the first places of 59: advise_mr, alloc_dm, alloc_dmah, alloc_mw.
        let table = Layout::of(15, 59).unwrap().table(&verbs, 1000);
        assert_eq!(table[..4], [1, 2, 0, 3]);
        assert!(!table.contains(&1000));
        for (public, private, count, speed) in
            [(16, 59, 81, 64), (17, 64, 83, 66), (18, 65, 93, 72)]
        {
            let table = Layout::of(public, private).unwrap().table(&verbs, 1000);
            assert_eq!(table.iter().filter(|&&verb| verb != 0).count(), PLACES + 1);
            assert_eq!((table[speed], table[count - 1]), (1000, PLACES));
            assert_eq!(table[count..], [0].repeat(ROOM - count));
            let order: Vec<_> =
                table.into_iter().filter(|&verb| verb != 0 && verb != 1000).collect();
            assert_eq!(order, verbs);
        }
    }

    /// Returns the names of the verbs, in the order in which the headers of a release have them.
    fn verbs_of(release: &str) -> Vec<String> {
        let header = fs::read_to_string(format!("{release}/include/infiniband/driver.h")).unwrap();
        let table = header.split("struct verbs_context_ops {").nth(1).unwrap();
        let table = table.split("\n};").next().unwrap();
        let name = |field: &str| Some(field.split_once(")(")?.0.to_string());
        table.split("(*").skip(1).filter_map(name).collect()
    }

    /// Returns the number that stands behind `prefix` the last time.
    fn last_number(text: &str, prefix: &str) -> Option<u32> {
        let digits = text.rsplit(prefix).next()?;
        digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    }

    /// Each verb stands where the headers of a release have it. RELEASES names directories of
    /// rdma-core-sdk.
    #[test]
    fn verbs_stand_where_their_release_has_them() {
        let base = verbs_of(env!("RDMA_CORE"));
        assert_eq!(base.len(), PLACES);
        let verbs = from_fn(|place| place + 1);
        let releases = env::var("RELEASES").unwrap_or(env!("RDMA_CORE").to_string());
        for release in releases.split_whitespace() {
            let read = |file: &str| fs::read_to_string(format!("{release}/{file}")).unwrap();
            let public =
                last_number(&read("source/libibverbs/libibverbs.map.in"), "\nIBVERBS_1.").unwrap();
            let private = read("abi").trim().parse().unwrap();
            let layout =
                Layout::of(public, private).unwrap_or_else(|| panic!("{release}: unknown"));
            let table = layout.table(&verbs, 1000);
            let order = verbs_of(release);
            for (place, name) in order.iter().enumerate() {
                let verb = match base.iter().position(|verb| verb == name) {
                    Some(at) => at + 1,
                    None if name == "query_port_speed" => 1000,
                    None => 0,
                };
                assert_eq!(table[place], verb, "{release}: {name}");
            }
            assert!(table[order.len()..].iter().all(|&verb| verb == 0), "{release}");
        }
    }

    /// A release that is not in the table is not known: an older one, one that grew without another
    /// number of its private interface, and one that has another number.
    #[test]
    fn unknown_releases() {
        for (public, private) in
            [(13, 34), (14, 33), (15, 34), (14, 59), (17, 59), (19, 65), (18, 66), (19, 66)]
        {
            assert_eq!(Layout::of(public, private), None, "{public}, {private}");
        }
    }
}
