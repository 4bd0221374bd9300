//! The messages that agents exchange before their nodes connect. Little-endian, without padding.
//!
//! ```text
//! info:     "FPni", version u16, key [16], door u64, port u16, hosts u8, IPv4 [4] each, address
//! question: "FPnq", version u16, key [16], again u8, name u32, name, address
//! region:   "FPnr", version u16, start u64, len u64, number u64, device u8, handle
//! ```
//!
//! The *info* is an agent's connection info. The *region* is the metadata of registered memory.
//! NIXL carries both to peers.
//!
//! An agent that has the info sends the *question* to the door that the info names, and receives an
//! answer of one byte. The key is a secret: only agents that have the info know it. A question with
//! a wrong key is refused.

use std::net::Ipv4Addr;

use fishplate::core::bytes::{Put, Reader, Short};
use fishplate::node::ADDRESS_MAX;

use crate::status::Status;

const VERSION: u16 = 3;

const NAME_MAX: usize = 4096;

pub(crate) const QUESTION_MAX: usize = 64 + NAME_MAX + ADDRESS_MAX;

pub(crate) const ADMITTED: u8 = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Info {
    pub key: [u8; 16],
    /// Random number in the name of the socket for agents on the same host.
    pub door: u64,
    /// TCP port for agents on other hosts, at each of `hosts`.
    pub port: u16,
    pub hosts: Vec<Ipv4Addr>,
    pub address: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub key: [u8; 16],
    /// True if the asking agent was connected before and lost the connection.
    pub again: bool,
    pub name: Vec<u8>,
    pub address: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    pub start: u64,
    pub len: u64,
    pub number: u64,
    pub device: bool,
    pub handle: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Malformed,
    Version,
}

impl From<Short> for Refused {
    fn from(_: Short) -> Refused {
        Refused::Malformed
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Status {
        match refused {
            Refused::Malformed => Status::INVALID_PARAM,
            Refused::Version => Status::MISMATCH,
        }
    }
}

fn opened<'a>(bytes: &'a [u8], magic: &[u8; 4]) -> Result<Reader<'a>, Refused> {
    let mut fields = Reader::new(bytes);
    if fields.array()? != *magic {
        return Err(Refused::Malformed);
    }
    match fields.u16()? {
        VERSION => Ok(fields),
        _ => Err(Refused::Version),
    }
}

fn begun(magic: &[u8; 4]) -> Vec<u8> {
    let mut out = vec![];
    out.put(magic).put_u16(VERSION);
    out
}

fn flag(fields: &mut Reader<'_>) -> Result<bool, Refused> {
    match fields.u8()? {
        bit @ 0..=1 => Ok(bit == 1),
        _ => Err(Refused::Malformed),
    }
}

fn within<T>(value: T, bound: bool) -> Result<T, Refused> {
    if bound { Ok(value) } else { Err(Refused::Malformed) }
}

impl Info {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = begun(b"FPni");
        let hosts = &self.hosts[..self.hosts.len().min(255)];
        out.put(&self.key).put_u64(self.door).put_u16(self.port).put_u8(hosts.len() as u8);
        for host in hosts {
            out.put(&host.octets());
        }
        out.put(&self.address);
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Info, Refused> {
        let mut fields = opened(bytes, b"FPni")?;
        let (key, door, port) = (fields.array()?, fields.u64()?, fields.u16()?);
        let mut hosts = vec![];
        for _ in 0..fields.u8()? {
            hosts.push(Ipv4Addr::from(fields.array::<4>()?));
        }
        let address = fields.rest().to_vec();
        within(Info { key, door, port, hosts, address }, bytes.len() <= 2 * ADDRESS_MAX)
    }
}

impl Question {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = begun(b"FPnq");
        out.put(&self.key).put_u8(self.again.into()).put_u32(self.name.len() as u32);
        out.put(&self.name).put(&self.address);
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Question, Refused> {
        let mut fields = opened(bytes, b"FPnq")?;
        let (key, again, len) = (fields.array()?, flag(&mut fields)?, fields.u32()? as usize);
        let name = fields.take(len)?.to_vec();
        let address = fields.rest().to_vec();
        let short = len <= NAME_MAX && address.len() <= ADDRESS_MAX;
        within(Question { key, again, name, address }, short)
    }
}

impl Export {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = begun(b"FPnr");
        out.put_u64(self.start).put_u64(self.len).put_u64(self.number);
        out.put_u8(self.device.into()).put(&self.handle);
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Export, Refused> {
        let mut fields = opened(bytes, b"FPnr")?;
        let (start, len, number) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let device = flag(&mut fields)?;
        let handle = fields.rest().to_vec();
        within(Export { start, len, number, device, handle }, start.checked_add(len).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_comes_back_and_a_wrong_one_is_refused() {
        let hosts = vec![Ipv4Addr::LOCALHOST, Ipv4Addr::BROADCAST];
        let info = Info { key: [7; 16], door: 9, port: 80, hosts, address: vec![5; 70] };
        let question =
            Question { key: [7; 16], again: true, name: b"a\0b".to_vec(), address: vec![1] };
        let export =
            Export { start: u64::MAX - 8, len: 8, number: 6, device: true, handle: vec![3; 40] };
        assert_eq!(Info::decode(&info.encode()), Ok(info.clone()));
        assert_eq!(Question::decode(&question.encode()), Ok(question.clone()));
        assert_eq!(Export::decode(&export.encode()), Ok(export.clone()));
        let beyond = Export { len: 9, ..export.clone() };
        assert_eq!(Export::decode(&beyond.encode()), Err(Refused::Malformed));
        let long = Question { name: vec![0; NAME_MAX + 1], ..question.clone() };
        assert_eq!(Question::decode(&long.encode()), Err(Refused::Malformed));
        for mut bytes in [info.encode(), question.encode(), export.encode()] {
            let all = |bytes: &[u8]| {
                let [info, question] = [Info::decode(bytes).err(), Question::decode(bytes).err()];
                [info, question, Export::decode(bytes).err()]
            };
            for cut in 0..22 {
                assert!(all(&bytes[..cut]).iter().all(Option::is_some), "cut to {cut}");
            }
            bytes[4] = 9;
            assert!(all(&bytes).contains(&Some(Refused::Version)));
            bytes[0] = 0;
            assert_eq!(all(&bytes), [Some(Refused::Malformed); 3]);
        }
    }
}
