//! Selects a provider's offer. Slow path.
//!
//! Takes the first available choice in this order:
//!
//! 1. completions of writes at `FI_DELIVERY_COMPLETE`, then `FI_TRANSMIT_COMPLETE`, then any;
//! 2. for each level `FI_PROGRESS_AUTO` with `FI_THREAD_DOMAIN`, then `FI_PROGRESS_MANUAL` with
//!    `FI_THREAD_DOMAIN`, then with `FI_THREAD_SAFE`.
//!
//! A rail has its own domain, which one thread at a time uses, so a provider needs no locks.
//! `FI_THREAD_COMPLETION` would allow the same, but with it `fi_cq_open` of libfabric 2.1 crashes
//! in the tcp provider if the queue has a wait object.
//!
//! The level determines only when a buffer may be reused and when an error is known. The engine's
//! acknowledgements make a write visible at its target, so `quiet` means the same at each level.
//! The owner of a rail must poll under either progress model. Under manual progress peers wait for
//! its polls.

use alloc::borrow::ToOwned;
use alloc::ffi::CString;
use alloc::string::String;
use alloc::vec::Vec;
use core::error::Error;
use core::ffi::{CStr, c_int};
use core::fmt;

use super::error::{CallError, Code};
use super::info::{Hints, Info};
use super::library::Library;
use super::persona::{self, Notify, Persona};
use super::raw::*;

/// Minimum usable `max_msg_size` in bytes: a message of 256 bytes and the headers.
const SHORTEST: usize = 256 + 16;

const MR_MODES: i32 =
    FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;

const MODES: u64 = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;

const CAPS: u64 =
    FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

/// The progress model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The provider makes progress (`FI_PROGRESS_AUTO`).
    Auto,
    /// Polls make progress (`FI_PROGRESS_MANUAL`).
    Manual,
}

/// Progress and threading models, best first.
const MODELS: [(Progress, c_int); 3] = [
    (Progress::Auto, FI_THREAD_DOMAIN),
    (Progress::Manual, FI_THREAD_DOMAIN),
    (Progress::Manual, FI_THREAD_SAFE),
];

/// The completion level of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The write has arrived (`FI_DELIVERY_COMPLETE`).
    Delivery,
    /// The fabric has accepted the write (`FI_TRANSMIT_COMPLETE`).
    Transmit,
    /// Unspecified: the provider's default.
    Whatever,
}

impl Level {
    /// Returns the level as an operation flag.
    pub fn flag(self) -> u64 {
        match self {
            Level::Delivery => FI_DELIVERY_COMPLETE,
            Level::Transmit => FI_TRANSMIT_COMPLETE,
            Level::Whatever => 0,
        }
    }
}

/// Returns the `mr_mode` bits of a request. With device memory a provider may require `FI_MR_HMEM`.
fn mr_modes(ask: &Ask<'_>) -> i32 {
    if ask.devices { MR_MODES | FI_MR_HMEM } else { MR_MODES }
}

/// A request for an offer.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The name of a [`Persona`], or of a libfabric provider without one.
    pub provider: &'a str,
    /// The name of a domain: an interface or a device.
    pub interface: Option<&'a str>,
    /// The local address to bind, as a host name or a numeric address.
    pub source: Option<&'a CStr>,
    /// Required progress model, or `None` for any.
    pub progress: Option<Progress>,
    /// Required completion level, or `None` for any.
    pub level: Option<Level>,
    /// Required way to learn the sender of a write, or `None` for any.
    pub notify: Option<Notify>,
    /// Whether atomics (`FI_ATOMIC`) are required.
    pub atomics: bool,
    /// Whether device memory (`FI_HMEM`) is required.
    pub devices: bool,
}

