//! The frames that two endpoints exchange before they connect. A frame holds the sender's epid, the
//! address of its node, and the address of its node for active messages, if there is one.
//!
//! All frames have the same length. Little-endian, without padding:
//!
//! ```text
//! "FPps", version u16, verdict u8, 0 u8, uuid [16], epid u64, len u16, len u16, address [1024],
//! address [1024]
//! ```
//!
//! The uuid is the key of the job. A frame with another uuid is refused. The key is sent in
//! cleartext, as in PSM2.

use fishplate::node::ADDRESS_MAX;

use crate::error::Error;

pub(crate) const LEN: usize = HEAD + 2 * ADDRESS_MAX;
const HEAD: usize = 36;

const MAGIC: &[u8; 4] = b"FPps";
const VERSION: u16 = 2;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// In an answer, the error code of a refusal; 0 if admitted.
    pub verdict: u8,
    pub uuid: [u8; 16],
    pub epid: u64,
    pub address: Vec<u8>,
    /// Empty without a node for active messages.
    pub am: Vec<u8>,
}

impl Frame {
    pub fn encode(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        out[..4].copy_from_slice(MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6] = self.verdict;
        out[8..24].copy_from_slice(&self.uuid);
        out[24..32].copy_from_slice(&self.epid.to_le_bytes());
        for (nth, address) in [&self.address, &self.am].into_iter().enumerate() {
            let (len, at) = (address.len().min(ADDRESS_MAX), HEAD + nth * ADDRESS_MAX);
            out[32 + 2 * nth..][..2].copy_from_slice(&(len as u16).to_le_bytes());
            out[at..at + len].copy_from_slice(&address[..len]);
        }
        out
    }

    /// Decodes a peer's frame, and checks that its key is `uuid`. A refusal has no key.
    ///
    /// # Errors
    /// [`Error::EPID_VERSION`] for another version, [`Error::BAD_UUID`] for another key,
    /// [`Error::EPID_NETWORK`] for any other invalid frame.
    pub fn decode(bytes: &[u8; LEN], uuid: &[u8; 16]) -> Result<Frame, Error> {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let ([len, am], version) = ([32, 34].map(|at| usize::from(word(at))), word(4));
        if &bytes[..4] != MAGIC || len.max(am) > ADDRESS_MAX {
            return Err(Error::EPID_NETWORK);
        }
        if version != VERSION {
            return Err(Error::EPID_VERSION);
        }
        let mut frame =
            Frame { verdict: bytes[6], uuid: [0; 16], epid: 0, address: vec![], am: vec![] };
        frame.uuid.copy_from_slice(&bytes[8..24]);
        if frame.verdict == 0 && frame.uuid != *uuid {
            return Err(Error::BAD_UUID);
        }
        let mut epid = [0; 8];
        epid.copy_from_slice(&bytes[24..32]);
        frame.epid = u64::from_le_bytes(epid);
        frame.address = bytes[HEAD..HEAD + len].to_vec();
        frame.am = bytes[HEAD + ADDRESS_MAX..][..am].to_vec();
        Ok(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_and_a_wrong_one_is_refused() {
        for len in [0, 70, ADDRESS_MAX] {
            let refusal = Frame { verdict: 3, uuid: [0; 16], epid: 9, address: vec![], am: vec![] };
            assert_eq!(Frame::decode(&refusal.encode(), &[7; 16]), Ok(refusal));
            let am = vec![6; ADDRESS_MAX - len];
            let frame = Frame { verdict: 0, uuid: [7; 16], epid: 9, address: vec![5; len], am };
            let mut bytes = frame.encode();
            assert_eq!(Frame::decode(&bytes, &[7; 16]), Ok(frame));
            assert_eq!(Frame::decode(&bytes, &[8; 16]), Err(Error::BAD_UUID));
            for wrong in [33, 35] {
                let old = std::mem::replace(&mut bytes[wrong], 0xff);
                assert_eq!(Frame::decode(&bytes, &[7; 16]), Err(Error::EPID_NETWORK));
                bytes[wrong] = old;
            }
            bytes[4] = 3;
            assert_eq!(Frame::decode(&bytes, &[7; 16]), Err(Error::EPID_VERSION));
            bytes[0] = 0;
            assert_eq!(Frame::decode(&bytes, &[7; 16]), Err(Error::EPID_NETWORK));
        }
    }

    /// A stranger can send any bytes.
    #[test]
    fn a_changed_frame_is_refused_or_decodes_to_what_it_encodes() {
        let uuid = [7; 16];
        let (mut state, mut decoded) = (0x9e37_79b9_u64, 0);
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        for _ in 0..20_000 {
            let address = vec![random(256) as u8; random(ADDRESS_MAX + 1)];
            let am = vec![random(256) as u8; random(ADDRESS_MAX + 1)];
            let mut bytes =
                Frame { verdict: 0, uuid, epid: random(9) as u64, address, am }.encode();
            for _ in 0..random(4) {
                let at = if random(2) == 0 { random(HEAD) } else { random(LEN) };
                bytes[at] = random(256) as u8;
            }
            let Ok(frame) = Frame::decode(&bytes, &uuid) else { continue };
            assert!(frame.verdict != 0 || frame.uuid == uuid);
            assert_eq!(Frame::decode(&frame.encode(), &uuid), Ok(frame));
            decoded += 1;
        }
        assert!((5_000..20_000).contains(&decoded), "{decoded} frames decoded");
    }
}
