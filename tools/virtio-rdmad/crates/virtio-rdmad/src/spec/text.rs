// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The types of values. Each has a text form, which serde reads and writes; a number may stand for its text.

use std::fmt::{Display, Formatter};
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// A value that is read from a text.
pub trait Text: Sized {
    /// Returns what the text has to be.
    fn wanted() -> String;

    /// Reads the text.
    fn read(text: &str) -> Option<Self>;
}

/// Returns the text of a value that is one.
pub fn of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(is_on) => Some(if *is_on { "on" } else { "off" }.to_owned()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

fn read<T: Text, E: Error>(text: &str) -> Result<T, E> {
    T::read(text).ok_or_else(|| E::custom(format!("\"{text}\" is not {}", T::wanted())))
}

/// Reads one value.
pub fn one<'de, T: Text, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    let text = of(&Value::deserialize(from)?);
    read(&text.ok_or_else(|| D::Error::custom("this is not one value"))?)
}

/// Reads whether something is on.
pub fn switch<'de, D: Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    match of(&Value::deserialize(from)?).unwrap_or_default().as_str() {
        "on" => Ok(true),
        "off" => Ok(false),
        other => Err(D::Error::custom(format!("\"{other}\" is not on or off"))),
    }
}

/// Makes serde read and write types as their texts.
macro_rules! as_text {
    ($($type:ty),+) => {$(
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                $crate::spec::text::one(from)
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }
    )+};
}
pub(super) use as_text;

/// One or more values, with `+` between them in a text.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct List<T>(pub Vec<T>);

impl<'de, T: Text> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let values = match Value::deserialize(from)? {
            Value::Array(values) => values,
            value => vec![value],
        };
        let texts: Option<Vec<_>> = values.iter().map(of).collect();
        let texts = texts.filter(|texts| !texts.is_empty());
        let texts = texts.ok_or_else(|| D::Error::custom("this is neither a value nor a list"))?;
        texts.join("+").split('+').map(read).collect::<Result<_, _>>().map(Self)
    }
}

impl<T: Display> Serialize for List<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(ToString::to_string))
    }
}

/// A number in bounds.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Number<T, const LEAST: u32, const MOST: u32>(pub T);

/// A number of at least 1.
pub type Count<T> = Number<T, 1, { u32::MAX }>;

impl<T, const LEAST: u32, const MOST: u32> Text for Number<T, LEAST, MOST>
where
    T: Copy + FromStr + Into<u32>,
{
    fn wanted() -> String {
        match MOST {
            u32::MAX => format!("a number of at least {LEAST}"),
            most => format!("a number of {LEAST} to {most}"),
        }
    }

    fn read(text: &str) -> Option<Self> {
        let number: T = Some(text).filter(|text| !text.starts_with('+'))?.parse().ok()?;
        (LEAST..=MOST).contains(&number.into()).then_some(Self(number))
    }
}

impl<'de, T, const LEAST: u32, const MOST: u32> Deserialize<'de> for Number<T, LEAST, MOST>
where
    Self: Text,
{
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        one(from)
    }
}

/// Numbers from one to another, or a single one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Range<const MOST: u16> {
    /// The first one.
    pub first: u16,
    /// The last one.
    pub last: u16,
}

impl<const MOST: u16> Display for Range<MOST> {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { first, last } = self;
        if first == last {
            write!(out, "{first}")
        } else {
            write!(out, "{first}-{last}")
        }
    }
}

impl<const MOST: u16> Text for Range<MOST> {
    fn wanted() -> String {
        format!("a number of 0 to {MOST} or a range of these such as 3-7")
    }

    fn read(text: &str) -> Option<Self> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last && last <= MOST).then_some(Self { first, last })
    }
}

/// The unit of numbers that count the same things.
pub trait Unit {
    /// The name of these things.
    const NAME: &'static str;
    /// The least number.
    const LEAST: u64;
    /// The letters of units, each of which is `BASE` times as much as the one before.
    const LETTERS: &'static str;
    /// See [`Self::LETTERS`].
    const BASE: u64;
}

/// A number that may have a unit in its text, such as 10G.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Scaled<U>(pub u64, PhantomData<U>);

impl<U: Unit> Display for Scaled<U> {
    /// Writes the number with the largest unit that leaves no remainder.
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let (mut number, mut unit) = (self.0, None);
        for letter in U::LETTERS.chars() {
            if number == 0 || number % U::BASE != 0 {
                break;
            }
            (number, unit) = (number / U::BASE, Some(letter));
        }
        write!(out, "{number}{}", unit.map(String::from).unwrap_or_default())
    }
}

impl<U: Unit> Text for Scaled<U> {
    fn wanted() -> String {
        let least = Self(U::LEAST, PhantomData);
        format!("a number of {} of at least {least}, such as 500M or 10G", U::NAME)
    }

    fn read(text: &str) -> Option<Self> {
        let unit = text.chars().last().and_then(|last| U::LETTERS.find(last));
        let (digits, power) = match unit {
            Some(at) => (&text[..text.len() - 1], u32::try_from(at).ok()? + 1),
            None => (text, 0),
        };
        let number = digits.parse::<u64>().ok()?.checked_mul(U::BASE.checked_pow(power)?)?;
        (number >= U::LEAST).then_some(Self(number, PhantomData))
    }
}

impl<'de, U: Unit> Deserialize<'de> for Scaled<U> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        one(from)
    }
}

impl<U: Unit> Serialize for Scaled<U> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}
