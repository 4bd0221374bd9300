//! Addresses of peers in few bytes. The addresses of a job's nodes are mostly alike, so a node
//! keeps one of them, and of the others only the bytes that differ.

use fishplate_core::engine::protocol::MatchLimits;

use super::address::Address;

/// Maximum length of a short brief.
const SHORT: usize = 31;

/// The bytes of an address that differ from those of its [`Kind`]. Each run of them follows the
/// number of equal bytes before it, and its length.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Brief {
    /// Padded with zeros, which change nothing.
    Short([u8; SHORT]),
    Long(Box<[u8]>),
}

/// Peers whose addresses are alike.
pub(super) struct Kind {
    /// The peers' limits of tagged messages.
    pub limits: MatchLimits,
    /// The address of one of them, without what a brief leaves out.
    base: Vec<u8>,
}

impl Kind {
    /// Returns the kind of peers with this address.
    pub fn of(address: &Address) -> Kind {
        Kind { limits: Kind::limits(address), base: plain(address) }
    }

    /// Returns the limits of tagged messages that the node with this address accepts.
    pub fn limits(address: &Address) -> MatchLimits {
        let Address { eager, credits, headers, .. } = *address;
        MatchLimits { eager, credits, headers }
    }

    /// Returns whether peers of both kinds are of one kind.
    pub fn is_like(&self, other: &Kind) -> bool {
        self.limits == other.limits && self.base.len() == other.base.len()
    }

    /// Returns the brief of an address. Leaves out the id, the door and the host.
    pub fn brief(&self, address: &Address) -> Brief {
        let differs = differences(&self.base, &plain(address));
        let mut short = [0; SHORT];
        match short.get_mut(..differs.len()) {
            Some(place) => {
                place.copy_from_slice(&differs);
                Brief::Short(short)
            }
            None => Brief::Long(differs.into()),
        }
    }

    /// Returns the address with this brief and id.
    pub fn address(&self, brief: &Brief, id: u64) -> Option<Address> {
        let mut bytes = self.base.clone();
        let (mut rest, mut at) = (brief.bytes(), 0);
        while let [skip, len, tail @ ..] = rest {
            at += usize::from(*skip);
            let (run, tail) = tail.split_at_checked(usize::from(*len))?;
            bytes.get_mut(at..at + run.len())?.copy_from_slice(run);
            (rest, at) = (tail, at + run.len());
        }
        Some(Address { id, ..Address::decode(&bytes).ok()? })
    }
}

impl Brief {
    fn bytes(&self) -> &[u8] {
        match self {
            Brief::Short(bytes) => bytes,
            Brief::Long(bytes) => bytes,
        }
    }
}

/// Returns the bytes of an address without the fields that a brief leaves out.
fn plain(address: &Address) -> Vec<u8> {
    let plain = Address { id: 0, door: 0, host: 0, ..address.clone() };
    // Cannot fail: the address was decoded from as many bytes.
    plain.encode().unwrap_or_default()
}

/// Returns the bytes of `other` that differ from `base`, as a [`Brief`] has them. Both have the
/// same length.
fn differences(base: &[u8], other: &[u8]) -> Vec<u8> {
    let (mut out, mut at, mut last) = (vec![], 0, None);
    for to in (0..other.len()).filter(|&to| base[to] != other[to]) {
        match last {
            // Two equal bytes take no more room than a new run.
            Some(len_at) if to - at <= 2 && usize::from(out[len_at]) + to + 1 - at <= 255 => {
                out.extend_from_slice(&other[at..=to]);
                out[len_at] += (to + 1 - at) as u8;
            }
            _ => {
                while to - at > 255 {
                    out.extend_from_slice(&[255, 0]);
                    at += 255;
                }
                out.extend_from_slice(&[(to - at) as u8, 1, other[to]]);
                last = Some(out.len() - 2);
            }
        }
        at = to + 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::address::RailAddress;
    use crate::topology::FabricEnd;
    use fishplate_core::engine::Config;
    use fishplate_core::engine::protocol::MatchConfig;

    /// The address of a node with these rails, each with this end and number.
    fn address(ends: &[(&[u8], u32)]) -> Address {
        let rail = |&(end, number): &(&[u8], u32)| {
            let head = [&b"fpfa\x01\0\x01\0"[..], &number.to_le_bytes(), &[3, 0, 0, 0], end].concat();
            let place = FabricEnd { provider: 7, fabric: 8, mbit: 1000 };
            RailAddress { end: place, max_message: 4608, address: head }
        };
        Address::new(&Config::DEFAULT, &MatchConfig::DEFAULT, false, ends.iter().map(rail).collect())
    }

    #[test]
    fn an_address_comes_back_from_its_brief() {
        let ipv4 = |port: u16, host: [u8; 4]| [&[2, 0][..], &port.to_be_bytes(), &host, &[0; 8]].concat();
        let (one, two) = (ipv4(0x1234, [10, 1, 2, 3]), ipv4(0x5678, [172, 30, 40, 50]));
        let (other, last) = (ipv4(0xffff, [255; 4]), ipv4(0xeeee, [192; 4]));
        let first = address(&[(&one, 0x0101_0101), (&two, 0x0202_0202)]);
        let kind = Kind::of(&first);
        for ends in [
            [(&one, 0x0101_0101), (&two, 0x0202_0202)],
            [(&other, 0xfefe_fefe), (&last, 0xfdfd_fdfd)],
            [(&one, 0x01ff_0101), (&last, 0x0202_0203)],
        ] {
            let address = address(&ends.map(|(end, number)| (&end[..], number)));
            assert!(kind.is_like(&Kind::of(&address)));
            let brief = kind.brief(&address);
            assert!(matches!(brief, Brief::Short(_)), "two rails over IPv4 are short: {brief:?}");
            let Address { id, .. } = address;
            assert_eq!(kind.address(&brief, id), Some(Address { door: 0, host: 0, ..address }));
        }
        // Long addresses, and differences anywhere in them.
        let long = address(&[(&[5; 700][..], 1)]);
        let kind = Kind::of(&long);
        let mut seed = 9u64;
        for round in 0..300 {
            let mut end = [5; 700];
            for _ in 0..round % 40 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                end[(seed >> 33) as usize % 700] = (seed >> 60) as u8;
            }
            let address = address(&[(&end[..], 1)]);
            let brief = kind.brief(&address);
            let Address { id, .. } = address;
            assert_eq!(kind.address(&brief, id), Some(Address { door: 0, host: 0, ..address }), "{round}");
        }
        assert!(!kind.is_like(&Kind::of(&first)));
    }
}
