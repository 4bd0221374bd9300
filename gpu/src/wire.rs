//! Packets about device memory. Decoding checks length, numbers and descriptors, and a packet that
//! fails a check is a protocol violation. The packets belong to an
//! [extension](fishplate_shm::extension), and use the packet kinds reserved for extensions.
//!
//! | kind | body | descriptors |
//! |---|---|---|
//! | `Export` | allocation, size, uuid of the device, form, contents of the form | by the form |
//! | `Request` | allocation | 0 |
//! | `Refuse` | of a `Request`: 1, allocation, 0; of a `Query`: 2, buffer, version | 0 |
//! | `Publish` | buffer, version, allocation, offset, length | 0 |
//! | `Query` | buffer, version (0: the latest), 1 to ask and 0 to cancel | 0 |
//! | `Unpublish` | buffer | 0 |
//! | `Revoke`, `RevokeAck` | sequence, allocation | 0 |
//!
//! | form of an export | contents                                   | descriptors     |
//! |-------------------|--------------------------------------------|-----------------|
//! | 1, legacy handle  | its 64 bytes                               | 0               |
//! | 2, descriptor     |                                            | 1               |
//! | 3, same process   |                                            | 0               |
//! | 4, segments       | number of segments, then the size of each  | one per segment |
//!
//! Numbers have 8 bytes. Allocations, sizes and lengths are never 0. A version is 0 only in a query
//! or in its refusal. The end of a range does not overflow.

use std::ops::RangeInclusive;

use fishplate_shm::HandshakeError;
use fishplate_shm::extension::{Batch, EXTENSIONS, Foreign, Reader, Writer};

use super::error::AllocId;
use super::publish::{Binding, Wanted};
use super::{Handle, LEGACY_HANDLE, MAX_SEGMENTS, Uuid};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum MessageKind {
    /// Announces an allocation of device memory, and carries its handle.
    Export = *EXTENSIONS.start(),
    Request,
    Refuse,
    Publish,
    /// Requests a version of a buffer, or cancels the request.
    Query,
    Unpublish,
    Revoke,
    RevokeAck,
}

pub(crate) const KINDS: RangeInclusive<u16> =
    MessageKind::Export as u16..=MessageKind::RevokeAck as u16;

impl MessageKind {
    fn from_wire(value: u16) -> Option<Self> {
        use MessageKind::{Export, Publish, Query, Refuse, Request, Revoke, RevokeAck, Unpublish};
        let kinds = [Export, Request, Refuse, Publish, Query, Unpublish, Revoke, RevokeAck];
        kinds.into_iter().find(|kind| *kind as u16 == value)
    }
}

const LEGACY: u64 = 1;
const DESCRIPTOR: u64 = 2;
const HOME: u64 = 3;
const SEGMENTS: u64 = 4;

#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) alloc: AllocId,
    pub(crate) size: u64,
    pub(crate) uuid: Uuid,
    /// `None` if the peer is this process itself, where addresses are the same.
    pub(crate) handle: Option<Handle>,
}

impl Offer {
    pub(crate) fn descriptors(&self) -> usize {
        match &self.handle {
            Some(Handle::Descriptor(_)) => 1,
            Some(Handle::Segments(segments)) => segments.len(),
            Some(Handle::Legacy(_)) | None => 0,
        }
    }
}

