//! What is known of providers beyond what they say of themselves.
//!
//! | persona         | offered as                   | origin of a write with data | tested on    |
//! |-----------------|------------------------------|-----------------------------|--------------|
//! | `tcp`           | `tcp` from 2.0, `net` in 1.x | in the data, 8 bytes        | the provider |
//! | `tcp;ofi_rxm`   | the same                     | in the data, 8 bytes        | the provider |
//! | `shm`           | the same                     | in the data, 8 bytes        | the provider |
//! | `verbs;ofi_rxm` | the same                     | a message behind the write  | fake tables  |
//! | `efa`           | `efa`, fabric `efa`          | the completion's source     | fake tables  |
//! | `efa-direct`    | `efa`, fabric `efa-direct`   | the completion's source     | fake tables  |
//! | `cxi`           | the same                     | a message behind the write  | fake tables  |
//! | `psm3`          | the same                     | a message behind the write  | fake tables  |
//!
//! Personas without a device follow manuals and sources, and are untested.

/// How the target of a write with data learns its sender:
/// four bytes are the engine's, and name no peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The data has 8 bytes, and its upper half is the sender's number.
    Word,
    /// The provider names the source of each completion.
    Source,
    /// The write carries no data. A message with the word follows it: at once where the provider
    /// keeps messages behind writes (`FI_ORDER_SAW`), otherwise when the write is complete at the
    /// target.
    Message,
}

/// What is known of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Persona {
    /// As it is asked for.
    pub name: &'static str,
    /// As the provider may call itself, best first.
    pub providers: &'static [&'static str],
    /// The fabric that it must be, if the provider has several.
    pub fabric: Option<&'static str>,
    /// How the origin of a write with data is known, where the offer allows it.
    pub notify: Notify,
    /// Whether the provider forgets the endpoint's completion level, so that each write must say
    /// it: `net` hands writes on to another endpoint that was not told.
    pub forgets_level: bool,
    /// Whether posts held back with `FI_MORE` save doorbells.
    pub more: bool,
    /// Completions requested of the queue.
    /// Where the provider may overrun it, this is the only bound.
    pub completions: usize,
}

const fn persona(name: &'static str, providers: &'static [&'static str], notify: Notify) -> Persona {
    Persona { name, providers, fabric: None, notify, forgets_level: false, more: false, completions: 4096 }
}

/// All personas.
pub const PERSONAS: [Persona; 8] = [
    Persona { forgets_level: true, ..persona("tcp", &["tcp", "net"], Notify::Word) },
    persona("tcp;ofi_rxm", &["tcp;ofi_rxm"], Notify::Word),
    persona("shm", &["shm"], Notify::Word),
    Persona { more: true, ..persona("verbs;ofi_rxm", &["verbs;ofi_rxm"], Notify::Message) },
    Persona { fabric: Some("efa"), completions: 32768, ..persona("efa", &["efa"], Notify::Source) },
    Persona {
        fabric: Some("efa-direct"),
        more: true,
        completions: 32768,
        ..persona("efa-direct", &["efa"], Notify::Source)
    },
    persona("cxi", &["cxi"], Notify::Message),
    persona("psm3", &["psm3"], Notify::Message),
];

/// What is assumed of a provider that nothing is known of.
pub const UNKNOWN: Persona = persona("unknown", &[], Notify::Message);

/// The persona of that name, or [`UNKNOWN`].
pub fn find(name: &str) -> Persona {
    PERSONAS.into_iter().find(|persona| persona.name == name).unwrap_or(UNKNOWN)
}
