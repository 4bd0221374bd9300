//! Facts about providers that they do not report themselves.
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
//! Only `tcp` can fence a peer ([`Rail::fence`](fishplate_core::rail::Rail::fence)): closing an
//! endpoint closes its connections, and only this process writes to its memory. For `tcp;ofi_rxm` a
//! close would also work, but libfabric 1.17 crashes in 1 of 14 closes during writes. With `shm`,
//! peers write directly to memory of this process. The other providers were never tested on
//! hardware.
//!
//! Personas tested on fake tables follow manuals and sources.

/// How the target of a write with data learns the sender. The engine uses four bytes of the data,
/// which do not name a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The data has 8 bytes. The upper half is the signature of the sender's rail.
    Word,
    /// The provider reports the source address of each completion.
    Source,
    /// The write carries no data, and a message with the completion word follows it. If the
    /// provider orders messages behind writes (`FI_ORDER_SAW`), the message follows at once.
    /// Otherwise it follows when the write is complete at the target.
    Message,
}

/// Facts about one provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Persona {
    /// The name that requests use.
    pub name: &'static str,
    /// Names that the provider reports, the preferred name first.
    pub providers: &'static [&'static str],
    /// The required fabric, if the provider has several.
    pub fabric: Option<&'static str>,
    /// The preferred way for a target to identify a write's sender. Negotiation may fall back to
    /// [`Notify::Message`].
    pub notify: Notify,
    /// Whether each write must carry its completion level, because the provider ignores the
    /// endpoint's level. `net` forwards writes to an inner endpoint without the level.
    pub forgets_level: bool,
    /// Whether batching with `FI_MORE` saves doorbells.
    pub more: bool,
    /// Whether closing an endpoint ends all arrivals at once.
    pub fences: bool,
    /// Whether the provider's addresses are TCP addresses at which it listens.
    pub listens: bool,
    /// Versions of the provider that free their record of a read twice if the endpoint is closed
    /// while the data arrives. Records belong to the domain. A double free damages the domain: two
    /// operations may get the same record.
    pub frees_reads_twice: &'static [(u32, u32)],
    /// Requested depth of the completion queue. If the provider may overrun the queue, this depth
    /// is the only bound on outstanding completions.
    pub completions: usize,
    /// Maximum length of one write or read in bytes. Longer transfers are split. With one long
    /// write, sender and receiver of a socket wait for each other in turn. Several shorter writes
    /// overlap.
    pub max_rma: usize,
}

const fn persona(
    name: &'static str,
    providers: &'static [&'static str],
    notify: Notify,
) -> Persona {
    Persona {
        name,
        providers,
        fabric: None,
        notify,
        forgets_level: false,
        more: false,
        fences: false,
        listens: false,
        frees_reads_twice: &[],
        completions: 4096,
        max_rma: 1 << 30,
    }
}

/// All personas.
pub const PERSONAS: [Persona; 8] = [
    Persona {
        forgets_level: true,
        fences: true,
        listens: true,
        // `net` of libfabric 1.17.0. libfabric's pull request 8660 corrects this in 1.17.1.
        frees_reads_twice: &[(117, 0)],
        max_rma: 768 << 10,
        ..persona("tcp", &["tcp", "net"], Notify::Word)
    },
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

/// The persona of an unknown provider, with cautious assumptions.
pub const UNKNOWN: Persona = persona("unknown", &[], Notify::Message);

/// Returns the persona of this name, or [`UNKNOWN`].
pub fn find(name: &str) -> Persona {
    PERSONAS.into_iter().find(|persona| persona.name == name).unwrap_or(UNKNOWN)
}
