//! Optional capabilities of a rail: mapped memory, immediate copies, native atomics.

use fishplate_core::error::PostError;
use fishplate_core::op::{Amo, AmoOp};
use fishplate_core::rail::Rail;

use super::*;

pub fn mapped_memory_is_the_peers_memory<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    let Some(mapped) = field.mapped else { return };
    // SAFETY: the mapping is as long as the imported region.
    unsafe { std::ptr::write_bytes(mapped.as_ptr(), 0x66, 64) };
    assert_eq!(field.inside(), [0x66; 64]);
    field.check_canaries("mapped");
    let to = link.to;
    link.origin().notify(to);
    link.origin().release(to, field.key);
}

pub fn copies_at_once_are_whole_and_checked<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    let to = link.to;
    set(&field.source, 0, &[0x77; 64]);
    // SAFETY: the source has the given length and is never freed.
    unsafe {
        if let Some(done) = link.origin().copy_to(
            to,
            &[(field.local(0, 5), field.remote(48)), (field.local(5, 11), field.remote(53))],
        ) {
            assert_eq!(done, Ok(()));
            assert_eq!(field.inside()[48..], [0x77; 16]);
            assert!(
                link.origin()
                    .copy_to(to, &[(field.local(0, 17), field.remote(48))])
                    .is_none_or(|done| done.is_err())
            );
            field.check_canaries("copy_to");
        }
        if let Some(done) = link.origin().copy_from(
            to,
            &[(field.local(16, 9), field.remote(0)), (field.local(25, 7), field.remote(9))],
        ) {
            assert_eq!(done, Ok(()));
            assert_eq!(look(&field.source)[16..32], [CANARY; 16]);
            assert!(
                link.origin()
                    .copy_from(to, &[(field.local(0, 17), field.remote(48))])
                    .is_none_or(|done| done.is_err())
            );
            assert_eq!(look(&field.source)[..16], [0x77; 16]);
        }
    }
}

pub fn native_atomics_are_atomics_or_unsupported<F: Fixture>() {
    let mut link = F::link(1);
    let native = link.caps().native_atomics;
    let field = Field::new::<F>(&mut link, 64);
    set(&field.whole, PAD, &[0; 64]);
    let (mut seen, to) = (Seen::default(), link.to);
    let mut ends = 0;
    for (n, (op, width)) in [(AmoOp::Add, 8u8), (AmoOp::Inc, 1), (AmoOp::Xor, 4), (AmoOp::Swap, 2)]
        .into_iter()
        .enumerate()
    {
        let amo = Amo { op, width, operand: 0x55, compare: 0 };
        let fetch = field.source.ptr().cast();
        // SAFETY: `fetch` points to aligned words that are never freed.
        let result = attempt(&mut link, &mut seen, |rail| unsafe {
            rail.post_atomic(to, amo, field.remote(n as u64 * 8), Some(fetch), n as u64)
        });
        if !native.has(op, width) {
            assert_eq!(result, Err(PostError::Unsupported));
            continue;
        }
        assert!(result.is_ok(), "{result:?}");
        ends += 1;
        link.until(&mut seen, "atomic", |seen| seen.done.len() == ends);
        let want = if op == AmoOp::Inc { 1 } else { 0x55 };
        assert_eq!(field.inside()[n * 8..n * 8 + 8], u64::to_le_bytes(want), "{op:?}");
        assert_eq!(look(&field.source)[..8], [0; 8], "fetched");
    }
    if native.has(AmoOp::Set, 8) {
        let amo = Amo { op: AmoOp::Set, width: 8, operand: u64::MAX, compare: 0 };
        for offset in [64, 57, u64::MAX - 3] {
            let (rail, at) = (link.origin(), field.remote(offset));
            // SAFETY: the atomic fetches nothing, so no local memory must stay valid.
            assert!(unsafe { rail.post_atomic(to, amo, at, None, 9) }.is_err());
        }
        field.check_canaries("atomics");
    }
}
