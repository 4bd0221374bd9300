//! Clause 7: no key, offset or length accesses memory outside registered regions.

use fishplate_core::error::{CompleteError, PostError};
use fishplate_core::rail::{Posted, Rail, RailKey, Remote};

use super::*;

pub fn c7_bad_keys_and_ranges_touch_nothing<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 128);
        let RailKey { key, base } = field.key;
        fill(&field.source, 0x11);
        let mut bad = vec![];
        for (offset, len) in [
            (128u64, 1usize),
            (127, 2),
            (121, 8),
            (129, 0),
            (u64::MAX, 1),
            (u64::MAX - 7, 8),
            (1, 128),
        ] {
            bad.push((field.remote(offset), len));
        }
        for wrong in [0, key ^ 1, key.wrapping_add(1 << 20), u64::MAX, key | 1 << 63] {
            if wrong != key {
                bad.push((Remote { key: RailKey { key: wrong, base }, offset: 0 }, 8));
            }
        }
        let mut seen = Seen::default();
        let (to, mut pending) = (link.to, 0);
        for (n, &(remote, len)) in bad.iter().enumerate() {
            for read in [false, true] {
                let local = field.local(0, len.min(128));
                let cx = n as u64 * 2 + read as u64;
                // SAFETY: the source is never freed.
                let result = attempt(&mut link, &mut seen, |rail| unsafe {
                    match read {
                        false => rail.post_write(to, local, remote, Some(cx as u32), cx),
                        true => rail.post_read(to, local, remote, cx),
                    }
                });
                match result {
                    Ok(Posted::Done) => {
                        panic!("seed {seed}: {remote:?} for {len} bytes was done at once")
                    }
                    Ok(Posted::Pending) => pending += 1,
                    Err(error) => {
                        assert_eq!(
                            error,
                            PostError::BadKey,
                            "seed {seed}: {remote:?} for {len} bytes"
                        )
                    }
                }
            }
        }
        link.until(&mut seen, "ends", |seen| seen.done.len() >= pending);
        assert_eq!(seen.done.len(), pending, "seed {seed}");
        assert!(seen.done.iter().all(|(_, result)| result.is_err()), "seed {seed}: {seen:?}");
        assert!(seen.landed.is_empty(), "seed {seed}: a refused write was reported: {seen:?}");
        assert_eq!(field.inside(), [CANARY; 128], "seed {seed}");
        field.check_canaries("bad ranges");
        assert_eq!(
            look(&field.source),
            [0x11; 128],
            "seed {seed}: a refused read changed local memory"
        );
    }
}

pub fn c7_a_key_taken_back_is_dead_for_ever<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::impatient(seed);
        let field = Field::new::<F>(&mut link, 64);
        link.target().deregister(field.key).unwrap();
        // The old key must not reach the next registered region.
        let next = F::memory(&mut link, 64);
        fill(&next, CANARY);
        let (key, _) = link.target().register(&next).unwrap();
        F::import(&mut link, key, 64);
        set(&field.source, 0, &[0x22; 64]);
        let (mut seen, mut pending, to) = (Seen::default(), 0, link.to);
        for n in 0..8u64 {
            // SAFETY: the source is never freed.
            match unsafe {
                link.origin().post_write(to, field.local(0, 8), field.remote(0), Some(9), n)
            } {
                Ok(Posted::Pending) => pending += 1,
                Ok(Posted::Done) => assert!(F::REACHES_ON.is_some(), "seed {seed}: done"),
                Err(_) => {}
            }
            link.turn(8, &mut seen);
        }
        link.until(&mut seen, "ends", |seen| seen.done.len() >= pending);
        let failed = |(_, result): &(u64, Result<(), CompleteError>)| result.is_err();
        assert!(F::REACHES_ON.is_some() || seen.done.iter().all(failed), "seed {seed}: {seen:?}");
        field.check_canaries("taken back");
        assert_eq!(look(&next), [CANARY; 64], "seed {seed}: another region was written");
        if skipped("that it is not written any more", F::REACHES_ON) {
            continue;
        }
        assert!(seen.landed.is_empty(), "seed {seed}: {seen:?}");
        assert_eq!(field.inside(), [CANARY; 64], "seed {seed}: the old region was written");
    }
}

pub fn c7_a_region_taken_back_in_flight_is_not_written_any_more<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::impatient(seed);
        let field = Field::new::<F>(&mut link, 1024);
        set(&field.source, 0, &[0x33; 1024]);
        let (mut seen, mut pending) = (Seen::default(), 0);
        for n in 0..16u64 {
            let (local, remote) = (field.local(n as usize * 64, 64), field.remote(n * 64));
            pending +=
                (write(&mut link, &mut seen, local, remote, None, n) == Posted::Pending) as usize;
        }
        link.target().deregister(field.key).unwrap();
        let then = field.inside();
        link.until(&mut seen, "ends", |seen| seen.done.len() >= pending);
        assert_eq!(field.inside(), then, "seed {seed}: written after its deregistration");
        assert_eq!(seen.done.len(), pending, "seed {seed}");
    }
}

pub fn c7_an_import_of_nothing_is_refused<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    let to = link.to;
    let RailKey { key, base } = field.key;
    assert!(
        link.origin().import(to, RailKey { key: u64::MAX, base }, 8).is_err(),
        "an import of the key u64::MAX, which no registration returns, was accepted"
    );
    if !skipped("that an import is no longer than the region", F::IMPORTS_UNSEEN) {
        assert!(
            link.origin().import(to, RailKey { key, base }, 65).is_err(),
            "longer than what was registered"
        );
    }
    assert!(
        link.origin().import(to, RailKey { key, base }, u64::MAX).is_err(),
        "an import of u64::MAX bytes was accepted"
    );
}
