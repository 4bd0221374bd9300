//! The failures of the tool: a message with a remedy, and an exit code.

use std::fmt;
use std::io::{self, Write};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The command line is invalid or cannot be run here: exit code 2.
    Usage(String),
    /// The run failed, or found wrong data: exit code 1.
    Run(String),
    /// The other side was lost: exit code 1.
    Lost(String),
    /// The user interrupted the run: exit code 130, as shells report SIGINT.
    Interrupted(String),
}

pub type Outcome<T = ()> = Result<T, Failure>;

/// Writes a line to standard error. A line that cannot be written, for example because the disk is
/// full, is dropped: the exit status still reports a failure.
pub fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

impl Failure {
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::Usage(message.into())
    }

    pub fn run(message: impl Into<String>) -> Self {
        Failure::Run(message.into())
    }

    pub fn lost(who: &str, how: impl fmt::Display) -> Self {
        Failure::Lost(format!("lost {who}: {how}"))
    }

    /// Appends the number of measured iterations to the message.
    #[must_use]
    pub fn after(self, done: u64, of: Option<u64>) -> Self {
        let of = of.map_or(String::new(), |of| format!(" of {of}"));
        let told = |message| format!("{message}; {done}{of} iterations were measured by then");
        match self {
            Failure::Usage(message) => Failure::Usage(message),
            Failure::Run(message) => Failure::Run(told(message)),
            Failure::Lost(message) => Failure::Lost(told(message)),
            Failure::Interrupted(message) => Failure::Interrupted(told(message)),
        }
    }

    pub fn code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Run(_) | Failure::Lost(_) => 1,
            Failure::Interrupted(_) => 130,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(message)
            | Failure::Run(message)
            | Failure::Lost(message)
            | Failure::Interrupted(message) => f.write_str(message),
        }
    }
}
