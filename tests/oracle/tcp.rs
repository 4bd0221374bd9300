//! Runs the programs over libfabric's tcp on the loopback interface, with one rail and with two.

use std::ffi::CString;
use std::time::Duration;

use fishplate::core::engine::Config;
use fishplate::core::mem::Peer;
use fishplate::sys::fabric::{Ask, FabricConfig, FabricRail, Library, negotiate};

use crate::programs;
use crate::rig::{CONFIG, Pair, Room};

/// Settings of the rails. The timeouts are long enough for a loaded machine, because no process
/// dies here.
const FABRIC: FabricConfig = FabricConfig {
    max_peers: 1,
    max_message: 1024,
    depth: 32,
    receives: 64,
    bounces: 8,
    max_regions: 8,
    max_imports: 16,
    completions: 0,
    deadline: Some(Duration::from_secs(60)),
    inject: true,
    more: None,
    native_atomics: false,
    seed: None,
};

fn rail(library: Library, seed: u64) -> FabricRail {
    let ask = Ask { interface: Some("lo"), ..Ask::new("tcp") };
    let offer = negotiate(library, &ask).unwrap_or_else(|error| panic!("{error}"));
    let config = FabricConfig { seed: Some(seed), ..FABRIC };
    FabricRail::open(&offer, config).unwrap_or_else(|error| panic!("{error}"))
}

fn pair<'m, const RAILS: usize>(
    library: &Library,
    group: u64,
    room: &'m mut Room<RAILS>,
) -> Pair<'m, FabricRail, RAILS> {
    let mut ends = [0, 1].map(|end| {
        std::array::from_fn::<_, RAILS, _>(|at| rail(*library, group << 8 | (at as u64) << 1 | end))
    });
    let [near, far] = &mut ends;
    for (one, other) in near.iter_mut().zip(far) {
        let addresses = [one.address().unwrap(), other.address().unwrap()];
        one.attach(Peer(0), &addresses[1]).unwrap();
        other.attach(Peer(0), &addresses[0]).unwrap();
    }
    let engine = Config { stripe_threshold: 512, stripe_chunk: 256, ..CONFIG };
    Pair::new(room, engine, ends, None)
}

fn over<const RAILS: usize>(name: &str, usual: u64) {
    let path = std::env::var("FISHPLATE_LIBFABRIC").ok().and_then(|path| CString::new(path).ok());
    // SAFETY: the loader's default libfabric, or the one that `FISHPLATE_LIBFABRIC` names, is a
    // libfabric.
    match unsafe { Library::open(path.as_deref()) } {
        Ok(library) => programs::<_, RAILS>(name, usual, |group, room| pair(&library, group, room)),
        Err(why) => println!("SKIPPED {name}: {why}"),
    }
}

#[test]
fn memory_is_what_the_contract_allows_over_tcp() {
    over::<1>("tcp", 250);
}

#[test]
fn memory_is_what_the_contract_allows_over_two_rails_of_tcp() {
    over::<2>("two rails of tcp", 250);
}
