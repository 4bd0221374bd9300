//! Capabilities are constant, and posts beyond a limit are refused.

use fishplate_core::error::PostError;
use fishplate_core::mem::Untrusted;
use fishplate_core::rail::{Caps, Local, Posted, Rail};

use super::*;

pub fn caps_keep_their_promises<F: Fixture>() {
    let caps = F::link(1).caps();
    assert!(caps.max_message >= 256, "messages of 256 bytes are needed: {caps:?}");
    assert!(caps.max_rma >= 256, "writes and reads of 256 bytes are needed: {caps:?}");
    assert!(caps.depth >= 1, "{caps:?}");
    assert!(matches!(caps.data_bytes, 4 | 8), "{caps:?}");
    assert_eq!(F::link(2).caps(), caps, "constant");
}

pub fn too_long_is_said_and_nothing_is_posted<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let Caps { max_message, max_rma, .. } = link.caps();
        let to = link.to;
        let mut seen = Seen::default();
        let body = vec![1; max_message];
        let longest = |link: &mut Link<F::Rail>, len: usize| {
            let (head, body) = body[..len.min(max_message)].split_at(16);
            let extra = [1; 17];
            let head = if len > max_message { &extra[..] } else { head };
            attempt(link, &mut Seen::default(), |rail| {
                rail.post_message(to, head, Untrusted::from_slice(body), 5)
            })
        };
        let error = PostError::TooLong { len: max_message + 1, max: max_message };
        assert_eq!(longest(&mut link, max_message + 1), Err(error), "seed {seed}");
        assert!(longest(&mut link, max_message).is_ok(), "seed {seed}");
        link.until(&mut seen, "the longest message", |seen| seen.messages.len() == 1);
        assert_eq!(seen.messages[0].1.len(), max_message);
        if max_rma <= 1 << 30 {
            // The post is one byte longer than the rail accepts. The target range is never
            // accessed, so it need not exist.
            let field = Field::new::<F>(&mut link, 64);
            let long = leaked(max_rma + 1);
            let local = Local { ptr: long.ptr(), len: max_rma + 1, desc: field.desc };
            let mut pending = false;
            // SAFETY: the source has the given length and is never freed.
            match unsafe { link.origin().post_write(to, local, field.remote(0), Some(1), 77) } {
                Ok(posted) => {
                    assert_eq!(posted, Posted::Pending);
                    pending = true;
                }
                Err(PostError::Again) => {}
                Err(error) => {
                    assert!(
                        matches!(error, PostError::TooLong { .. } | PostError::BadKey),
                        "seed {seed}: {error:?}"
                    );
                }
            }
            let mut seen = Seen::default();
            link.until(&mut seen, "end", |seen| {
                !pending || seen.done.iter().any(|&(cx, r)| cx == 77 && r.is_err())
            });
            assert_eq!(field.inside(), [CANARY; 64]);
            field.check_canaries("too long");
            if max_rma <= 1 << 20 {
                let field = Field::new::<F>(&mut link, max_rma + 1);
                let local = field.local(0, max_rma + 1);
                // SAFETY: the source has the given length and is never freed.
                match unsafe { link.origin().post_write(to, local, field.remote(0), Some(1), 78) } {
                    Ok(posted) => assert_eq!(posted, Posted::Pending),
                    Err(error) => {
                        let long = PostError::TooLong { len: max_rma + 1, max: max_rma };
                        assert!(
                            error == long || error == PostError::Again,
                            "seed {seed}: {error:?}"
                        );
                    }
                }
                link.linger(&mut seen);
                assert!(seen.landed.is_empty(), "seed {seed}: accepted more than its limit");
            }
        }
    }
}
