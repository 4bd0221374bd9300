//! The tag of a post: the context word by which the engine recognizes the post's completion. It
//! names what the post belongs to, and its bytes. A rail returns it unchanged, and it never leaves
//! the process. Packing and unpacking are a few shifts.

use crate::mem::Peer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PostTag {
    pub owner: Owner,
    pub bytes: u32,
}

/// The bits of a peer's generation that fit next to its number.
pub(crate) const GENERATION_MASK: u16 = 0x3fff;

/// Longest post of [`Owner::Stream`], in bytes, because its tag has fewer bits for the size.
pub(crate) const STREAM_POST_MAX: u64 = (1 << 24) - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Op(u32),
    /// A silent operation without a slot: its stream, and the low bits ([`GENERATION_MASK`]) of the
    /// peer's generation.
    Stream(u32, u16),
    /// A message that no slot tracks: an acknowledgement, a reply or an eager send. The peer, and
    /// the low bits of the generation of its slot.
    Control(Peer, u16),
    Atomic(u32),
}

impl PostTag {
    /// Encodes the tag as the context word of a post.
    ///
    /// ```text
    /// Op       0 2 bits | slot 30 | bytes 32
    /// Stream   1 2 bits | stream 24 | generation 14 | bytes 24
    /// Control  2 2 bits | generation 14 | peer 16 | bytes 32
    /// Atomic   3 2 bits | slot 30 | bytes 32
    /// ```
    #[inline(always)]
    pub(crate) fn pack(self) -> u64 {
        let bytes = self.bytes as u64;
        match self.owner {
            Owner::Op(slot) => ((slot as u64) << 32) | bytes,
            Owner::Stream(stream, generation) => {
                (1 << 62) | ((stream as u64) << 38) | ((generation as u64) << 24) | bytes
            }
            Owner::Control(peer, generation) => {
                (2 << 62) | ((generation as u64) << 48) | ((peer.0 as u64) << 32) | bytes
            }
            Owner::Atomic(slot) => (3 << 62) | ((slot as u64) << 32) | bytes,
        }
    }

    #[inline(always)]
    pub(crate) fn unpack(cx: u64) -> Self {
        let generation = |from: u32| (cx >> from) as u16 & GENERATION_MASK;
        match cx >> 62 {
            0 => PostTag { owner: Owner::Op((cx >> 32) as u32), bytes: cx as u32 },
            1 => PostTag {
                owner: Owner::Stream((cx >> 38) as u32 & 0xff_ffff, generation(24)),
                bytes: cx as u32 & 0xff_ffff,
            },
            2 => PostTag {
                owner: Owner::Control(Peer((cx >> 32) as u16), generation(48)),
                bytes: cx as u32,
            },
            _ => {
                PostTag { owner: Owner::Atomic((cx >> 32) as u32 & 0x3fff_ffff), bytes: cx as u32 }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn post_tags_come_back() {
        for owner in [
            Owner::Op(0),
            Owner::Op(0x3fff_ffff),
            Owner::Stream(0, 0x3fff),
            Owner::Stream(0xff_ffff, 0),
            Owner::Control(Peer(65535), 0),
            Owner::Control(Peer(1), 0x3fff),
            Owner::Atomic(0),
            Owner::Atomic(0x3fff_ffff),
        ] {
            let most =
                if let Owner::Stream(..) = owner { STREAM_POST_MAX as u32 } else { u32::MAX };
            for bytes in [0, 1, most] {
                assert_eq!(
                    PostTag::unpack(PostTag { owner, bytes }.pack()),
                    PostTag { owner, bytes }
                );
            }
        }
    }
}
