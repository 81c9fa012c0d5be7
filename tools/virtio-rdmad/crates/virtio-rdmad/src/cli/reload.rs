// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad reload`: has a running process follow its configuration file.
//!
//! The process has no file system any more. So this reads the file, compares it with what the process tells of itself,
//! and calls methods for what differs.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use super::add_remove::{add_to, remove_from};
use super::call::ask_summary;
use super::config;
use super::options::ReloadOptions;
use super::set::set;
use crate::control::report::{GuestReport, Report};
use crate::spec::{ConfigFile, GuestSpec, Origin, PolicyChange, Spec, SpecError};

/// Makes the process follow the file. If the file has a mistake, nothing changes.
pub fn run(options: &ReloadOptions) -> Result<(), Box<dyn std::error::Error>> {
    let file = config::read(&options.config)?;
    let report = ask_summary(&options.running.control)?;
    let plan = Plan::new(&file, &report)?;
    let failures = plan.carry_out(&options.running.control);
    plan.needs_restart.iter().for_each(|what| println!("needs a restart: {what}"));
    match failures {
        0 => Ok(()),
        _ => Err(format!("{failures} changes of {} failed", options.config.display()).into()),
    }
}

/// The changes by which a process becomes as a file says.
#[derive(Debug, Default)]
struct Plan {
    /// The names of the guests that leave.
    leave: Vec<String>,
    /// The changes of policies, by the names of guests.
    change: Vec<(String, PolicyChange)>,
    /// The guests that come.
    come: Vec<GuestSpec>,
    /// The changes that can only be made when the process starts, or when the guest comes.
    needs_restart: Vec<String>,
}

impl Plan {
    /// Compares what a file says with what a process reports.
    ///
    /// # Errors
    ///
    /// The process has a guest that this program does not understand: it has another version.
    fn new(file: &ConfigFile, report: &Report) -> Result<Self, SpecError> {
        let mut plan = Self { needs_restart: settings(file, report), ..Self::default() };
        for guest in &report.guests {
            let is_gone = !file.guests.iter().any(|wanted| wanted.name == guest.name);
            if is_gone && guest.origin == Origin::File.name() && !guest.leaving {
                plan.leave.push(guest.name.clone());
            }
        }
        for wanted in &file.guests {
            match report.guests.iter().find(|guest| guest.name == wanted.name) {
                Some(guest) if guest.origin == Origin::File.name() => {
                    plan.compare(wanted, guest)?;
                }
                Some(guest) => {
                    let (name, origin) = (&guest.name, &guest.origin);
                    plan.needs_restart
                        .push(format!("guest {name}, which is not of the file ({origin})"));
                }
                None if wanted.nic.is_some() => {
                    plan.needs_restart.push(format!("guest {}, because of nic", wanted.name));
                }
                None => plan.come.push(wanted.clone()),
            }
        }
        Ok(plan)
    }

    /// Compares a guest that is there with what it is to be. Of its policy, only keys that have changed in the file
    /// change: what it is may have been set since.
    fn compare(&mut self, wanted: &GuestSpec, guest: &GuestReport) -> Result<(), SpecError> {
        let name = &wanted.name;
        if guest.leaving {
            self.needs_restart
                .push(format!("guest {name}, which leaves: reload again when it has left"));
            return Ok(());
        }
        let is = GuestSpec::of_value(guest.spec.clone())?;
        let named = if guest.named.is_null() { &guest.spec } else { &guest.named };
        let change = PolicyChange::between(&GuestSpec::of_value(named.clone())?, wanted);
        if !change.is_empty() {
            self.change.push((name.clone(), change));
        }
        let fixed = is.fixed_differences(wanted);
        if !fixed.is_empty() {
            self.needs_restart.push(format!("{} of guest {name}", fixed.join(", ")));
        }
        Ok(())
    }

    /// Calls the methods of the process behind the control socket. Returns how many calls failed.
    fn carry_out(&self, control: &Path) -> usize {
        let mut failures = 0;
        let mut note = |name: &str, done: Result<&str, &dyn Display>| match done {
            Ok(done) => println!("{name}: {done}"),
            Err(error) => {
                failures += 1;
                eprintln!("virtio-rdmad: {name}: {error}");
            }
        };
        for name in &self.leave {
            match remove_from(control, name, true) {
                Ok(true) => note(name, Ok("removed")),
                Ok(false) => note(name, Ok("is removed when its VMM leaves")),
                Err(error) => note(name, Err(&error)),
            }
        }
        for (name, change) in &self.change {
            match set(control, name, change, true) {
                Ok(()) => note(name, Ok(&change.to_string())),
                Err(error) => note(name, Err(&error)),
            }
        }
        for guest in &self.come {
            match add_to(control, guest, true) {
                Ok(()) => note(&guest.name, Ok("added")),
                Err(error) => note(&guest.name, Err(&error)),
            }
        }
        failures
    }
}