impl<'a> Ask<'a> {
    /// Creates a request for any offer of a provider.
    pub const fn new(provider: &'a str) -> Ask<'a> {
        Ask {
            provider,
            interface: None,
            source: None,
            progress: None,
            level: None,
            notify: None,
            atomics: false,
            devices: false,
        }
    }
}

/// An accepted offer.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The `fi_info` of the offer.
    pub info: Info,
    /// Known facts about the provider.
    pub persona: Persona,
    /// The progress model of the offer.
    pub progress: Progress,
    /// The completion level of writes.
    pub level: Level,
    /// How targets learn the sender of a write.
    pub notify: Notify,
}

impl Offer {
    /// Returns whether this version of the provider [frees reads
    /// twice](Persona::frees_reads_twice).
    pub fn frees_reads_twice(&self) -> bool {
        self.persona.frees_reads_twice.contains(&self.info.provider_version())
    }
}

/// Why an offer was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The offer is from another provider, layered below or above the requested provider.
    Provider,
    /// The offer is for another fabric of the provider.
    Fabric,
    /// The offer is for another interface.
    Interface,
    /// The offer does not have the requested progress model.
    Progress,
    /// The offer lacks these capabilities.
    Caps(u64),
    /// The offer requires these unsupported modes.
    Mode(u64),
    /// The offer requires these unsupported registration modes.
    MrMode(i32),
    /// The offer has only this many bytes of completion data; 4 are needed.
    CqData(usize),
    /// The offer's maximum message length is this many bytes, which is too short.
    MaxMessage(usize),
    /// The target cannot learn the sender of a write.
    Notify,
    /// The caller uses the interface only if it is named, for this reason.
    Unnamed(&'static str),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Provider => write!(f, "not the requested provider"),
            Why::Fabric => write!(f, "not the requested fabric of the provider"),
            Why::Interface => write!(f, "not the requested interface"),
            Why::Progress => write!(f, "not the requested progress model"),
            Why::Caps(bits) => write!(f, "lacks the capabilities {bits:#x}"),
            Why::Mode(bits) => write!(f, "requires the unsupported modes {bits:#x}"),
            Why::MrMode(bits) => write!(f, "requires the unsupported registration modes {bits:#x}"),
            Why::CqData(size) => write!(f, "only {size} bytes of completion data; 4 are needed"),
            Why::MaxMessage(size) => {
                write!(f, "messages of at most {size} bytes; at least {SHORTEST} are needed")
            }
            Why::Notify => write!(f, "does not report the sender of a write"),
            Why::Unnamed(why) => write!(f, "used only if named, {why}"),
        }
    }
}

/// A rejected offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The provider of the offer.
    pub provider: String,
    /// The domain of the offer.
    pub interface: String,
    /// Why the offer was rejected.
    pub why: Why,
}

/// Why there is no offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NegotiateError {
    /// The library has no such provider.
    NoProvider {
        /// The requested provider.
        asked: String,
        /// The available providers.
        there: Vec<String>,
    },
    /// The provider has no such interface.
    NoInterface {
        /// The requested interface.
        asked: String,
        /// The requested provider.
        provider: String,
        /// The available interfaces.
        there: Vec<String>,
    },
    /// The provider exists, but none of its offers is usable.
    Refused {
        /// The requested provider.
        asked: String,
        /// The rejected offers, with the reasons.
        rejected: Vec<Rejected>,
    },
    /// A requested name contains a zero byte.
    BadName,
    /// A library call failed.
    Call(CallError),
}

impl From<CallError> for NegotiateError {
    fn from(error: CallError) -> Self {
        NegotiateError::Call(error)
    }
}

impl fmt::Display for NegotiateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NegotiateError::NoProvider { asked, there } => {
                write!(f, "libfabric has no provider {asked:?}; available: {}", there.join(", "))
            }
            NegotiateError::NoInterface { asked, provider, there } => {
                write!(
                    f,
                    "provider {provider:?} has no interface {asked:?}; available: {}",
                    there.join(", ")
                )
            }
            NegotiateError::Refused { asked, rejected } => {
                write!(f, "no offer of provider {asked:?} is usable")?;
                for Rejected { provider, interface, why } in rejected {
                    write!(f, "; {provider} on {interface}: {why}")?;
                }
                Ok(())
            }
            NegotiateError::BadName => {
                write!(f, "the name of a provider or interface contains a zero byte")
            }
            NegotiateError::Call(error) => write!(f, "{error}"),
        }
    }
}

