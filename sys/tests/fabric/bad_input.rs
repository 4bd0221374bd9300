//! Invalid input: a missing library, a file that is not a library, unknown providers and
//! interfaces, configuration out of range, malformed addresses, and addresses of another kind of
//! rail.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote};
use fishplate_sys::fabric::negotiate::{self, NegotiateError, Progress, Why};
use fishplate_sys::fabric::persona::Notify;
use fishplate_sys::fabric::rail::SetupError;
use fishplate_sys::fabric::{
    Ask, FabricConfig, FabricRail, Library, LoadError, negotiate as choose,
};

use crate::conformance::Seen;
use crate::fence::Fence;
use crate::support::{self, SMALL};

/// The table that [`AttachError::Full`] names if a peer number is out of range or taken.
const TAKEN: &str = "FabricConfig::max_peers, or the peer is attached already";

macro_rules! needs_library {
    ($test:literal) => {
        if let Some(why) = support::absent() {
            return println!("SKIPPED {}: {why}", $test);
        }
    };
}

#[test]
fn a_missing_library_is_named() {
    // SAFETY: the file does not exist, so nothing is loaded.
    let error = unsafe { Library::open(Some(c"/nowhere/libfabric.so.1")) }.unwrap_err();
    assert!(
        matches!(&error, LoadError::NotFound { path, .. } if path == "/nowhere/libfabric.so.1"),
        "{error:?}"
    );
    assert!(error.to_string().contains("/nowhere/libfabric.so.1"), "{error}");
}

#[test]
fn something_else_than_libfabric_is_refused() {
    // SAFETY: the C library is already loaded, so no initializer runs.
    let error = unsafe { Library::open(Some(c"libc.so.6")) }.unwrap_err();
    assert!(matches!(error, LoadError::NoSymbol { symbol: "fi_getinfo", .. }), "{error:?}");
}

#[test]
fn versions_below_the_oldest_are_refused_and_above_the_newest_not_asked_for() {
    needs_library!("versions");
    let library = support::library();
    assert!(library.version() >= Library::OLDEST);
    let asked = library.api_version();
    assert!((asked >> 16, asked & 0xffff) <= Library::NEWEST.min(library.version()));
}

#[test]
fn an_unknown_provider_is_answered_with_what_there_is() {
    needs_library!("an_unknown_provider");
    let error = choose(support::library(), &Ask::new("carrier-pigeon")).unwrap_err();
    let NegotiateError::NoProvider { asked, there } = &error else { panic!("{error:?}") };
    assert_eq!(asked, "carrier-pigeon");
    assert!(there.iter().any(|name| name == "shm"), "{there:?}");
    assert!(
        error.to_string().contains("carrier-pigeon") && error.to_string().contains("shm"),
        "{error}"
    );
    let error = choose(support::library(), &Ask::new("a\0b")).unwrap_err();
    assert_eq!(error, NegotiateError::BadName);
}

#[test]
fn hardware_that_is_not_there_is_answered_likewise() {
    needs_library!("hardware");
    for provider in ["efa-direct", "cxi", "verbs;ofi_rxm", "psm3"] {
        match choose(support::library(), &Ask::new(provider)) {
            // This machine has the provider.
            Ok(offer) => assert_eq!(offer.persona.name, provider),
            Err(error) => assert!(error.to_string().contains(provider), "{provider}: {error}"),
        }
    }
}

#[test]
fn an_unknown_interface_is_answered_with_what_there_is() {
    needs_library!("an_unknown_interface");
    for provider in ["tcp", "tcp;ofi_rxm"] {
        let ask = Ask { interface: Some("eth99"), ..Ask::new(provider) };
        let error = choose(support::library(), &ask).unwrap_err();
        let NegotiateError::NoInterface { asked, there, .. } = &error else { panic!("{error:?}") };
        assert_eq!(asked, "eth99");
        assert!(there.iter().any(|name| name == "lo"), "{there:?}");
        assert!(error.to_string().contains("eth99") && error.to_string().contains("lo"), "{error}");
    }
}