/// Returns what differs between a file and the one that the process was started with, beside the guests.
fn settings(file: &ConfigFile, report: &Report) -> Vec<String> {
    let wanted = file.settings();
    let value = |of: &BTreeMap<String, String>, key: &str| {
        of.get(key).map_or_else(|| "not there".to_owned(), |value| format!("\"{value}\""))
    };
    let mut keys: Vec<_> = wanted.keys().chain(report.settings.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let differs = |key: &&String| wanted.get(*key) != report.settings.get(*key);
    let describe = |key: &String| {
        format!("{key}: {}, was {}", value(&wanted, key), value(&report.settings, key))
    };
    keys.into_iter().filter(differs).map(describe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(guests: &[&str], options: &[(&str, &str)]) -> ConfigFile {
        let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        ConfigFile {
            guests: guests.iter().map(|guest| guest.parse().unwrap()).collect(),
            options: options.iter().map(text).collect(),
            ..ConfigFile::default()
        }
    }

    fn guest(spec: &str, origin: Origin) -> GuestReport {
        GuestReport {
            name: spec.parse::<GuestSpec>().unwrap().name,
            spec: spec.into(),
            origin: origin.name().to_owned(),
            ..GuestReport::default()
        }
    }

    fn report(guests: Vec<GuestReport>) -> Report {
        Report { guests, ..Report::default() }
    }

    #[test]
    fn the_same_needs_nothing() {
        let spec = "name=a,vfio-user=/a,rate=1G";
        let is = report(vec![guest(spec, Origin::File)]);
        let needs_nothing = |file: &ConfigFile| {
            let Plan { leave, change, come, needs_restart } = Plan::new(file, &is).unwrap();
            leave.is_empty() && change.is_empty() && come.is_empty() && needs_restart.is_empty()
        };
        assert!(needs_nothing(&file(&[spec], &[])));
        // The order of keys does not matter, nor that a key has its default.
        let same = file(&["rate=1G,vfio-user=/a,name=a,rings=on"], &[]);
        assert!(needs_nothing(&same));
    }

    #[test]
    fn guests_come_and_leave() {
        let (a, b, c) = ("name=a,vfio-user=/a", "name=b,vfio-user=/b", "name=c,vfio-user=/c");
        let mut leaving = guest("name=d,vfio-user=/d", Origin::File);
        leaving.leaving = true;
        let guests = vec![
            guest(a, Origin::File),
            guest(b, Origin::Call),
            guest(c, Origin::CommandLine),
            leaving,
        ];
        let nic = "name=f,vfio-user=/f,mac=52:54:0:0:0:1,nic=/n";
        let file = file(&["name=e,vfio-user=/e", nic, "name=d,vfio-user=/d"], &[]);
        let plan = Plan::new(&file, &report(guests)).unwrap();
        assert_eq!(plan.leave, ["a"], "others are not of the file, or leave already");
        assert_eq!(plan.come.iter().map(|guest| &*guest.name).collect::<Vec<_>>(), ["e"]);
        assert!(plan.change.is_empty());
        let restarts: Vec<_> = plan.needs_restart.iter().map(|what| &what[..7]).collect();
        assert_eq!(restarts, ["guest f", "guest d"]);
    }

    /// A guest of the command line or of a call stays as it is, also if the file has one of its name.
    #[test]
    fn guests_of_others_do_not_change() {
        let wanted = file(&["name=a,vfio-user=/a,rate=2G,vectors=4"], &[]);
        for origin in [Origin::Call, Origin::CommandLine] {
            let is = report(vec![guest("name=a,vfio-user=/a,rate=1G", origin)]);
            let plan = Plan::new(&wanted, &is).unwrap();
            assert!(plan.change.is_empty() && plan.leave.is_empty() && plan.come.is_empty());
            let expected = format!("guest a, which is not of the file ({})", origin.name());
            assert_eq!(plan.needs_restart, [expected]);
        }
    }

    #[test]
    fn policies_change() {
        let is = report(vec![guest("name=a,vfio-user=/a,rate=1G,qps=9,pds=3", Origin::File)]);
        let wanted = file(&["name=a,vfio-user=/a,rate=2G,pds=3,memory=4G,vectors=4"], &[]);
        let plan = Plan::new(&wanted, &is).unwrap();
        let change = "rate=2G,qps=default,memory=4G".parse().unwrap();
        assert_eq!(plan.change, [("a".to_owned(), change)]);
        assert_eq!(plan.needs_restart, ["vectors of guest a"]);
        assert!(plan.leave.is_empty() && plan.come.is_empty());
    }

    /// A policy that was set while the process ran stays unless the file says something else than before.
    #[test]
    fn policies_that_were_set_stay() {
        let mut set = guest("name=a,vfio-user=/a,rate=3G,qps=9,mws=4", Origin::File);
        set.named = "name=a,vfio-user=/a,rate=1G,pds=3,mws=5".into();
        let is = report(vec![set]);
        let changes = |wanted: &str| {
            let plan = Plan::new(&file(&[wanted], &[]), &is).unwrap();
            assert!(plan.needs_restart.is_empty());
            plan.change.into_iter().map(|(_, change)| change.to_string()).collect::<Vec<_>>()
        };
        assert!(changes("name=a,mws=5,vfio-user=/a,rate=1G,pds=3").is_empty());
        let changed = changes("name=a,vfio-user=/a,rate=1G,qps=8,mws=4");
        assert_eq!(changed, ["qps=8,mws=4,pds=default"]);
    }

    #[test]
    fn what_the_process_starts_with_needs_a_restart() {
        let wanted = file(&[], &[("workers", "2"), ("cpus", "1,2"), ("log", "info")]);
        let settings = [("workers", "4"), ("log", "info"), ("uplink n", "tap=t")];
        let settings = settings.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let is = Report { settings: settings.into(), ..Report::default() };
        let plan = Plan::new(&wanted, &is).unwrap();
        let expected = [
            "cpus: \"1,2\", was not there",
            "uplink n: not there, was \"tap=t\"",
            "workers: \"2\", was \"4\"",
        ];
        assert_eq!(plan.needs_restart, expected);
    }
}
