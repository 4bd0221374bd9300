//! Entry points for fuzzing: see [`fishplate_core::engine::fuzzing`]. They decode packets as a link
//! does, header included. `/dev/null` stands in for received descriptors.

use std::fs::File;
use std::os::fd::OwnedFd;

use fishplate_core::engine::fuzzing::{Target, number, put};
use fishplate_shm::extension::{Foreign, Reader};

use super::error::AllocId;
use super::publish::{Binding, Wanted};
use super::wire::{self, Ask, Said};
use super::{Handle, pair, relay};

/// The parsers of this package.
pub const TARGETS: &[Target] = &[
    Target { name: "gpu-packet", sample: sample_packet, read: read_packet },
    Target { name: "gpu-offer", sample: pair::sample_offer, read: pair::read_offer },
    Target { name: "gpu-piece", sample: relay::sample_piece, read: relay::read_piece },
];

fn sample_packet(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let Some(alloc) = AllocId::from_key(a | 1) else { return 0 };
    let (offset, len) = (b >> (2 + b % 60), (c >> (2 + c % 60)) | 1);
    let packet = match a / 2 % 8 {
        0 => wire::export(alloc, len, &[a as u8; 16], Some(&Handle::Legacy([b as u8; 64]))),
        1 => wire::export(alloc, len, &[a as u8; 16], None),
        2 => wire::request(alloc),
        3 if b & 1 == 0 => wire::refuse(Ask::Alloc(alloc)),
        3 => wire::refuse(Ask::Buffer(b, Wanted::from_wire(c))),
        4 => wire::publish(b, &Binding { version: c | 1, alloc, offset, len }),
        5 => wire::query(b, Wanted::from_wire(c), a & 2 != 0),
        6 => wire::unpublish(b),
        _ if b & 1 == 0 => wire::revoke(b, alloc),
        _ => wire::revoke_ack(b, alloc),
    };
    put(into, &packet)
}

fn read_packet(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let (kind, body) = Reader::extension(input).ok()?;
    let home = input.len().is_multiple_of(2);
    let null = || File::open("/dev/null").ok().map(|file| Foreign::from(OwnedFd::from(file)));
    let mut fds = std::iter::from_fn(null).take(3);
    let packet = match wire::read(kind, body, &mut fds, home).ok()? {
        Said::Export(offer) => {
            wire::export(offer.alloc, offer.size, &offer.uuid, offer.handle.as_ref())
        }
        Said::Request(alloc) => wire::request(alloc),
        Said::Refuse(ask) => wire::refuse(ask),
        Said::Publish(buffer, binding) => {
            assert!(
                binding.offset.checked_add(binding.len).is_some_and(|end| end <= isize::MAX as u64)
            );
            wire::publish(buffer, &binding)
        }
        Said::Query { buffer, wanted, on } => wire::query(buffer, wanted, on),
        Said::Unpublish(buffer) => wire::unpublish(buffer),
        Said::Revoke { sequence, alloc } => wire::revoke(sequence, alloc),
        Said::RevokeAck { sequence, alloc } => wire::revoke_ack(sequence, alloc),
    };
    Some(put(again, &packet))
}
