//! Checks the atomics that the provider executes against the model of core's tests, for each
//! operation, width and form.

use fishplate_core::error::PostError;
use fishplate_core::op::{Amo, AmoOp, AmoSet};
use fishplate_core::rail::{Rail, Remote};
use fishplate_sys::fabric::{Ask, FabricConfig, negotiate};

use crate::behaviour::oracle::{OPS, model};
use crate::behaviour::{Random, seeds};
use crate::conformance::{Seen, leaked};
use crate::{TO, pair, support, with_atomics};

const CONFIG: FabricConfig = FabricConfig { native_atomics: true, ..support::SMALL };

fn every_operation(name: &str, ask: &Ask<'_>) {
    if let Some(why) = support::absent() {
        return println!("SKIPPED atomics over {name}: {why}");
    }
    for seed in seeds(3) {
        let mut link = pair(ask, CONFIG, seed);
        assert_eq!(link.rails[0].caps().native_atomics, AmoSet::ALL, "{name}");
        let memory = leaked(64);
        let (key, _) = link.rails[1].register(&memory).unwrap();
        link.rails[0].import(TO, key, 64).unwrap();
        let mut random = Random(seed);
        let fetched = Box::leak(Box::new(0u64));
        let mut ends = 0;
        for op in OPS {
            for width in [1u8, 2, 4, 8] {
                for fetch in [false, true] {
                    let mask = u64::MAX >> (64 - 8 * width as u32);
                    let old = random.next() & mask;
                    let around = random.next();
                    let compare = if random.below(2) == 0 { old } else { random.next() };
                    let amo = Amo { op, width, operand: random.next(), compare };
                    let what = format!("{name}, seed {seed}: {amo:?} on {old:#x}");
                    let place = memory.ptr().cast::<u64>();
                    // SAFETY: the memory at `place` has 64 bytes, and nothing else writes it now.
                    unsafe { place.as_ptr().add(1).write((old & mask) | (around & !mask)) };
                    *fetched = !0;
                    let mut seen = Seen::default();
                    let result = fetch.then_some((&mut *fetched).into());
                    let remote = Remote { key, offset: 8 };
                    ends += 1;
                    // SAFETY: the memory of the result is leaked, and read only after the
                    // completion.
                    while unsafe { link.rails[0].post_atomic(TO, amo, remote, result, ends) }
                        == Err(PostError::Again)
                    {
                        link.rails.iter_mut().for_each(|rail| {
                            rail.poll(8, &mut seen);
                        });
                    }
                    let mut turns = 0;
                    while seen.done.is_empty() {
                        link.rails.iter_mut().for_each(|rail| {
                            rail.poll(8, &mut seen);
                        });
                        turns += 1;
                        assert!(turns < 5_000_000, "{what}: no end");
                    }
                    assert_eq!(seen.done, [(ends, Ok(()))], "{what}");
                    // SAFETY: the memory at `place` has 64 bytes, and nothing else writes it now.
                    let (before, now, after) = unsafe {
                        let place = place.as_ptr();
                        (place.read(), place.add(1).read(), place.add(2).read())
                    };
                    assert_eq!(now, model(&amo, old) | (around & !mask), "{what}");
                    assert_eq!((before, after), (0, 0), "{what}");
                    assert_eq!(*fetched, if fetch { old } else { !0 }, "{what}");
                }
            }
        }
        let odd = Amo { op: AmoOp::Add, width: 3, operand: 1, compare: 0 };
        // SAFETY: no result is requested, so no local memory must stay valid.
        let result =
            unsafe { link.rails[0].post_atomic(TO, odd, Remote { key, offset: 8 }, None, 0) };
        assert_eq!(result, Err(PostError::Unsupported));
    }
}

#[test]
fn atomics_over_rxm_are_what_the_model_says() {
    every_operation("tcp;ofi_rxm", &with_atomics("tcp;ofi_rxm"));
}

#[test]
fn atomics_over_shm_are_what_the_model_says() {
    every_operation("shm", &with_atomics("shm"));
}

/// `net` of 1.17 advertises atomics but implements none; `net` of 2.x does not advertise them.
#[test]
fn advertised_atomics_without_operations_are_not_believed() {
    if let Some(why) = support::absent() {
        return println!("SKIPPED advertised_atomics: {why}");
    }
    let ask = Ask { interface: Some("lo"), atomics: true, ..Ask::new("tcp") };
    match negotiate(support::library(), &ask) {
        Ok(_) => assert_eq!(support::open(&ask, CONFIG, 1).caps().native_atomics, AmoSet::NONE),
        Err(error) => println!("{error}"),
    }
}
