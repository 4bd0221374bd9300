//! The address of a node, which a program passes to its peers out of band.
//!
//! Keep an address secret within the job. A process on the node's host that knows the address can
//! impersonate the node.
//!
//! An address is opaque to the program, and has at most [`ADDRESS_MAX`] bytes. It changes when a
//! rail is fenced. The encoding is little-endian, without padding:
//!
//! ```text
//! "FPna", version u16, id u64, door u64, host u64, window u32, contexts u16,
//! eager u32, credits u32, headers u32, gpu u8, rails u8,
//! then for each rail: mbit u32, provider u32, fabric u32, max_message u32, len u16, address
//! ```
//! `provider` and `fabric` are hashes of libfabric's names.

use std::os::unix::fs::MetadataExt;

use fishplate_core::bytes::{Put, Reader, Short};
use fishplate_core::engine::Config;
use fishplate_core::engine::protocol::MatchConfig;

use super::Error;
use crate::bootstrap::random_id;
use crate::config::RAILS_LIMIT;
use crate::topology::FabricEnd;

/// Maximum size of an address in bytes.
pub const ADDRESS_MAX: usize = 1024;

const VERSION: u16 = 3;

const MAGIC: [u8; 4] = *b"FPna";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RailAddress {
    pub end: FabricEnd,
    pub max_message: u32,
    pub address: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// The node's random id. It is secret, because a node that dials proves its identity with it.
    pub id: u64,
    /// Random number in the name of the node's socket. Every process on the host can see that name.
    pub door: u64,
    /// Identifies the host and the network namespace. Nodes with the same value can share memory.
    pub host: u64,
    pub window: u32,
    pub contexts: u16,
    pub eager: u32,
    pub credits: u32,
    pub headers: u32,
    /// Whether the node's shared-memory rail carries device memory.
    pub gpu: bool,
    pub rails: Vec<RailAddress>,
}

impl Address {
    pub fn new(
        config: &Config,
        matching: &MatchConfig,
        gpu: bool,
        rails: Vec<RailAddress>,
    ) -> Address {
        Address {
            id: random_id(),
            door: random_id(),
            host: this_host(),
            window: config.window,
            contexts: config.contexts,
            eager: matching.eager,
            credits: matching.credits,
            headers: matching.headers,
            gpu,
            rails,
        }
    }

    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut out = vec![];
        out.put(&MAGIC).put_u16(VERSION).put_u64(self.id).put_u64(self.door).put_u64(self.host);
        out.put_u32(self.window).put_u16(self.contexts);
        out.put_u32(self.eager).put_u32(self.credits).put_u32(self.headers);
        out.put_u8(self.gpu.into()).put_u8(self.rails.len() as u8);
        for RailAddress { end, max_message, address } in &self.rails {
            out.put_u32(end.mbit).put_u32(end.provider).put_u32(end.fabric).put_u32(*max_message);
            out.put_u16(address.len() as u16).put(address);
        }
        (out.len() <= ADDRESS_MAX).then_some(out)
    }

    /// Decodes a peer's address.
    ///
    /// # Errors
    /// [`Error::BadAddress`], [`Error::Version`].
    pub fn decode(bytes: &[u8]) -> Result<Address, Error> {
        let mut fields = Reader::new(bytes);
        if bytes.len() > ADDRESS_MAX || fields.array()? != MAGIC {
            return Err(Error::BadAddress);
        }
        let theirs = fields.u16()?;
        if theirs != VERSION {
            return Err(Error::Version { theirs, ours: VERSION });
        }
        let mut address = Address {
            id: fields.u64()?,
            door: fields.u64()?,
            host: fields.u64()?,
            window: fields.u32()?,
            contexts: fields.u16()?,
            eager: fields.u32()?,
            credits: fields.u32()?,
            headers: fields.u32()?,
            gpu: match fields.u8()? {
                0 => false,
                1 => true,
                _ => return Err(Error::BadAddress),
            },
            rails: vec![],
        };
        let rails = fields.u8()?;
        for _ in 0..rails {
            let (mbit, provider, fabric) = (fields.u32()?, fields.u32()?, fields.u32()?);
            let end = FabricEnd { provider, fabric, mbit };
            let (max_message, len) = (fields.u32()?, fields.u16()?);
            let bytes = fields.take(len.into())?.to_vec();
            address.rails.push(RailAddress { end, max_message, address: bytes });
        }
        // The first rail of a node is shared memory.
        match fields.rest().is_empty() && usize::from(rails) < RAILS_LIMIT {
            true => Ok(address),
            false => Err(Error::BadAddress),
        }
    }
}

impl From<Short> for Error {
    fn from(_: Short) -> Self {
        Error::BadAddress
    }
}

/// Returns the name of the abstract socket where the node with this `door` listens for peers on its
/// host.
pub(super) fn socket(door: u64) -> String {
    format!("@fishplate-{door:016x}")
}

/// Returns the FNV-1a hash of the parts. The hash is part of the layout, so all processes must
/// compute the same value.
pub(super) fn hash(parts: &[&[u8]]) -> u64 {
    let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let part = |hash, part: &&[u8]| part.iter().chain(&[0]).fold(hash, step);
    parts.iter().fold(0xcbf2_9ce4_8422_2325, part)
}

/// Returns a hash that identifies this boot of this host and the network namespace. Abstract
/// sockets are visible only inside their namespace.
fn this_host() -> u64 {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::metadata("/proc/self/ns/net").map_or(0, |space| space.ino());
    hash(&[&boot, &space.to_le_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(rails: usize) -> Address {
        let end = FabricEnd { provider: 1, fabric: 9, mbit: 1000 };
        let rail = RailAddress { end, max_message: 4096, address: vec![7; 32] };
        Address::new(&Config::DEFAULT, &MatchConfig::DEFAULT, rails % 2 == 1, vec![rail; rails])
    }

    #[test]
    fn an_address_comes_back_with_any_number_of_rails() {
        for rails in [0, 1, 15] {
            let address = address(rails);
            assert_eq!(Address::decode(&address.encode().unwrap()), Ok(address));
        }
        assert_ne!(address(0).id, address(0).id);
        assert_eq!(address(0).host, address(0).host);
    }

    #[test]
    fn an_address_cut_short_too_long_or_of_another_kind_is_refused() {
        let bytes = address(3).encode().unwrap();
        for cut in 0..bytes.len() {
            assert_eq!(Address::decode(&bytes[..cut]), Err(Error::BadAddress), "cut to {cut}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(Address::decode(&longer), Err(Error::BadAddress));
        let mut other = bytes.clone();
        other[4] = 9;
        assert_eq!(Address::decode(&other), Err(Error::Version { theirs: 9, ours: VERSION }));
        other[0] = 0;
        assert_eq!(Address::decode(&other), Err(Error::BadAddress));
        assert_eq!(
            address(16).encode().map(|bytes| Address::decode(&bytes)),
            Some(Err(Error::BadAddress))
        );
        let mut long = address(15);
        long.rails[0].address = vec![0; 1024];
        assert_eq!(long.encode(), None);
    }
}