#[test]
fn offers_are_refused_with_a_reason_and_another_provider_is_never_taken() {
    needs_library!("offers");
    let library = support::library();
    for provider in ["tcp", "tcp;ofi_rxm", "shm"] {
        let (accepted, rejected) = negotiate::offers(library, &Ask::new(provider)).unwrap();
        assert!(!accepted.is_empty(), "{provider}");
        for offer in &accepted {
            let name = offer.info.provider();
            assert!(offer.persona.providers.contains(&name.as_str()), "{provider}: {name}");
        }
        assert!(rejected.iter().all(|no| !no.why.to_string().is_empty()));
    }
    // libfabric 1.x layers tcp under rxm to offer reliable datagrams. The plain provider is
    // rejected.
    if library.version() < (2, 0) {
        let (_, rejected) = negotiate::offers(library, &Ask::new("tcp")).unwrap();
        assert!(
            rejected.iter().any(|no| no.why == Why::Provider && no.provider == "tcp;ofi_rxm"),
            "{rejected:?}"
        );
    }
    // shm does not support automatic progress.
    let ask = Ask { progress: Some(Progress::Auto), ..Ask::new("shm") };
    assert!(choose(library, &ask).is_err());
    assert_eq!(choose(library, &Ask::new("shm")).unwrap().progress, Progress::Manual);
}

#[test]
fn configuration_out_of_range_is_refused() {
    needs_library!("configuration");
    let offer = choose(support::library(), &Ask::new("shm")).unwrap();
    let bad = [
        FabricConfig { max_peers: 0, ..SMALL },
        FabricConfig { max_message: 255, ..SMALL },
        FabricConfig { depth: 0, ..SMALL },
        FabricConfig { receives: 1 << 20, ..SMALL },
        FabricConfig { bounces: 0, ..SMALL },
        FabricConfig { max_regions: 0, ..SMALL },
        FabricConfig { max_imports: 0, ..SMALL },
        FabricConfig { completions: 1 << 30, ..SMALL },
    ];
    for config in bad {
        assert!(
            matches!(FabricRail::open(&offer, config), Err(SetupError::Config(_))),
            "{config:?}"
        );
    }
}

#[test]
fn addresses_that_are_none_attach_nobody() {
    needs_library!("addresses");
    let (mut a, b) =
        (support::open(&Ask::new("shm"), SMALL, 1), support::open(&Ask::new("shm"), SMALL, 2));
    let good = b.address().unwrap();
    for len in 0..17 {
        assert_eq!(
            a.attach(Peer(0), &good[..len.min(16)]),
            Err(AttachError::BadHandle),
            "{len} bytes"
        );
    }
    let mut changed = good.clone();
    changed[0] ^= 1;
    assert_eq!(a.attach(Peer(0), &changed), Err(AttachError::BadHandle));
    changed = good.clone();
    changed[4] = 9;
    assert_eq!(a.attach(Peer(0), &changed), Err(AttachError::Version { theirs: 9, ours: 1 }));
    changed = good.clone();
    changed[6] = 7;
    assert_eq!(a.attach(Peer(0), &changed), Err(AttachError::BadHandle));
    changed = good.clone();
    changed[12] ^= 1;
    assert!(matches!(a.attach(Peer(0), &changed), Err(AttachError::Config(_))), "another format");
    changed = good.clone();
    changed.resize(5000, 0);
    assert_eq!(a.attach(Peer(0), &changed), Err(AttachError::BadHandle));
    let other = support::open(&Ask { notify: Some(Notify::Message), ..Ask::new("shm") }, SMALL, 3);
    assert!(matches!(a.attach(Peer(0), &other.address().unwrap()), Err(AttachError::Config(_))));

    assert_eq!(a.attach(Peer(SMALL.max_peers), &good), Err(AttachError::Full(TAKEN)));
    a.attach(Peer(0), &good).unwrap();
    assert_eq!(a.attach(Peer(0), &good), Err(AttachError::Full(TAKEN)), "taken");
    assert!(matches!(a.attach(Peer(1), &good), Err(AttachError::Config(_))), "twice the same");
    a.detach(Peer(0));
    a.attach(Peer(1), &good).unwrap();

    let mut own = a.address().unwrap();
    own[8] ^= 1;
    assert!(
        matches!(a.attach(Peer(0), &own), Err(AttachError::Config(_))),
        "our own, under another number"
    );
}

