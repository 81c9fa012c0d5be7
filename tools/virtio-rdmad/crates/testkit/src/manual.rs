// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the manual page of a program says of its options, and whether its help says the same.

use std::collections::{BTreeMap, BTreeSet};

/// The options of each command of a program, and at "" those without a command.
type Options = BTreeMap<String, BTreeSet<String>>;

/// Checks that the synopsis of a page has the options that the help of each command has, and no other, and that the page
/// says something about each option. A help is that of a command, "" for that of the program itself.
pub fn check(page: &str, helps: impl IntoIterator<Item = (String, String)>) {
    let of_help = |(command, help): (String, String)| (command, options_of_help(&help));
    let expected: Options = helps.into_iter().map(of_help).collect();
    let (synopsis, rest) = parts(page);
    assert_eq!(options_of_synopsis(synopsis), expected, "the synopsis and the help differ");
    let named = rest.lines().flat_map(options_of_line).collect();
    let all: BTreeSet<_> = expected.into_values().flatten().collect();
    let missing: Vec<_> = all.difference(&named).collect();
    assert!(missing.is_empty(), "the page says nothing about {missing:?}");
}

/// Returns the options at the beginning of a line, behind a short form, without those that each program has.
fn options_of_help(help: &str) -> BTreeSet<String> {
    let of_line = |line: &str| {
        let line = line.trim_start();
        let behind_short = line.split_once(", ").filter(|(short, _)| short.len() == 2);
        name(behind_short.map_or(line, |(_, long)| long).strip_prefix("--")?)
    };
    help.lines().filter_map(of_line).filter(|name| name != "help" && name != "version").collect()
}

/// Returns the name that a text begins with, if one does. The option of guest N is called as that of each guest.
fn name(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_ascii_lowercase() && c != '-').unwrap_or(text.len());
    (end > 0).then(|| text[..end].to_owned())
}

/// Returns the synopsis of a page, and what is behind it.
fn parts(page: &str) -> (&str, &str) {
    let (_, page) = page.split_once(".Sh SYNOPSIS\n").expect("the page has a synopsis");
    page.split_once("\n.Sh ").expect("the page has more than a synopsis")
}

fn options_of_synopsis(synopsis: &str) -> Options {
    let mut found = Options::new();
    let mut command = "";
    let mut lines = synopsis.lines().peekable();
    while let Some(line) = lines.next() {
        if line == ".Nm" {
            command = lines.peek().and_then(|next| next.strip_prefix(".Cm ")).unwrap_or_default();
        }
        found.entry(command.to_owned()).or_default().extend(options_of_line(line));
    }
    found
}

/// Returns the options that a line of a page names by the macro Fl.
fn options_of_line(line: &str) -> Vec<String> {
    let words: Vec<_> = line.trim_start_matches('.').split(' ').collect();
    let of_three = |three: &[&str]| match three {
        ["Fl", "Fl", word] => name(word),
        _ => None,
    };
    words.windows(3).filter_map(of_three).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
.Sh SYNOPSIS
.Nm
.Op Fl v | Fl Fl verbose
.Op Oo Fl Fl Oc Ar command
.Nm
.Cm run
.Op Fl Fl cmd Ns Ar N line ...
.Fl Fl time-out Ar seconds
.Sh DESCRIPTION
.It Fl v , Fl Fl verbose
.It Fl Fl cmd Ns Ar N line
The
.Fl Fl time-out .
";
    const HELP: &str = "Options:\n  -v, --verbose  It says more\n  -h, --help     Help\n";
    const RUN: &str = "  --cmd1 <LINE>\n      It is not --other\n  --cmd2 <LINE>\n  --time-out <S>";

    fn check_with(page: &str) {
        check(page, [("", HELP), ("run", RUN)].map(|(name, help)| (name.into(), help.into())));
    }

    #[test]
    fn a_page_has_the_options_of_the_help() {
        check_with(PAGE);
    }

    #[test]
    #[should_panic(expected = "the synopsis and the help differ")]
    fn an_option_that_the_help_lacks_is_found() {
        check_with(&PAGE.replace(".Fl Fl time-out Ar", ".Op Fl Fl old\n.Fl Fl time-out Ar"));
    }

    #[test]
    #[should_panic(expected = "says nothing about [\"cmd\"]")]
    fn an_option_that_is_not_explained_is_found() {
        check_with(&PAGE.replace(".It Fl Fl cmd", ".It Fl Fl other"));
    }
}
