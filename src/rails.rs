//! Selects rails from the requested providers, and from named or nearby interfaces. Opens the
//! rails, and puts each under a guard.
//!
//! Setup only: it loads a library, allocates, and waits for the providers.

use std::ffi::CString;
use std::fmt;

use fishplate_core::mem::RailId;
use fishplate_sys::fabric::info::Info;
use fishplate_sys::fabric::negotiate::{self, Ask, NegotiateError, Offer, Rejected, Why};
use fishplate_sys::fabric::rail::SetupError;
use fishplate_sys::fabric::{FabricConfig, FabricRail, Library, LoadError};

use crate::config::Settings;
use crate::guard::{Guard, LinkWatch};
use crate::handlers::with_handlers_kept;
use crate::storage::Limits;
use crate::topology::{Anchor, LinkState, Machine, PciAddress};

/// Providers to try if none are named. Providers with hardware come first. libfabric's shared
/// memory is not in the list, because shared memory has its own rail.
pub const PROVIDERS: [&str; 7] =
    ["efa-direct", "efa", "verbs;ofi_rxm", "cxi", "psm3", "tcp", "tcp;ofi_rxm"];

/// The reason why no rails could be opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RailsError {
    /// libfabric could not be loaded.
    Load(LoadError),
    /// No requested provider is usable. There is one error for each provider.
    Provider(Vec<NegotiateError>),
    /// More rails were requested than there are interfaces.
    TooMany {
        /// The requested number of rails.
        rails: usize,
        /// The provider.
        provider: String,
        /// The named interfaces, or the available interfaces if none were named.
        there: Vec<String>,
        /// Whether the interfaces were named.
        named: bool,
        /// Interfaces that are used only if they are named, each with the reason.
        passed_over: Vec<(String, &'static str)>,
        /// [`Settings::max_rails`].
        limit: usize,
    },
    /// A rail could not be opened.
    Setup {
        /// The provider.
        provider: String,
        /// The interface.
        interface: String,
        /// The reason.
        error: SetupError,
    },
}

impl fmt::Display for RailsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RailsError::Load(error) => write!(f, "{error}; install libfabric, or set its path"),
            RailsError::Provider(errors) => {
                let is_missing =
                    |error: &NegotiateError| matches!(error, NegotiateError::NoProvider { .. });
                // The error of an existing provider explains more than the errors of absent
                // providers.
                let exists = errors.iter().any(|error| !is_missing(error));
                let errors = errors.iter().filter(|error| !(exists && is_missing(error)));
                for (at, error) in errors.enumerate() {
                    write!(f, "{}{error}", if at == 0 { "" } else { "; " })?;
                }
                Ok(())
            }
            RailsError::TooMany { rails, limit, .. } if rails > limit => {
                write!(f, "cannot open {rails} rails: the settings allow at most {limit}")
            }
            RailsError::TooMany { rails, provider, there, named, passed_over, .. } => {
                let (list, count) = (there.join(", "), there.len());
                let interfaces = if count == 1 { "interface" } else { "interfaces" };
                match named {
                    true => {
                        write!(f, "cannot open {rails} rails: {count} {interfaces} named: {list}")?
                    }
                    false => write!(
                        f,
                        "cannot open {rails} rails: provider {provider:?} has {count} \
                         {interfaces}: {list}"
                    )?,
                }
                for (at, (interface, why)) in passed_over.iter().enumerate() {
                    let before = if at == 0 { " (used only if named: " } else { "; " };
                    write!(f, "{before}{interface}, {why}")?;
                }
                if !passed_over.is_empty() {
                    write!(f, ")")?;
                }
                write!(f, "; use fewer rails, or name an interface once per rail")
            }
            RailsError::Setup { provider, interface, error } => {
                write!(f, "cannot open a rail of provider {provider:?} on {interface:?}: {error}")
            }
        }
    }
}

impl std::error::Error for RailsError {}

/// An open rail and its description.
#[derive(Debug)]
pub struct OpenRail {
    /// The rail.
    pub rail: Guard<FabricRail>,
    /// The provider's name, as requested.
    pub provider: String,
    /// The interface.
    pub interface: String,
    /// The provider's name for its fabric.
    pub fabric: String,
    /// Speed in megabits per second; 0 if unknown.
    pub mbit: u32,
    /// Whether the NIC can access device memory (`FI_HMEM`).
    pub devices: bool,
}

/// The rails that [`open`] looks for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Named providers and interfaces, and [`Settings::max_rails`].
    pub settings: &'a Settings,
    /// Numbers of peers and regions that each rail supports.
    pub limits: Limits,
    /// Location of the process, or of its device.
    pub anchor: Anchor,
    /// Number of rails. `None` opens one rail on each named or near interface.
    pub count: Option<usize>,
    /// Whether to prefer rails that can access device memory.
    pub devices: bool,
}