/// The provider does not learn the length of an address. Each truncated address ends at an
/// unreadable page.
#[test]
fn addresses_are_as_long_as_the_provider_takes_them_to_be() {
    needs_library!("addresses_are_as_long");
    for provider in ["tcp", "tcp;ofi_rxm", "shm"] {
        let [mut a, b] = [1, 2].map(|seed| support::open(&Ask::new(provider), SMALL, seed));
        let good = b.address().unwrap();
        for len in (0..good.len() + 40).filter(|len| *len != good.len()) {
            let mut other = good.clone();
            other.resize(len, 0);
            let attached = a.attach(Peer(0), Fence::new(len).end(&other));
            assert_eq!(attached, Err(AttachError::BadHandle), "{provider}: {len} bytes");
        }
        let mut strange = good.clone();
        strange[17] ^= 1;
        assert_eq!(
            a.attach(Peer(0), &strange),
            Err(AttachError::BadHandle),
            "{provider}: another family"
        );
        a.attach(Peer(0), Fence::new(good.len()).end(&good)).unwrap();
    }
}

/// On both sides memory, headers and bodies end at an inaccessible page.
#[test]
fn nothing_beyond_what_was_handed_over_is_touched() {
    needs_library!("nothing_beyond");
    for (provider, seed) in [("tcp", 5), ("tcp;ofi_rxm", 7), ("shm", 9)] {
        for inject in [true, false] {
            let config = FabricConfig { inject, ..SMALL };
            let [mut a, mut b] =
                [0, 1].map(|side| support::open(&Ask::new(provider), config, seed + side));
            a.attach(Peer(0), &b.address().unwrap()).unwrap();
            b.attach(Peer(0), &a.address().unwrap()).unwrap();
            let (mut here, mut there) = (Seen::default(), Seen::default());
            for len in [1usize, 7, 8, 64, 65, 128, 129, 1000, 4096, 4097, 20_000] {
                let (mut from, mut to) = (Fence::new(len), Fence::new(len));
                // SAFETY: both regions are deregistered below, when nothing is in flight.
                let (ours, theirs) = unsafe { (from.region(), to.region()) };
                let (mine, desc) = a.register(&ours).unwrap();
                let (key, _) = b.register(&theirs).unwrap();
                a.import(Peer(0), key, len as u64).unwrap();
                from.bytes().fill(len as u8 | 1);
                let local = Local { ptr: ours.ptr(), len, desc };
                let remote = Remote { key, offset: 0 };
                let mut both =
                    |a: &mut FabricRail,
                     b: &mut FabricRail,
                     over: &dyn Fn(&Seen, &Seen) -> bool| {
                        let end = Instant::now() + Duration::from_secs(20);
                        while !over(&here, &there) {
                            a.poll(8, &mut here);
                            b.poll(8, &mut there);
                            assert!(Instant::now() < end, "{provider}: {len} bytes do not arrive");
                        }
                        here.done.clear();
                        there.landed.clear();
                        there.messages.clear();
                    };
                // SAFETY: source and target stay valid until the write has completed and landed.
                let posted = insist(&mut a, &mut b, |a| unsafe {
                    a.post_write(Peer(0), local, remote, Some(3), 9)
                });
                both(&mut a, &mut b, &|here, there| {
                    !there.landed.is_empty() && (posted == Posted::Done || !here.done.is_empty())
                });
                assert!(
                    to.bytes().iter().all(|&byte| byte == len as u8 | 1),
                    "{provider}: {len} bytes"
                );
                from.bytes().fill(0);
                // SAFETY: source and target stay valid until the read has completed.
                insist(&mut a, &mut b, |a| unsafe { a.post_read(Peer(0), local, remote, 9) });
                both(&mut a, &mut b, &|here, _| !here.done.is_empty());
                assert!(
                    from.bytes().iter().all(|&byte| byte == len as u8 | 1),
                    "{provider}: {len} bytes"
                );
                if len <= a.caps().max_message - 3 {
                    let (mut head, body) = (Fence::new(3), Untrusted::from_slice(from.bytes()));
                    let head = head.bytes();
                    insist(&mut a, &mut b, |a| a.post_message(Peer(0), head, body, 9));
                    both(&mut a, &mut b, &|_, there| {
                        there.messages.iter().any(|(_, bytes)| bytes.len() == len + 3)
                    });
                }
                a.release(Peer(0), key);
                a.deregister(mine).unwrap();
                b.deregister(key).unwrap();
            }
        }
    }
}

