// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images: the state of a device as bytes, and why such bytes are refused.
//!
//! An image has a header and a payload. The header says what it is, its version, and the length and the checksum of the
//! payload:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | [`MAGIC`] |
//! | 8..12 | [`VERSION`], little-endian |
//! | 12..20 | bytes of the payload, little-endian |
//! | 20..24 | CRC-32 of the bytes in front of it, then of the payload, little-endian |
//!
//! The payload is a `crate::image::Image` in the encoding of `postcard`, which depends on the types and the order of
//! the fields, and not on names. The image of each object, such as `CqImage`, is a part of it and stands in the file of
//! the object. A change of any of these structures needs another [`VERSION`]. The test `golden_images` fails without
//! it.

pub(crate) use reliability::{require, Moment, Wrong};
use ring::RingError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::address::Address;

/// The version of the payload. Versions from [`OLDEST`] on can be opened, all others are refused.
pub(crate) const VERSION: u32 = 4;

/// The first version whose payload has the same form.
const OLDEST: u32 = 3;

/// The first bytes of an image.
const MAGIC: [u8; 8] = *b"vrdma-im";

/// The bytes of the header that its checksum is of.
const CHECKED: usize = 20;
/// The bytes of the header.
const HEADER: usize = 24;

/// The reason why an image is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The image has fewer bytes than a header.
    #[error("an image of {len} bytes has no header")]
    Header {
        /// The length of the image, in bytes.
        len: usize,
    },
    /// The first bytes are not those of an image.
    #[error("the bytes are no image of a device")]
    Magic,
    /// The image has another version.
    #[error("an image of version {found}, not of version {OLDEST} to {VERSION}")]
    Version {
        /// The version of the image.
        found: u32,
    },
    /// The image has fewer or more bytes than its header says.
    #[error("an image with {found} bytes behind its header, which names {named}")]
    Length {
        /// The bytes behind the header.
        found: usize,
        /// The number that the header names.
        named: u64,
    },
    /// The checksum of the image is wrong.
    #[error("an image with the checksum {found:#010x}, which names {named:#010x}")]
    Checksum {
        /// The checksum.
        found: u32,
        /// The checksum that the header names.
        named: u32,
    },
    /// The payload of the image cannot be decoded.
    #[error("an image whose payload cannot be decoded: {0}")]
    Form(String),
    /// The device has another MAC address than its state.
    #[error("the state of a device with another MAC address")]
    Mac,
    /// The driver has agreed on features that this device does not have.
    #[error("the driver agreed on the features {missing:#x}, which this device does not have")]
    Features {
        /// The bits that are missing.
        missing: u64,
    },
    /// The guest was told of another limit.
    #[error("the state of a device with another {what}")]
    Limit {
        /// The name of the limit.
        what: &'static str,
    },
    /// The device is started, and so has a state already.
    #[error("the device is started")]
    Started,
    /// The guest has an address that it may not have, or that another guest has.
    #[error("the address {0:?} is not free for this guest")]
    Address(Address),
    /// Another device has taken the same state over, or has it still.
    #[error("another device of the network has the state of this image")]
    Twin,
    /// A virtqueue that the guest had set up is not given.
    #[error("virtqueue {index} is missing")]
    NoQueue {
        /// The index of the virtqueue.
        index: u16,
    },
    /// A virtqueue is not in the guest's memory.
    #[error("virtqueue {index}: {error}")]
    Queue {
        /// The index of the virtqueue.
        index: u16,
        /// The reason.
        error: RingError,
    },
    /// An object has a value that it cannot have.
    #[error("{object} {number}: {why}")]
    Object {
        /// The kind of the object.
        object: &'static str,
        /// The number of the object.
        number: u32,
        /// The reason.
        why: &'static str,
    },
}

impl LoadError {
    /// Returns a closure that makes a [`LoadError`] of the reason for which an object is refused.
    pub(crate) fn of(
        object: &'static str,
        number: impl Into<u32>,
    ) -> impl Fn(&'static str) -> Self {
        let number = number.into();
        move |why| Self::Object { object, number, why }
    }
}

/// Returns the CRC-32 of an image with this header and payload.
fn checksum(header: &[u8], payload: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(header);
    crc.update(payload);
    crc.finalize()
}