/// An interface of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The provider's name for the interface.
    pub interface: String,
    /// Index of the NIC in [`Machine::nics`], if known.
    pub nic: Option<usize>,
    /// Speed in megabits per second; 0 if unknown.
    pub mbit: u32,
    /// The reason why the interface is used only if it is named. `None` if it is also used without
    /// a name.
    pub passed_over: Option<&'static str>,
}

/// Loads the libfabric that the settings name.
///
/// # Errors
/// The library is missing or too old.
///
/// # Safety
/// The library that the settings name, or that the linker finds, is a libfabric. Its constructors
/// run, and its results are trusted.
pub unsafe fn load(settings: &Settings) -> Result<Library, LoadError> {
    let path =
        settings.library.as_ref().map(|path| CString::new(path.as_os_str().as_encoded_bytes()));
    let path = path.transpose().map_err(|_| LoadError::NotFound {
        path: settings.library.as_ref().map_or_else(String::new, |path| path.display().to_string()),
        reason: "a zero byte in the path".into(),
    })?;
    // SAFETY: our caller guarantees that the path names a libfabric.
    with_handlers_kept(|| unsafe { Library::open(path.as_deref()) })
}

/// Lists the interfaces of a provider, in the order that the provider reports.
///
/// # Errors
/// The provider is missing, or none of its endpoints is usable.
pub fn candidates(
    library: Library,
    machine: &Machine,
    provider: &str,
) -> Result<Vec<Candidate>, NegotiateError> {
    let ask = Ask::new(provider);
    let (offers, _) = negotiate::offers(library, &ask)?;
    if offers.is_empty() {
        // The list is empty. Negotiates only to return the error that explains the reason.
        negotiate::negotiate(library, &ask)?;
    }
    let mut found: Vec<Candidate> = vec![];
    for Offer { info, .. } in offers {
        let interface = info.domain_name();
        if found.iter().all(|candidate| candidate.interface != interface) {
            found.push(candidate(&info, interface, machine));
        }
    }
    let loopback_alone = found.iter().all(|candidate| candidate.interface == "lo");
    for candidate in &mut found {
        let down = candidate.nic.is_some_and(|nic| machine.nics[nic].link == LinkState::Down);
        candidate.passed_over = match candidate.interface.as_str() {
            "lo" if !loopback_alone => Some("loopback: reaches this host only"),
            _ if down => Some("no link"),
            _ => None,
        };
    }
    Ok(found)
}

fn candidate(info: &Info, interface: String, machine: &Machine) -> Candidate {
    let by_place = info.pci().and_then(|(domain, bus, device, function)| {
        let address = PciAddress { domain: domain.into(), bus, device, function };
        let is = |path: &crate::topology::PciPath| path.address() == address;
        machine.nics.iter().position(|nic| nic.path.as_ref().is_some_and(is))
    });
    // EFA appends the endpoint type to the device name.
    let plain = interface.strip_suffix("-rdm").unwrap_or(&interface);
    let nic = by_place.or_else(|| machine.nic(plain));
    let told = info.link_speed().map(|bits| (bits / 1_000_000).min(u64::from(u32::MAX)) as u32);
    let mbit = told.or_else(|| machine.nics[nic?].mbit).unwrap_or(0);
    Candidate { interface, nic, mbit, passed_over: None }
}

/// Selects the interfaces of a provider that a process should use: its share of the NICs. The NICs
/// nearest to the anchor come first, and interfaces that `machine` does not list come last. If
/// there are more equally near NICs than rails, [`Settings::local_rank`] selects some of them.
pub fn nearest(
    machine: &Machine,
    candidates: &[Candidate],
    anchor: Anchor,
    settings: &Settings,
    count: Option<usize>,
) -> Vec<Candidate> {
    let limit = settings.max_rails;
    let open: Vec<&Candidate> =
        candidates.iter().filter(|candidate| candidate.passed_over.is_none()).collect();
    let usable: Vec<usize> = open.iter().filter_map(|candidate| candidate.nic).collect();
    let chosen = match anchor {
        Anchor::Gpu(_) => machine.choose(&usable, anchor, limit),
        _ => {
            let mut near = machine.choose(&usable, anchor, usable.len());
            let rails = count.unwrap_or(limit).min(limit);
            if rails < near.len() {
                let local_rank = settings.local_rank.or_else(crate::job::local_rank).unwrap_or(0);
                let first = local_rank % near.len() * rails % near.len();
                near.rotate_left(first);
            }
            near.truncate(limit);
            near
        }
    };
    let of_nic = |nic: usize| open.iter().find(|candidate| candidate.nic == Some(nic));
    let near = chosen.iter().copied().filter_map(of_nic);
    let unknown = open.iter().filter(|candidate| candidate.nic.is_none());
    let mut best: Vec<&Candidate> = near.chain(unknown).copied().collect();
    if let Some(count) = count {
        let mut far: Vec<usize> = usable.into_iter().filter(|nic| !chosen.contains(nic)).collect();
        far.sort_by_key(|&nic| machine.distance(nic, anchor));
        best.extend(far.into_iter().filter_map(of_nic));
        best.truncate(count);
    }
    best.into_iter().take(limit).cloned().collect()
}