/// Calls `post` until it is accepted. Polls both rails in between, because they may have to connect
/// first.
fn insist(
    rail: &mut FabricRail,
    other: &mut FabricRail,
    mut post: impl FnMut(&mut FabricRail) -> Result<Posted, PostError>,
) -> Posted {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match post(rail) {
            Err(PostError::Again) => {
                let mut seen = Seen::default();
                rail.poll(8, &mut seen);
                other.poll(8, &mut seen);
                assert!(seen.done.is_empty() && seen.landed.is_empty() && seen.messages.is_empty());
            }
            posted => return posted.unwrap(),
        }
        assert!(Instant::now() < end, "refused for ever");
    }
}

#[test]
fn tables_fill_up_and_say_so() {
    needs_library!("tables");
    let mut rail = support::open(&Ask::new("shm"), SMALL, 1);
    let nobody = Peer(1);
    let empty = Untrusted::from_slice(&[]);
    assert_eq!(rail.post_message(nobody, &[1], empty, 0), Err(PostError::PeerDown));
    assert_eq!(rail.post_message(Peer(u16::MAX), &[1], empty, 0), Err(PostError::PeerDown));
    assert_eq!(rail.import(nobody, RailKey { key: 1, base: 0 }, 8), Err(AttachError::UnknownPeer));
    rail.attach_self(Peer(0)).unwrap();
    for key in 0..SMALL.max_imports as u64 {
        rail.import(Peer(0), RailKey { key, base: 0 }, 8).unwrap();
    }
    assert_eq!(
        rail.import(Peer(0), RailKey { key: 1000, base: 0 }, 8),
        Err(AttachError::Full("FabricConfig::max_imports"))
    );
    rail.release(Peer(0), RailKey { key: 3, base: 0 });
    rail.import(Peer(0), RailKey { key: 1000, base: 0 }, 8).unwrap();

    let memory = Box::leak(Box::new([0u64; 8]));
    let ptr = NonNull::from(&mut memory[0]).cast();
    // SAFETY: the memory is leaked, and nothing else accesses it.
    let region = |len| unsafe { Region::new(ptr, len, RegionKind::Private) };
    assert_eq!(rail.register(&region(0)), Err(AttachError::BadRange));
    let keys: Vec<_> =
        (0..SMALL.max_regions).map(|_| rail.register(&region(64)).unwrap().0).collect();
    assert_eq!(rail.register(&region(64)), Err(AttachError::Full("FabricConfig::max_regions")));
    rail.deregister(keys[2]).unwrap();
    let again = rail.register(&region(64)).unwrap().0;
    assert!(keys.iter().all(|key| key.key != again.key), "a key is never used again");
}