/// Makes an image.
pub(crate) fn seal<T: Serialize>(state: &T) -> Vec<u8> {
    let header = vec![0; HEADER];
    // Only a structure of unknown length cannot be encoded, and there is none. An image without payload is refused.
    let mut image = postcard::to_extend(state, header).unwrap_or_else(|_| vec![0; HEADER]);
    let (header, payload) = image.split_at_mut(HEADER);
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..CHECKED].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    let crc = checksum(&header[..CHECKED], payload);
    header[CHECKED..].copy_from_slice(&crc.to_le_bytes());
    image
}

/// Opens an image: returns its version and the payload, of which nothing but the form is checked.
pub(crate) fn open<T: DeserializeOwned>(image: &[u8]) -> Result<(u32, T), LoadError> {
    let Some((header, payload)) = image.split_first_chunk::<HEADER>() else {
        return Err(LoadError::Header { len: image.len() });
    };
    let (magic, rest) = header.split_at(8);
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| rest[at + byte]));
    let (version, crc) = (word(0), word(12));
    let named = u64::from(word(4)) | u64::from(word(8)) << 32;
    if magic != MAGIC {
        return Err(LoadError::Magic);
    }
    if !(OLDEST..=VERSION).contains(&version) {
        return Err(LoadError::Version { found: version });
    }
    if named != payload.len() as u64 {
        return Err(LoadError::Length { found: payload.len(), named });
    }
    let found = checksum(&header[..CHECKED], payload);
    if found != crc {
        return Err(LoadError::Checksum { found, named: crc });
    }
    let (state, rest) =
        postcard::take_from_bytes(payload).map_err(|error| LoadError::Form(error.to_string()))?;
    if rest.is_empty() {
        Ok((version, state))
    } else {
        Err(LoadError::Form(format!("{} bytes are left", rest.len())))
    }
}

/// The encoding of a structure of the ABI: its bytes.
pub(crate) mod abi_bytes {
    use super::{
        Deserialize, Deserializer, FromBytes, Immutable, IntoBytes, Serialize, Serializer,
    };

    pub fn serialize<T: IntoBytes + Immutable, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(value.as_bytes())
    }

    pub fn deserialize<'de, T: FromBytes, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        let bytes = <&[u8]>::deserialize(from)?;
        let len = |_| serde::de::Error::invalid_length(bytes.len(), &"the bytes of a structure");
        T::read_from_bytes(bytes).map_err(len)
    }

    /// Bytes of any number.
    #[derive(Serialize, Deserialize)]
    pub(crate) struct Bytes(#[serde(with = "any")] pub Vec<u8>);

    mod any {
        use super::{Deserialize, Deserializer, Serializer};

        pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
            to.serialize_bytes(bytes)
        }

        pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
            <&[u8]>::deserialize(from).map(<[u8]>::to_vec)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_refused_unless_every_bit_is_right() {
        let image = seal(&(7_u32, "text"));
        assert_eq!(open(&image), Ok((VERSION, (7_u32, String::from("text")))));
        for len in 0..image.len() {
            assert!(open::<(u32, String)>(&image[..len]).is_err(), "{len} bytes");
        }
        for bit in 0..image.len() * 8 {
            let mut image = image.clone();
            image[bit / 8] ^= 1 << (bit % 8);
            assert!(open::<(u32, String)>(&image).is_err(), "bit {bit}");
        }
        let longer = [&image[..], &[0]].concat();
        assert_eq!(open::<(u32, String)>(&longer), Err(LoadError::Length { found: 7, named: 6 }));
    }

    #[test]
    fn another_version_is_told_apart() {
        let mut image = seal(&7_u32);
        image[8..12].copy_from_slice(&9_u32.to_le_bytes());
        assert_eq!(open::<u32>(&image), Err(LoadError::Version { found: 9 }));
        image[0] = b'V';
        assert_eq!(open::<u32>(&image), Err(LoadError::Magic));
        assert_eq!(open::<u32>(&image[..23]), Err(LoadError::Header { len: 23 }));
        assert!(matches!(open::<u32>(&seal(&(7_u32, 7_u32))), Err(LoadError::Form(_))));
        assert!(matches!(open::<(u32, u32)>(&seal(&7_u32)), Err(LoadError::Form(_))));
    }
}