/// Maximum message length of a rail in bytes: a page, and room for the headers of the program and
/// the engine.
const MESSAGE: usize = 4096 + 512;

/// Opens rails of the first usable provider.
///
/// # Errors
/// No requested provider is usable, more rails are requested than there are interfaces, or a rail
/// cannot be opened.
pub fn open(
    wanted: Wanted<'_>,
    library: Library,
    machine: &Machine,
) -> Result<Vec<OpenRail>, RailsError> {
    let named: Vec<&str> = wanted.settings.providers.iter().map(String::as_str).collect();
    let providers = if named.is_empty() { &PROVIDERS[..] } else { &named[..] };
    let mut refused = vec![];
    for provider in providers {
        match on_provider(wanted, library, machine, provider)? {
            Ok(rails) => return Ok(rails),
            Err(error) => refused.push(error),
        }
    }
    Err(RailsError::Provider(refused))
}

/// Opens the rails of one provider. If the inner result is an error, the caller tries the next
/// provider.
fn on_provider(
    wanted: Wanted<'_>,
    library: Library,
    machine: &Machine,
    provider: &str,
) -> Result<Result<Vec<OpenRail>, NegotiateError>, RailsError> {
    let Wanted { settings, limits, anchor, count, .. } = wanted;
    let there = match candidates(library, machine, provider) {
        Ok(there) => there,
        Err(error) => return Ok(Err(error)),
    };
    let named = !settings.interfaces.is_empty();
    if !named && there.iter().all(|candidate| candidate.passed_over.is_some()) {
        return Ok(Err(unnamed(provider, there)));
    }
    let interfaces: Vec<String> = match named {
        true => settings.interfaces.clone(),
        false => {
            let near = nearest(machine, &there, anchor, settings, count);
            near.into_iter().map(|candidate| candidate.interface).collect()
        }
    };
    let count = count.unwrap_or(interfaces.len().clamp(1, settings.max_rails));
    if count > interfaces.len().min(settings.max_rails) {
        let (mut open, mut passed_over) = (vec![], vec![]);
        for Candidate { interface, passed_over: why, .. } in there {
            match why {
                None => open.push(interface),
                Some(why) => passed_over.push((interface, why)),
            }
        }
        if named {
            (open, passed_over) = (interfaces, vec![]);
        }
        let (provider, limit) = (provider.into(), settings.max_rails);
        return Err(RailsError::TooMany {
            rails: count,
            provider,
            there: open,
            named,
            passed_over,
            limit,
        });
    }
    let mut rails = vec![];
    for (at, interface) in interfaces.into_iter().take(count).enumerate() {
        let atomics = settings.native_atomics;
        let ask = Ask { interface: Some(&interface), atomics, ..Ask::new(provider) };
        let with_devices = || negotiate::negotiate(library, &Ask { devices: true, ..ask }).ok();
        let (offer, devices) = match wanted.devices.then(with_devices).flatten() {
            Some(offer) => (Ok(offer), true),
            None => (negotiate::negotiate(library, &ask), false),
        };
        let offer = match offer {
            Ok(offer) => offer,
            Err(error) => return Ok(Err(error)),
        };
        let config = FabricConfig {
            deadline: Some(settings.deadline),
            max_peers: limits.peers,
            max_regions: limits.locals,
            max_imports: limits.remotes.into(),
            max_message: MESSAGE,
            native_atomics: atomics,
            ..FabricConfig::default()
        };
        let rail = FabricRail::open(&offer, config).map_err(|error| RailsError::Setup {
            provider: provider.into(),
            interface: interface.clone(),
            error,
        })?;
        let mbit =
            there.iter().find(|candidate| candidate.interface == interface).map_or(0, |c| c.mbit);
        let rail = Guard::new(rail, RailId(at as u8), LinkWatch::new(&interface));
        let fabric = offer.info.fabric_name();
        rails.push(OpenRail { rail, provider: provider.into(), interface, fabric, mbit, devices });
    }
    Ok(Ok(rails))
}

/// Returns the error of a provider with interfaces that are used only if they are named.
fn unnamed(provider: &str, there: Vec<Candidate>) -> NegotiateError {
    let refuse = |Candidate { interface, passed_over, .. }| {
        passed_over.map(|why| Rejected {
            provider: provider.into(),
            interface,
            why: Why::Unnamed(why),
        })
    };
    let rejected = there.into_iter().filter_map(refuse).collect();
    NegotiateError::Refused { asked: provider.into(), rejected }
}

#[cfg(test)]
mod tests;
