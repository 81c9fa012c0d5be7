// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The orders by which the device does something wrong. Each is a line of JSON.
//!
//! | line | meaning |
//! |---|---|
//! | `{"on": QUEUE, ...}` | spoils the next buffer that is given back in such a queue, see [`Rule`] |
//! | `{"forge": QUEUE, "bytes": HEX, "used": N, "times": N}` | gives back buffers that nothing was done for |
//! | `{"interrupt": QUEUE, "times": N}` | interrupts without a cause |
//! | `{"config": "ones"}`, `"zeros"`, `"honest"`, `[OFFSET, HEX]` | changes the configuration space |
//! | `{"poke": "qp", "cq" or "srq", "at": OFFSET, "bytes": HEX}` | writes into the heads of all rings of that kind |
//! | `{"needs_reset": N}` | sets DEVICE_NEEDS_RESET now, and each time that the driver starts the device, N times in all |
//! | `{"require": BIT}` | lets FEATURES_OK stand no more without this feature bit, which it need not offer |
//! | `{"late_reset": MS}` | shows only so many milliseconds after the next reset that it is complete |
//! | `{"honest": true}` | ends all of this; what has happened stays |
//!
//! QUEUE is "control", "cq", "sq", "rq", "event", "comp" (completion events) or "doorbell" and means all
//! queues of that kind. A CQ in a ring has no buffers. There the CQE itself is spoilt, only in one CQ if
//! there is a `cqn`; `id` and `used` have no meaning; `jump` skips places; and a CQE whose `lap` is not
//! given has the right one. Of send and receive rings only the heads can be spoilt.

use serde_json::Value;

/// The purpose of a queue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// The control queue.
    Control,
    /// A completion queue.
    Cq,
    /// A send queue.
    Sq,
    /// A receive queue.
    Rq,
    /// The event queue.
    Event,
    /// A queue of completion events.
    CompletionEvent,
    /// The doorbell queue.
    Doorbell,
}

/// A kind of object that has rings.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Object {
    /// CQs.
    Cq,
    /// QPs.
    Qp,
    /// SRQs.
    Srq,
}

/// Buffers that are given back although nothing was done for them.
#[derive(Clone, Debug)]
pub struct Forgery {
    /// The content; if it is empty, a copy of the buffer before.
    pub bytes: Vec<u8>,
    /// The used length.
    pub used: u32,
    /// The number of buffers.
    pub times: u64,
}

/// Spoils buffers that are given back.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The kind of the queues.
    pub role: Role,
    /// The command whose replies are spoilt, for the control queue; `None`: all commands.
    pub command: Option<u8>,
    /// The CQ whose CQEs are spoilt, for CQs in rings; `None`: all CQs.
    pub cqn: Option<u32>,
    /// The number of buffers that are still to be spoilt.
    pub times: u64,
    /// The bytes to write into each buffer, with their offsets.
    pub write: Vec<(u64, Vec<u8>)>,
    /// Another used length.
    pub used: Option<u32>,
    /// Another id in the used ring.
    pub id: Option<u32>,
    /// Whether the buffer is not given back at all.
    pub keep: bool,
    /// The number of other buffers of the queue that are given back first. So the guest can see what the device did
    /// before the device says that it is done.
    pub hold: u32,
    /// The number of milliseconds after which the buffer is given back. Other buffers are given back meanwhile.
    pub late: Option<u64>,
    /// Whether the buffer is given back twice.
    pub twice: bool,
    /// The distance by which the used index jumps afterwards.
    pub jump: u16,
    /// The forgeries that follow in the same queue.
    pub then: Vec<Forgery>,
}

/// An order.
#[derive(Debug)]
pub enum Order {
    /// Applies a rule from now on, once or as often as it says.
    Rule(Rule),
    /// Forges buffers at once.
    Forge(Role, Forgery),
    /// Interrupts the guest at once, this many times.
    Interrupt(Role, u64),
    /// Writes bytes at an offset of heads at once.
    Poke(Object, u64, Vec<u8>),
    /// Changes the configuration space from now on.
    Config(Config),
    /// Asks the driver for a reset at once, and whenever it starts the device, this many times in all.
    NeedsReset(u64),
    /// Lets FEATURES_OK stand no more without this feature bit.
    Require(u32),
    /// Shows only so many milliseconds after the next reset that it is complete.
    LateReset(u64),
    /// Ends all rules and forgeries.
    Honest,
}

/// A change of the configuration space.
#[derive(Debug)]
pub enum Config {
    /// Every byte has this value.
    Fill(u8),
    /// The bytes at this offset have these values.
    Patch(u64, Vec<u8>),
    /// Every byte has the value that it should have.
    Honest,
}