impl Drop for Offer {
    /// Closes the descriptors through [`Foreign`], because a peer may send any kind of descriptor,
    /// and closing some kinds blocks.
    fn drop(&mut self) {
        match self.handle.take() {
            Some(Handle::Descriptor(fd)) => drop(Foreign::from(fd)),
            Some(Handle::Segments(segments)) => {
                let all: Vec<_> = segments.into_iter().map(|(fd, _)| Foreign::from(fd)).collect();
                drop(Batch::from(all));
            }
            Some(Handle::Legacy(_)) | None => {}
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Alloc(AllocId),
    Buffer(u64, Wanted),
}

#[derive(Debug)]
pub(crate) enum Said {
    Export(Offer),
    Request(AllocId),
    Refuse(Ask),
    Publish(u64, Binding),
    Query { buffer: u64, wanted: Wanted, on: bool },
    Unpublish(u64),
    Revoke { sequence: u64, alloc: AllocId },
    RevokeAck { sequence: u64, alloc: AllocId },
}

fn word(body: &mut Reader<'_>) -> Result<u64, HandshakeError> {
    Ok(u64::from_ne_bytes(body.take()?))
}

fn alloc(body: &mut Reader<'_>) -> Result<AllocId, HandshakeError> {
    AllocId::from_key(word(body)?).ok_or(HandshakeError::BadPacket)
}

fn extent(offset: u64, len: u64) -> Result<(u64, u64), HandshakeError> {
    match offset.checked_add(len) {
        Some(end) if len > 0 && end <= isize::MAX as u64 => Ok((offset, len)),
        _ => Err(HandshakeError::BadPacket),
    }
}

/// The sizes must add up to `size`.
fn segments(
    body: &mut Reader<'_>,
    fds: &mut dyn Iterator<Item = Foreign>,
    size: u64,
) -> Result<Vec<(Foreign, u64)>, HandshakeError> {
    let count =
        usize::try_from(word(body)?).ok().filter(|count| (2..=MAX_SEGMENTS).contains(count));
    let mut segments = Vec::new();
    let mut end = 0;
    for _ in 0..count.ok_or(HandshakeError::BadPacket)? {
        let (_, len) = extent(end, word(body)?)?;
        segments.push((fds.next().ok_or(HandshakeError::BadPacket)?, len));
        end += len;
    }
    if end == size { Ok(segments) } else { Err(HandshakeError::BadPacket) }
}

/// Decodes a packet. `home` is true if the peer is this process itself.
pub(crate) fn read(
    kind: u16,
    mut body: Reader<'_>,
    fds: &mut dyn Iterator<Item = Foreign>,
    home: bool,
) -> Result<Said, HandshakeError> {
    let said = match MessageKind::from_wire(kind).ok_or(HandshakeError::BadPacket)? {
        MessageKind::Export => {
            let alloc = alloc(&mut body)?;
            let (_, size) = extent(0, word(&mut body)?)?;
            let uuid = body.take()?;
            let handle = match word(&mut body)? {
                LEGACY => Some(Handle::Legacy(body.take::<LEGACY_HANDLE>()?)),
                DESCRIPTOR => Some(Handle::Descriptor(
                    fds.next().ok_or(HandshakeError::BadPacket)?.into_any(),
                )),
                SEGMENTS => {
                    let segments = segments(&mut body, fds, size)?;
                    Some(Handle::Segments(
                        segments.into_iter().map(|(fd, len)| (fd.into_any(), len)).collect(),
                    ))
                }
                HOME if home => None,
                _ => return Err(HandshakeError::BadPacket),
            };
            Said::Export(Offer { alloc, size, uuid, handle })
        }
        MessageKind::Request => Said::Request(alloc(&mut body)?),
        MessageKind::Refuse => {
            let what = word(&mut body)?;
            let [a, b] = [word(&mut body)?, word(&mut body)?];
            Said::Refuse(match (what, AllocId::from_key(a), b) {
                (1, Some(alloc), 0) => Ask::Alloc(alloc),
                (2, _, version) => Ask::Buffer(a, Wanted::from_wire(version)),
                _ => return Err(HandshakeError::BadPacket),
            })
        }
        MessageKind::Publish => {
            let [buffer, version] = [word(&mut body)?, word(&mut body)?];
            let alloc = alloc(&mut body)?;
            let (offset, len) = extent(word(&mut body)?, word(&mut body)?)?;
            if version == 0 {
                return Err(HandshakeError::BadPacket);
            }
            Said::Publish(buffer, Binding { version, alloc, offset, len })
        }
        MessageKind::Query => {
            let buffer = word(&mut body)?;
            let wanted = Wanted::from_wire(word(&mut body)?);
            let on = match word(&mut body)? {
                0 => false,
                1 => true,
                _ => return Err(HandshakeError::BadPacket),
            };
            Said::Query { buffer, wanted, on }
        }
        MessageKind::Unpublish => Said::Unpublish(word(&mut body)?),
        MessageKind::Revoke => {
            Said::Revoke { sequence: word(&mut body)?, alloc: alloc(&mut body)? }
        }
        MessageKind::RevokeAck => {
            Said::RevokeAck { sequence: word(&mut body)?, alloc: alloc(&mut body)? }
        }
    };
    body.end()?;
    Ok(said)
}

fn packet(kind: MessageKind, words: &[u64]) -> Vec<u8> {
    let mut packet = Writer::extension(kind as u16);
    for word in words {
        packet.put(word.to_ne_bytes());
    }
    packet.finish()
}

/// Encodes an `Export`. The caller sends the descriptors of the handle with the packet.
pub(crate) fn export(alloc: AllocId, size: u64, uuid: &Uuid, handle: Option<&Handle>) -> Vec<u8> {
    let mut packet = Writer::extension(MessageKind::Export as u16);
    packet.put(alloc.key().to_ne_bytes()).put(size.to_ne_bytes()).put(*uuid);
    match handle {
        Some(Handle::Legacy(bytes)) => packet.put(LEGACY.to_ne_bytes()).put(*bytes),
        Some(Handle::Descriptor(_)) => packet.put(DESCRIPTOR.to_ne_bytes()),
        Some(Handle::Segments(segments)) => {
            packet.put(SEGMENTS.to_ne_bytes()).put((segments.len() as u64).to_ne_bytes());
            segments.iter().fold(&mut packet, |packet, (_, size)| packet.put(size.to_ne_bytes()))
        }
        None => packet.put(HOME.to_ne_bytes()),
    };
    packet.finish()
}

pub(crate) fn request(alloc: AllocId) -> Vec<u8> {
    packet(MessageKind::Request, &[alloc.key()])
}

pub(crate) fn refuse(ask: Ask) -> Vec<u8> {
    packet(
        MessageKind::Refuse,
        &match ask {
            Ask::Alloc(alloc) => [1, alloc.key(), 0],
            Ask::Buffer(buffer, wanted) => [2, buffer, wanted.to_wire()],
        },
    )
}

pub(crate) fn publish(buffer: u64, binding: &Binding) -> Vec<u8> {
    let Binding { version, alloc, offset, len } = *binding;
    packet(MessageKind::Publish, &[buffer, version, alloc.key(), offset, len])
}

pub(crate) fn query(buffer: u64, wanted: Wanted, on: bool) -> Vec<u8> {
    packet(MessageKind::Query, &[buffer, wanted.to_wire(), on.into()])
}

pub(crate) fn unpublish(buffer: u64) -> Vec<u8> {
    packet(MessageKind::Unpublish, &[buffer])
}

pub(crate) fn revoke(sequence: u64, alloc: AllocId) -> Vec<u8> {
    packet(MessageKind::Revoke, &[sequence, alloc.key()])
}

pub(crate) fn revoke_ack(sequence: u64, alloc: AllocId) -> Vec<u8> {
    packet(MessageKind::RevokeAck, &[sequence, alloc.key()])
}