impl Error for NegotiateError {}

/// Lists a library's providers with reliable datagram endpoints, by name and without duplicates. A
/// request may still reject some of them.
///
/// # Errors
/// The call of libfabric failed.
pub fn providers(library: Library) -> Result<Vec<String>, CallError> {
    let mut hints = Hints::new(library)?;
    hints.set_endpoint_type(FI_EP_RDM);
    hints.set_mode(u64::MAX);
    hints.set_mr_mode(MR_MODES);
    let mut names = Vec::new();
    for info in found(library.getinfo(None, None, 0, &hints))? {
        let name = info.provider();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(askable(names))
}

/// Returns the names that a request may use. A layered provider such as `tcp;ofi_rxm` adds the name
/// of its lowest layer.
fn askable(names: Vec<String>) -> Vec<String> {
    let mut all = Vec::<String>::new();
    for name in names {
        let lowest = name.split(';').next().map(str::to_owned);
        for name in lowest.into_iter().chain([name]) {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    }
    all
}

/// Lists the interfaces of a provider, without duplicates.
///
/// # Errors
/// The errors of [`negotiate`].
pub fn interfaces(library: Library, provider: &str) -> Result<Vec<String>, NegotiateError> {
    let mut names = Vec::new();
    let ask = Ask::new(provider);
    for offer in offers(library, &ask)?.0 {
        let name = offer.info.domain_name();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

/// Returns the best usable offer.
///
/// # Errors
/// There is no usable offer. The error names the request and the alternatives.
pub fn negotiate(library: Library, ask: &Ask<'_>) -> Result<Offer, NegotiateError> {
    let (mut accepted, rejected) = offers(library, ask)?;
    if !accepted.is_empty() {
        return Ok(accepted.swap_remove(0));
    }
    let asked = ask.provider.to_owned();
    if rejected.iter().all(|offer| offer.why == Why::Provider) {
        return Err(NegotiateError::NoProvider { asked, there: providers(library)? });
    }
    if let Some(interface) = ask.interface
        && rejected
            .iter()
            .all(|offer| matches!(offer.why, Why::Provider | Why::Interface | Why::Fabric))
    {
        let there = interfaces(library, ask.provider)?;
        return Err(NegotiateError::NoInterface {
            asked: interface.to_owned(),
            provider: asked,
            there,
        });
    }
    Err(NegotiateError::Refused { asked, rejected })
}

/// Returns all usable offers, best first, and all rejected offers, without duplicates.
///
/// # Errors
/// A library call failed, or a name contains a zero byte.
pub fn offers(
    library: Library,
    ask: &Ask<'_>,
) -> Result<(Vec<Offer>, Vec<Rejected>), NegotiateError> {
    let mut persona = persona::find(ask.provider);
    let own = [ask.provider];
    let names: &[&str] = if persona.providers.is_empty() { &own } else { persona.providers };
    if let Some(notify) = ask.notify {
        persona.notify = notify;
    }
    let mut rejected: Vec<Rejected> = Vec::new();
    for level in [Level::Delivery, Level::Transmit, Level::Whatever] {
        for (progress, threading) in MODELS {
            if ask.level.is_some_and(|only| only != level)
                || ask.progress.is_some_and(|only| only != progress)
            {
                continue;
            }
            let mut accepted = Vec::new();
            for name in names {
                let text = CString::new(*name).map_err(|_| NegotiateError::BadName)?;
                let hints = hints(library, &text, ask, &persona, (progress, threading), level)?;
                let flags = if ask.source.is_some() { FI_SOURCE } else { 0 };
                for info in found(library.getinfo(ask.source, None, flags, &hints))? {
                    match judge(&info, name, ask, &persona, progress) {
                        Ok(notify) => {
                            accepted.push(Offer { info, persona, progress, level, notify })
                        }
                        Err(why) => {
                            let (provider, interface) = (info.provider(), info.domain_name());
                            let no = Rejected { provider, interface, why };
                            if !rejected.contains(&no) {
                                rejected.push(no);
                            }
                        }
                    }
                }
            }
            if !accepted.is_empty() {
                // Prefer an interface's IPv4 address: a link-local IPv6 address is not routable
                // without a scope.
                accepted.sort_by_key(|offer| offer.info.raw().addr_format == FI_SOCKADDR_IN6);
                return Ok((accepted, rejected));
            }
        }
    }
    Ok((Vec::new(), rejected))
}

fn found(list: Result<Vec<Info>, CallError>) -> Result<Vec<Info>, CallError> {
    match list {
        Err(CallError { code: Code::ENODATA, .. }) => Ok(Vec::new()),
        other => other,
    }
}

fn hints(
    library: Library,
    name: &CStr,
    ask: &Ask<'_>,
    persona: &Persona,
    (progress, threading): (Progress, c_int),
    level: Level,
) -> Result<Hints, CallError> {
    let data = match progress {
        Progress::Auto => FI_PROGRESS_AUTO,
        Progress::Manual => FI_PROGRESS_MANUAL,
    };
    let mut hints = Hints::new(library)?;
    hints.set_provider(name);
    hints.set_caps(wanted(ask, persona));
    hints.set_mode(MODES);
    hints.set_endpoint_type(FI_EP_RDM);
    hints.set_op_flags(level.flag());
    hints.set_mr_mode(mr_modes(ask));
    hints.set_data_progress(data);
    hints.set_threading(threading);
    hints.set_resource_mgmt(FI_RM_ENABLED);
    Ok(hints)
}

fn wanted(ask: &Ask<'_>, persona: &Persona) -> u64 {
    let mut caps = CAPS;
    if persona.notify == Notify::Source {
        caps |= FI_SOURCE;
    }
    if ask.atomics {
        caps |= FI_ATOMIC;
    }
    if ask.devices {
        caps |= FI_HMEM;
    }
    caps
}

fn judge(
    info: &Info,
    name: &str,
    ask: &Ask<'_>,
    persona: &Persona,
    progress: Progress,
) -> Result<Notify, Why> {
    if info.provider() != name {
        return Err(Why::Provider);
    }
    if persona.fabric.is_some_and(|fabric| fabric != info.fabric_name()) {
        return Err(Why::Fabric);
    }
    if ask.interface.is_some_and(|interface| interface != info.domain_name()) {
        return Err(Why::Interface);
    }
    let domain = info.domain();
    let offered = match domain.data_progress {
        FI_PROGRESS_AUTO => Progress::Auto,
        _ => Progress::Manual,
    };
    // Automatic progress satisfies a request for manual progress, but not the reverse.
    if progress == Progress::Auto && offered != Progress::Auto {
        return Err(Why::Progress);
    }
    let raw = info.raw();
    let lacking = wanted(ask, persona) & !raw.caps;
    if lacking != 0 {
        return Err(Why::Caps(lacking));
    }
    let mode = raw.mode & !MODES;
    if mode != 0 {
        return Err(Why::Mode(mode));
    }
    let mr_mode = domain.mr_mode & !mr_modes(ask);
    if mr_mode != 0 {
        return Err(Why::MrMode(mr_mode));
    }
    if info.ep().max_msg_size < SHORTEST {
        return Err(Why::MaxMessage(info.ep().max_msg_size));
    }
    match persona.notify {
        Notify::Word if domain.cq_data_size >= 8 => Ok(Notify::Word),
        Notify::Source if domain.cq_data_size < 4 => Err(Why::CqData(domain.cq_data_size)),
        Notify::Source => Ok(Notify::Source),
        // The message that carries the word has 12 bytes. The provider must be able to inject it.
        _ if info.tx().inject_size >= 12 => Ok(Notify::Message),
        _ => Err(Why::Notify),
    }
}
