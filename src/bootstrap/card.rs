//! Defines the card that each side sends, and checks that two cards agree.
//!
//! A card is encoded in little-endian, without padding:
//! `id u64, transport u8, window u32, contexts u16, first_sequence u64, user u64, rails u8`, then
//! for each rail `mbit u32, provider u8 + bytes, interface u8 + bytes, fabric u8 + bytes, address
//! u16 + bytes`.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Instant;

use fishplate_core::bytes::{Put, Reader, Short};
use fishplate_core::engine::Config;

use super::BootstrapError;
use crate::config::RAILS_LIMIT;
use crate::topology::{Pairing, RailEnd};

const ADDRESS_MAX: usize = 1100;

/// The description of one rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailCard {
    /// The libfabric provider. At most 255 bytes.
    pub provider: String,
    /// The network interface of the rail. At most 255 bytes.
    pub interface: String,
    /// The provider's name for its fabric; for tcp, the network. At most 255 bytes.
    pub fabric: String,
    /// The endpoint's address, for the peer's address vector. 1 to 1100 bytes.
    pub address: Vec<u8>,
    /// Speed in megabits per second; 0 if unknown.
    pub mbit: u32,
}

/// Describes one side: its rails, and the settings that both sides must share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Random number that identifies the process.
    pub id: u64,
    /// The caller's number for its transport. It must be the same on both sides. It is compared
    /// first, because the defaults of other fields may depend on it. [`new`](Self::new) sets 0.
    pub transport: u8,
    /// [`Config::window`].
    pub window: u32,
    /// [`Config::contexts`].
    pub contexts: u16,
    /// [`Config::first_sequence`].
    pub first_sequence: u64,
    /// The caller's own number. It must be the same on both sides.
    pub user: u64,
    /// The rails in the engine's order. At least 1, at most 16.
    pub rails: Vec<RailCard>,
}

/// The result of two matching cards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The remote rail that each local rail is connected to.
    pub pairing: Pairing,
}

impl Agreement {
    /// Sorts `theirs`, a list by the peer's rails, into the order of the local rails paired with
    /// them.
    pub fn in_our_order<'a, T>(&self, theirs: &'a [T]) -> Vec<&'a T> {
        self.pairing.theirs.iter().map(|&rail| &theirs[usize::from(rail)]).collect()
    }
}

impl Card {
    /// Creates a card with a new random id.
    pub fn new(config: &Config, user: u64, rails: Vec<RailCard>) -> Card {
        let id = random_id();
        let Config { window, contexts, first_sequence, .. } = *config;
        Card { id, transport: 0, window, contexts, first_sequence, user, rails }
    }

    /// Pairs the rails of two sides. Both sides compute the same result.
    ///
    /// # Errors
    /// Names the setting that differs, with both values. Returns [`BootstrapError::BadCard`] if the
    /// peer's card has our id.
    pub fn agree(&self, theirs: &Card) -> Result<Agreement, BootstrapError> {
        if self.id == theirs.id {
            return Err(BootstrapError::BadCard("id: equal to our own"));
        }
        let same = |what, ours: u64, theirs: u64| match ours == theirs {
            true => Ok(()),
            false => Err(BootstrapError::Differs { what, theirs, ours }),
        };
        same("transport", self.transport.into(), theirs.transport.into())?;
        same("window", self.window.into(), theirs.window.into())?;
        same("contexts", self.contexts.into(), theirs.contexts.into())?;
        same("first sequence number", self.first_sequence, theirs.first_sequence)?;
        same("region size", self.user, theirs.user)?;
        let pairing = Pairing::new(&self.ends(), &theirs.ends(), self.id, theirs.id)
            .map_err(BootstrapError::Rails)?;
        for (ours, &there) in pairing.theirs.iter().enumerate() {
            if self.rails[ours].provider != theirs.rails[usize::from(there)].provider {
                return Err(BootstrapError::Providers { ours: ours as u8, theirs: there });
            }
        }
        Ok(Agreement { pairing })
    }

