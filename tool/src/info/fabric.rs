//! Describes libfabric on this machine: its providers, the interfaces with their distances, the
//! negotiated attributes, and why offers are rejected.

use fishplate::config::Settings;
use fishplate::rails::{self, Candidate};
use fishplate::topology::{Anchor, LinkState, Machine};
use fishplate_core::engine::{Pairing, Parked, PeerSlot, RemoteSlot, Stream};
use fishplate_core::op::AmoSet;
use fishplate_core::rail::Rail;
use fishplate_sys::fabric::negotiate::{self, Level, Offer, Progress};
use fishplate_sys::fabric::persona::Notify;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, Library, raw};
use serde_json::{Map, Value, json};

/// Number of rails that the reported memory per peer assumes.
const RAILS: usize = 4;

pub fn gather(settings: &Settings, machine: &Machine) -> Value {
    // SAFETY: the library comes from the linker's search path, or from a path that the user names
    // as libfabric.
    let library = match unsafe { rails::load(settings) } {
        Ok(library) => library,
        Err(error) => return json!({ "usable": error.to_string() }),
    };
    let (major, minor) = library.version();
    let names = match negotiate::providers(library) {
        Ok(names) => names,
        Err(error) => return json!({ "usable": error.to_string() }),
    };
    let asked: Vec<&str> = match settings.providers.is_empty() {
        true => rails::PROVIDERS.iter().copied().chain(["shm"]).collect(),
        false => settings.providers.iter().map(String::as_str).collect(),
    };
    let anchor = Anchor::here();
    let providers: Vec<(String, Value)> = asked
        .into_iter()
        .map(|name| (name.to_owned(), provider(library, machine, anchor, settings, name)))
        .collect();
    let rails = providers.iter().find_map(|(name, told)| rails_of(name, told));
    let providers: Map<String, Value> = providers.into_iter().collect();
    json!({
        "usable": "usable",
        "rails": rails,
        "version": format!("{major}.{minor}"),
        "providers_in_library": names.join(", "),
        "providers": providers,
    })
}

/// Describes the rails that a node opens with this provider. Returns `None` if the provider is not
/// usable.
fn rails_of(name: &str, told: &Value) -> Option<String> {
    let interfaces =
        told["interfaces"].as_object().filter(|_| name != "shm" && told["usable"] == "usable")?;
    let taken = interfaces.iter().filter(|(_, interface)| interface["rail"] == "taken");
    let taken: Vec<&str> = taken.map(|(name, _)| name.as_str()).collect();
    (!taken.is_empty()).then(|| format!("{name} on {}", taken.join(", ")))
}

fn provider(
    library: Library,
    machine: &Machine,
    anchor: Anchor,
    settings: &Settings,
    name: &str,
) -> Value {
    let candidates = match rails::candidates(library, machine, name) {
        Ok(candidates) => candidates,
        Err(error) => return json!({ "usable": error.to_string() }),
    };
    let chosen = rails::nearest(machine, &candidates, anchor, settings, None);
    let interfaces: Map<String, Value> = candidates
        .iter()
        .map(|candidate| {
            let taken = match settings.interfaces.is_empty() {
                true => chosen.contains(candidate),
                false => settings.interfaces.contains(&candidate.interface),
            };
            (candidate.interface.clone(), interface(machine, anchor, candidate, taken))
        })
        .collect();
    let mut told = Map::new();
    told.insert("usable".into(), "usable".into());
    told.insert("interfaces".into(), interfaces.into());
    match negotiate::offers(library, &Ask::new(name)) {
        Ok((offers, rejected)) => {
            if let Some(offer) = offers.first() {
                told.insert("negotiated".into(), negotiated(offer));
            }
            let ask = Ask { devices: true, ..Ask::new(name) };
            told.insert("device_memory".into(), negotiate::negotiate(library, &ask).is_ok().into());
            told.insert("atomics".into(), atomics(library, name).into());
            let why = |no: &negotiate::Rejected| {
                (format!("{} on {}", no.provider, no.interface), Value::from(no.why.to_string()))
            };
            let rejected: Map<String, Value> = rejected.iter().map(why).collect();
            told.insert("rejected".into(), rejected.into());
        }
        Err(error) => {
            told.insert("negotiated".into(), error.to_string().into());
        }
    }
    told.into()
}

