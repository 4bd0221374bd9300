//! A fault or repair of a link or a node, and its time. Written and parsed as one line of text, so
//! that a failing run can be repeated. Allocates nothing.

use core::fmt;
use core::str::FromStr;

/// A rail between two nodes, with `a <= b`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// The node with the lower number.
    pub a: u16,
    /// The other node, which may be the same.
    pub b: u16,
    /// The simulator's number of the rail.
    pub rail: u16,
}

/// What happens to a link or a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Cuts a link in one or both directions, as [`Sim::cut`](crate::rail::sim::Sim::cut) does.
    Cut {
        /// The link.
        link: Link,
        /// Whether the direction from `a` to `b` is cut.
        there: bool,
        /// Whether the direction from `b` to `a` is cut.
        back: bool,
        /// Maximum number of polls after which traffic of the link lands.
        late: u32,
    },
    /// A node stops using a link.
    Disable {
        /// The link.
        link: Link,
        /// Whether `b` disables the link, rather than `a`.
        back: bool,
    },
    /// Restores a link that was cut or disabled.
    Heal(Link),
    /// A node makes no passes for some turns.
    Stall {
        /// The node.
        node: u16,
        /// The number of turns.
        turns: u64,
    },
    /// A node dies. The driver must call [`Schedule::kill`](super::Schedule::kill) at this time.
    Die(u16),
}

/// A change and its time.
///
/// As text, in one line:
///
/// ```text
/// 120 cut 0-1 rail 2 late 300     both directions; 0>1 and 0<1 are one direction
/// 180 disable 0>1 rail 1          node 0 disables the rail to node 1; 0<1: node 1 does
/// 200 heal 0-1 rail 2
/// 250 stall 0 for 30
/// 300 die 2
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The time, in turns of the driver.
    pub at: u64,
    /// The fault or repair that happens at this time.
    pub change: Change,
}

impl Event {
    /// An unused event.
    pub const EMPTY: Event = Event { at: 0, change: Change::Die(0) };
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.at)?;
        match self.change {
            Change::Cut { link: Link { a, b, rail }, there, back, late } => {
                let arrow = match (there, back) {
                    (true, false) => '>',
                    (false, true) => '<',
                    _ => '-',
                };
                write!(f, "cut {a}{arrow}{b} rail {rail}")?;
                if late == 0 { Ok(()) } else { write!(f, " late {late}") }
            }
            Change::Disable { link: Link { a, b, rail }, back } => {
                write!(f, "disable {a}{}{b} rail {rail}", if back { '<' } else { '>' })
            }
            Change::Heal(Link { a, b, rail }) => write!(f, "heal {a}-{b} rail {rail}"),
            Change::Stall { node, turns } => write!(f, "stall {node} for {turns}"),
            Change::Die(node) => write!(f, "die {node}"),
        }
    }
}

impl FromStr for Event {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str =
            "use a line such as `120 cut 0-1 rail 2`, `200 heal 0-1 rail 2` or `250 stall 0 for 9`";
        let mut words = text.split_ascii_whitespace();
        let mut word = || words.next().ok_or(FORM);
        let (at, kind, who) = (whole(word()?).ok_or(FORM)?, word()?, word()?);
        let change = match kind {
            "die" => Change::Die(whole(who).ok_or(FORM)?),
            "stall" => match (word()?, whole(word()?)) {
                ("for", Some(turns)) => Change::Stall { node: whole(who).ok_or(FORM)?, turns },
                _ => return Err(FORM),
            },
            _ => {
                let arrow = who.find(['-', '>', '<']).ok_or(FORM)?;
                let (a, b) =
                    (whole(&who[..arrow]).ok_or(FORM)?, whole(&who[arrow + 1..]).ok_or(FORM)?);
                let link = match (word()?, whole(word()?)) {
                    ("rail", Some(rail)) if a <= b => Link { a, b, rail },
                    ("rail", Some(_)) => return Err("name the lower node first, such as 0<1"),
                    _ => return Err(FORM),
                };
                match (kind, &who[arrow..=arrow]) {
                    ("cut", arrow) => {
                        let late = match (word().ok(), word().ok()) {
                            (None, _) => 0,
                            (Some("late"), Some(late)) => whole(late).ok_or(FORM)?,
                            _ => return Err(FORM),
                        };
                        Change::Cut { link, there: arrow != "<", back: arrow != ">", late }
                    }
                    ("disable", arrow) if arrow != "-" => {
                        Change::Disable { link, back: arrow == "<" }
                    }
                    ("heal", "-") => Change::Heal(link),
                    _ => return Err(FORM),
                }
            }
        };
        if words.next().is_some() { Err(FORM) } else { Ok(Event { at, change }) }
    }
}

/// `Display` prints an accepted number the same way.
fn whole<T: FromStr + fmt::Display>(text: &str) -> Option<T> {
    let plain = text == "0" || !text.starts_with(['0', '+']);
    text.parse().ok().filter(|_| plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: [&str; 8] = [
        "120 cut 0-1 rail 2",
        "0 cut 0>1 rail 0 late 300",
        "18446744073709551615 cut 1<1 rail 7",
        "180 disable 0>1 rail 1",
        "181 disable 0<1 rail 1",
        "200 heal 0-1 rail 2",
        "250 stall 0 for 30",
        "300 die 2",
    ];

    #[test]
    fn events_are_written_as_they_are_read() {
        extern crate std;
        use std::string::ToString;
        for text in TEXTS {
            assert_eq!(text.parse::<Event>().map(|event| event.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn invalid_events_are_refused() {
        for text in [
            "",
            "5",
            "5 cut",
            "x cut 0-1 rail 2",
            "-1 cut 0-1 rail 2",
            "5 cut 0-1",
            "5 cut 0-1 rail",
            "5 cut 01 rail 2",
            "5 cut 1-0 rail 2",
            "5 cut 0-1 rail 2 late",
            "5 cut 0-1 rail 2 soon 9",
            "5 cut 0-1 rail 2 late 9 9",
            "5 cut 0-65536 rail 2",
            "5 disable 0-1 rail 2",
            "5 heal 0>1 rail 2",
            "5 heal 0-1 rail 2 late 9",
            "5 stall 0 for",
            "5 die 0 1",
            "5 die +1",
            "05 die 1",
            "5 melt 0-1 rail 2",
        ] {
            assert!(text.parse::<Event>().is_err(), "{text}");
        }
    }
}