    fn ends(&self) -> Vec<RailEnd<'_>> {
        self.rails.iter().map(|rail| RailEnd { fabric: &rail.fabric, mbit: rail.mbit }).collect()
    }

    /// Encodes the card.
    ///
    /// # Errors
    /// [`BootstrapError::BadCard`] names the field with an invalid length or count.
    pub fn encode(&self) -> Result<Vec<u8>, BootstrapError> {
        if self.rails.is_empty() || self.rails.len() > RAILS_LIMIT {
            return Err(BootstrapError::BadCard("number of rails"));
        }
        let mut out = vec![];
        out.put_u64(self.id).put_u8(self.transport).put_u32(self.window).put_u16(self.contexts);
        out.put_u64(self.first_sequence).put_u64(self.user).put_u8(self.rails.len() as u8);
        for rail in &self.rails {
            out.put_u32(rail.mbit);
            let texts = [
                ("provider", &rail.provider),
                ("interface", &rail.interface),
                ("fabric", &rail.fabric),
            ];
            for (what, text) in texts {
                let len = u8::try_from(text.len()).map_err(|_| BootstrapError::BadCard(what))?;
                out.put_u8(len).put(text.as_bytes());
            }
            if rail.address.is_empty() || rail.address.len() > ADDRESS_MAX {
                return Err(BootstrapError::BadCard("address"));
            }
            out.put_u16(rail.address.len() as u16).put(&rail.address);
        }
        Ok(out)
    }

    /// Decodes a peer's card.
    ///
    /// # Errors
    /// [`BootstrapError::BadCard`] names the first field that is truncated or out of range.
    pub fn decode(bytes: &[u8]) -> Result<Card, BootstrapError> {
        let bad = BootstrapError::BadCard;
        let short = |what| move |_: Short| bad(what);
        let mut fields = Reader::new(bytes);
        let id = fields.u64().map_err(short("id"))?;
        let transport = fields.u8().map_err(short("transport"))?;
        let window = fields.u32().map_err(short("window"))?;
        let contexts = fields.u16().map_err(short("contexts"))?;
        let first_sequence = fields.u64().map_err(short("first sequence number"))?;
        let user = fields.u64().map_err(short("region size"))?;
        let count = usize::from(fields.u8().map_err(short("number of rails"))?);
        if count == 0 || count > RAILS_LIMIT {
            return Err(bad("number of rails"));
        }
        let mut rails = Vec::with_capacity(count);
        for _ in 0..count {
            let mbit = fields.u32().map_err(short("speed"))?;
            let mut text = |what| text(&mut fields).ok_or(bad(what));
            let (provider, interface, fabric) =
                (text("provider")?, text("interface")?, text("fabric")?);
            let len = usize::from(fields.u16().map_err(short("address"))?);
            if len == 0 || len > ADDRESS_MAX {
                return Err(bad("address"));
            }
            let address = fields.take(len).map_err(short("address"))?.to_vec();
            rails.push(RailCard { provider, interface, fabric, address, mbit });
        }
        match fields.rest() {
            [] => Ok(Card { id, transport, window, contexts, first_sequence, user, rails }),
            _ => Err(bad("length")),
        }
    }
}

/// Reads a string of at most 255 bytes. Rejects control characters, because the string may be
/// printed.
fn text(fields: &mut Reader<'_>) -> Option<String> {
    let len = fields.u8().ok()?;
    let text = std::str::from_utf8(fields.take(len.into()).ok()?).ok()?;
    (!text.chars().any(char::is_control)).then(|| text.to_owned())
}