/// Lists the atomics that the provider executes itself in regions with native atomics. The engine
/// executes all other atomics.
fn atomics(library: Library, name: &str) -> String {
    let config = FabricConfig { native_atomics: true, ..FabricConfig::default() };
    let offer = negotiate::negotiate(library, &Ask { atomics: true, ..Ask::new(name) }).ok();
    let rail = offer.and_then(|offer| FabricRail::open(&offer, config).ok());
    rail.map_or(AmoSet::NONE, |rail| rail.caps().native_atomics).to_string()
}

fn interface(machine: &Machine, anchor: Anchor, candidate: &Candidate, taken: bool) -> Value {
    let rail = match (taken, candidate.passed_over) {
        (true, _) => "taken".to_owned(),
        (false, Some(why)) => format!("skipped: {why}"),
        (false, None) => "not used: other interfaces are nearer, or sufficient".to_owned(),
    };
    let Some(nic) = candidate.nic.map(|nic| (nic, &machine.nics[nic])) else {
        return json!({ "rail": rail, "mbit": candidate.mbit, "nic": "unknown to /sys" });
    };
    let link = match nic.1.link {
        LinkState::Up => "up",
        LinkState::Down => "down",
        LinkState::Unknown => "unknown",
    };
    json!({
        "rail": rail,
        "mbit": candidate.mbit,
        "link": link,
        "pci": nic.1.path.as_ref().map(ToString::to_string),
        "node": nic.1.node,
        "distance": machine.distance(nic.0, anchor).name(),
        "distance_to_gpus": gpus(machine, nic.0),
    })
}

fn gpus(machine: &Machine, nic: usize) -> Value {
    let distance = |gpu: &fishplate::topology::Gpu| {
        let distance = machine.distance(nic, Anchor::Gpu(gpu.address));
        (gpu.address.to_string(), Value::from(distance.name()))
    };
    Value::Object(machine.gpus.iter().map(distance).collect())
}

fn negotiated(offer: &Offer) -> Value {
    let info = &offer.info;
    let progress = match offer.progress {
        Progress::Auto => "FI_PROGRESS_AUTO",
        Progress::Manual => "FI_PROGRESS_MANUAL",
    };
    let threading = match info.domain().threading {
        raw::FI_THREAD_DOMAIN => "FI_THREAD_DOMAIN",
        raw::FI_THREAD_SAFE => "FI_THREAD_SAFE",
        _ => "another",
    };
    let (major, minor) = info.provider_version();
    let completion = match offer.level {
        Level::Delivery => "FI_DELIVERY_COMPLETE",
        Level::Transmit => "FI_TRANSMIT_COMPLETE",
        Level::Whatever => "as the provider reports it",
    };
    let origin = match offer.notify {
        Notify::Word => "number in the data of a write",
        Notify::Source => "source of a completion",
        Notify::Message => "message behind a write",
    };
    let mut told = json!({
        "provider": info.provider(),
        "provider_version": format!("{major}.{minor}"),
        "persona": offer.persona.name,
        "progress": progress,
        "threading": threading,
        "writes_complete_at": completion,
        "origin_of_writes_by": origin,
        "inject_bytes": info.tx().inject_size,
        "cq_data_bytes": info.domain().cq_data_size,
        "mr_mode": format!("{:#x}", info.domain().mr_mode),
    });
    let opened: Option<Vec<FabricRail>> =
        (0..RAILS).map(|_| FabricRail::open(offer, FabricConfig::default()).ok()).collect();
    if let (Some(rails), Some(told)) = (opened, told.as_object_mut()) {
        let caps = rails[0].caps();
        told.insert("message_bytes".into(), caps.max_message.into());
        told.insert("posts_outstanding".into(), caps.depth.into());
        told.insert("rail_bytes".into(), rails[0].memory().0.into());
        let of_rails: usize = rails.iter().map(|rail| rail.memory().1).sum();
        told.insert(
            "bytes_per_peer_with_4_rails".into(),
            per_peer(&Settings::DEFAULT, of_rails).into(),
        );
    }
    told
}

/// Returns the memory that an engine and its rails need for each peer, in bytes. Assumes one
/// imported region per peer.
pub fn per_peer(settings: &Settings, of_rails: usize) -> usize {
    let streams = usize::from(settings.contexts);
    let config = settings.engine(0).unwrap_or_default();
    let stream = size_of::<Stream>() + config.window as usize * size_of::<Parked>();
    let bitmaps = config.bitmap_words(1) * size_of::<u64>();
    size_of::<PeerSlot>()
        + size_of::<Pairing>()
        + streams * (stream + bitmaps)
        + size_of::<RemoteSlot<RAILS>>()
        + of_rails
}