impl Order {
    /// Reads an order. The error says what is wrong with the line.
    pub fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        if let Some(queue) = value.get("on") {
            return Ok(Self::Rule(rule(role(queue)?, &value)?));
        }
        if let Some(queue) = value.get("forge") {
            return Ok(Self::Forge(role(queue)?, forgery(&value)?));
        }
        if let Some(queue) = value.get("interrupt") {
            return Ok(Self::Interrupt(role(queue)?, number(&value, "times")?.unwrap_or(1)));
        }
        if let Some(object) = value.get("poke") {
            let offset = number(&value, "at")?.ok_or("no place to poke")?;
            return Ok(Self::Poke(self::object(object)?, offset, hex(value.get("bytes"))?));
        }
        if let Some(what) = value.get("config") {
            return config(what).map(Self::Config);
        }
        if let Some(times) = number(&value, "needs_reset")? {
            return Ok(Self::NeedsReset(times));
        }
        if let Some(bit) = number(&value, "require")? {
            return if bit < 64 { Ok(Self::Require(bit)) } else { Err(format!("no bit is {bit}")) };
        }
        if let Some(time) = number(&value, "late_reset")? {
            return Ok(Self::LateReset(time));
        }
        if value.get("honest").is_some() {
            return Ok(Self::Honest);
        }
        let known = "on, forge, interrupt, poke, config, needs_reset, require, late_reset, honest";
        Err(format!("none of {known}"))
    }
}

fn role(value: &Value) -> Result<Role, String> {
    match value.as_str() {
        Some("control") => Ok(Role::Control),
        Some("cq") => Ok(Role::Cq),
        Some("sq") => Ok(Role::Sq),
        Some("rq") => Ok(Role::Rq),
        Some("event") => Ok(Role::Event),
        Some("comp") => Ok(Role::CompletionEvent),
        Some("doorbell") => Ok(Role::Doorbell),
        _ => Err(format!("no queue is called {value}")),
    }
}

fn object(value: &Value) -> Result<Object, String> {
    match value.as_str() {
        Some("cq") => Ok(Object::Cq),
        Some("qp") => Ok(Object::Qp),
        Some("srq") => Ok(Object::Srq),
        _ => Err(format!("no object with rings is called {value}")),
    }
}

fn number<T: TryFrom<u64>>(value: &Value, name: &str) -> Result<Option<T>, String> {
    let Some(number) = value.get(name) else { return Ok(None) };
    let fits = number.as_u64().and_then(|number| T::try_from(number).ok());
    fits.map(Some).ok_or_else(|| format!("{name} cannot be {number}"))
}

fn hex(value: Option<&Value>) -> Result<Vec<u8>, String> {
    let text = value.and_then(Value::as_str).unwrap_or_default();
    let byte = |at| text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
    bytes.ok_or_else(|| format!("{text} is not hexadecimal"))
}

/// Reads `[OFFSET, HEX]`.
fn patch(value: &Value) -> Result<(u64, Vec<u8>), String> {
    let offset = value.get(0).and_then(Value::as_u64);
    Ok((offset.ok_or_else(|| format!("{value} has no offset"))?, hex(value.get(1))?))
}

fn list<T>(
    value: &Value,
    name: &str,
    of: impl Fn(&Value) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    value.get(name).and_then(Value::as_array).into_iter().flatten().map(of).collect()
}

fn rule(role: Role, value: &Value) -> Result<Rule, String> {
    let says = |name| value.get(name).is_some_and(|value| *value == Value::Bool(true));
    Ok(Rule {
        role,
        command: number(value, "command")?,
        cqn: number(value, "cqn")?,
        times: number(value, "times")?.unwrap_or(1),
        write: list(value, "write", patch)?,
        used: number(value, "used")?,
        id: number(value, "id")?,
        keep: says("keep"),
        hold: number(value, "hold")?.unwrap_or(0),
        late: number(value, "late")?,
        twice: says("twice"),
        jump: number(value, "jump")?.unwrap_or(0),
        then: list(value, "then", forgery)?,
    })
}

fn forgery(value: &Value) -> Result<Forgery, String> {
    Ok(Forgery {
        bytes: hex(value.get("bytes"))?,
        used: number(value, "used")?.ok_or("a forgery needs its used length")?,
        times: number(value, "times")?.unwrap_or(1),
    })
}

fn config(value: &Value) -> Result<Config, String> {
    match value.as_str() {
        Some("ones") => Ok(Config::Fill(0xff)),
        Some("zeros") => Ok(Config::Fill(0)),
        Some("honest") => Ok(Config::Honest),
        _ => patch(value).map(|(offset, bytes)| Config::Patch(offset, bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood_or_refused() {
        let line = r#"{"on": "cq", "times": 2, "write": [[8, "ff00"]], "then": [{"used": 40}]}"#;
        let Ok(Order::Rule(rule)) = Order::parse(line) else { panic!("not understood") };
        assert_eq!((rule.role, rule.times, rule.used), (Role::Cq, 2, None));
        assert_eq!(rule.write, [(8, vec![0xff, 0])]);
        assert_eq!((rule.then[0].used, rule.then[0].times), (40, 1));
        for wrong in [
            "",
            "{}",
            r#"{"on": "srq"}"#,
            r#"{"on": "cq", "used": -1}"#,
            r#"{"on": "cq", "write": [[0, "f"]]}"#,
            r#"{"forge": "event"}"#,
            r#"{"poke": "mr", "at": 0, "bytes": "00"}"#,
            r#"{"poke": "qp", "bytes": "00"}"#,
            r#"{"require": 64}"#,
            r#"{"late_reset": "long"}"#,
        ] {
            assert!(Order::parse(wrong).is_err(), "{wrong}");
        }
    }
}