/// Returns a random id. After a fork, both processes share the standard library's hash keys. So the
/// process id and the time are hashed too.
pub(crate) fn random_id() -> u64 {
    RandomState::new().hash_one((std::process::id(), Instant::now()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Mismatch;

    fn rail(n: u8) -> RailCard {
        RailCard {
            provider: "tcp".into(),
            interface: format!("eth{n}"),
            fabric: "10.0.0.0/8".into(),
            address: vec![n; 16],
            mbit: 1000,
        }
    }

    fn card(rails: u8) -> Card {
        Card {
            id: 7,
            transport: 0,
            window: 128,
            contexts: 1,
            first_sequence: 0,
            user: 99,
            rails: (0..rails).map(rail).collect(),
        }
    }

    #[test]
    fn cards_survive_a_round_trip() {
        for rails in [1, 2, 16] {
            assert_eq!(Card::decode(&card(rails).encode().unwrap()), Ok(card(rails)));
        }
        assert_ne!(
            Card::new(&Config::DEFAULT, 0, vec![]).id,
            Card::new(&Config::DEFAULT, 0, vec![]).id
        );
    }

    #[test]
    fn a_card_is_encoded_as_documented() {
        let card = Card {
            id: 0x0807_0605_0403_0201,
            transport: 3,
            first_sequence: 5,
            user: u64::MAX,
            ..card(1)
        };
        let mut golden =
            vec![1, 2, 3, 4, 5, 6, 7, 8, 3, 128, 0, 0, 0, 1, 0, 5, 0, 0, 0, 0, 0, 0, 0];
        golden.extend([0xff; 8]);
        golden.extend([1, 0xe8, 3, 0, 0]);
        golden.extend(*b"\x03tcp\x04eth0\x0a10.0.0.0/8\x10\x00");
        golden.extend([0; 16]);
        assert_eq!(card.encode(), Ok(golden));
    }

    #[test]
    fn invalid_cards_are_refused_by_field() {
        let bytes = card(3).encode().unwrap();
        for cut in 0..bytes.len() {
            assert!(
                matches!(Card::decode(&bytes[..cut]), Err(BootstrapError::BadCard(_))),
                "cut to {cut}"
            );
        }
        let bad = |at: usize, value: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            Card::decode(&bytes)
        };
        assert_eq!(bad(31, 0), Err(BootstrapError::BadCard("number of rails")));
        assert_eq!(bad(31, 17), Err(BootstrapError::BadCard("number of rails")));
        assert_eq!(bad(37, 0xff), Err(BootstrapError::BadCard("provider")), "not UTF-8");
        assert_eq!(bad(37, 0x1b), Err(BootstrapError::BadCard("provider")), "an escape sequence");
        assert_eq!(bad(31, 2), Err(BootstrapError::BadCard("length")), "trailing bytes");
        let mut none = card(1);
        none.rails[0].address.clear();
        assert_eq!(none.encode(), Err(BootstrapError::BadCard("address")));
        none.rails[0].address = vec![0; 1101];
        assert_eq!(none.encode(), Err(BootstrapError::BadCard("address")));
        assert_eq!(card(0).encode(), Err(BootstrapError::BadCard("number of rails")));
    }

    #[test]
    fn random_bytes_are_rejected_without_a_panic() {
        let mut state = 88_172_645_463_325_252u64;
        for _ in 0..20_000 {
            let mut bytes = card(2).encode().unwrap();
            for _ in 0..4 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = state as usize % bytes.len();
                bytes[at] = (state >> 32) as u8;
            }
            if let Ok(card) = Card::decode(&bytes) {
                assert!(card.rails.len() == 2 && card.encode().is_ok());
            }
        }
    }

    #[test]
    fn a_differing_setting_is_named_with_both_values() {
        let differs = |what, theirs, ours| Err(BootstrapError::Differs { what, theirs, ours });
        let ours = card(2);
        let with = |change: fn(&mut Card)| {
            let mut theirs = Card { id: 8, ..card(2) };
            change(&mut theirs);
            ours.agree(&theirs)
        };
        assert_eq!(with(|c| c.window = 64), differs("window", 64, 128));
        assert_eq!(with(|c| (c.transport, c.window) = (3, 64)), differs("transport", 3, 0));
        assert_eq!(with(|c| c.contexts = 2), differs("contexts", 2, 1));
        assert_eq!(with(|c| c.user = 1), differs("region size", 1, 99));
        assert_eq!(with(|c| c.first_sequence = 5), differs("first sequence number", 5, 0));
        assert_eq!(
            with(|c| c.rails.truncate(1)),
            Err(BootstrapError::Rails(Mismatch::Rails { theirs: 1, ours: 2 }))
        );
        assert!(matches!(
            with(|c| c.rails[1].provider = "efa".into()),
            Err(BootstrapError::Providers { .. })
        ));
        let agreed = with(|c| c.rails[1].mbit = 10).unwrap();
        assert_eq!(agreed.pairing.uneven.len(), 1, "speeds may differ, and are reported");
        let rails = agreed.in_our_order(&["a", "b"]);
        assert!(rails == [&"a", &"b"] || rails == [&"b", &"a"]);
    }

    #[test]
    fn forked_processes_have_different_ids() {
        // Creates the standard library's hash keys before the fork, so that both processes share
        // them.
        random_id();
        let mut ends = [0; 2];
        // SAFETY: `pipe` fills an array of two descriptors; `write` and `read` get eight bytes
        // each. The child takes no lock that another thread may hold, and exits.
        let theirs = unsafe {
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            let child = libc::fork();
            if child == 0 {
                let id = random_id();
                libc::write(ends[1], (&raw const id).cast(), 8);
                libc::_exit(0);
            }
            let mut id = 0u64;
            assert_eq!(libc::read(ends[0], (&raw mut id).cast(), 8), 8);
            libc::waitpid(child, std::ptr::null_mut(), 0);
            ends.iter().for_each(|&end| _ = libc::close(end));
            id
        };
        assert_ne!(random_id(), theirs);
    }
}
