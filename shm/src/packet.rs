//! The packets of the socket. Slow path: encoding allocates. Decoding first checks magic, version,
//! kind and length, in this order.
//!
//! | bytes | field                                          |
//! |-------|------------------------------------------------|
//! | 0..8  | magic                                          |
//! | 8..10 | version of the protocol                        |
//! | 10..12| kind                                           |
//! | 12..16| length of the whole packet, in bytes           |
//! | 16..  | body                                           |
//!
//! Both ends run on one machine, so numbers are in native byte order. The magic number and the
//! version have the same offsets in every version.

use std::ops::RangeInclusive;

use crate::error::HandshakeError;

/// The first word of every packet and of every lane segment.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"fishplat");

/// Version of the protocol. It covers the packets, the layout of lanes, their records, and the
/// engine's messages in them.
pub(crate) const VERSION: u16 = 6;

/// 128 random bits that identify one end of one link.
pub type Nonce = [u8; 16];

pub(crate) const HEAD: usize = 16;

/// Maximum length of a blob of [`exchange`](crate::Link::exchange), in bytes.
pub const MAX_BLOB: usize = 64 * 1024;

pub(crate) const MAX_PACKET: usize = HEAD + MAX_BLOB;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacketKind {
    Hello,
    /// Echoes the peer's nonce, and carries our descriptors.
    Offer,
    /// Reports that we have mapped and checked all of the peer's memory.
    Ready,
    Blob,
    /// Announces a segment that may hold regions, and carries its descriptor.
    Announce,
    /// Withdraws a segment that no longer holds a region.
    Withdraw,
    Bye,
    /// Asks a peer that sleeps on its sockets to poll its lane.
    Ring,
    /// One of [`EXTENSIONS`].
    Extension(u16),
}

/// Packet kinds that other packages may define.
pub const EXTENSIONS: RangeInclusive<u16> = 0x100..=u16::MAX;

impl PacketKind {
    fn from_wire(value: u16) -> Option<Self> {
        Some(match value {
            1 => PacketKind::Hello,
            2 => PacketKind::Offer,
            3 => PacketKind::Ready,
            4 => PacketKind::Blob,
            5 => PacketKind::Announce,
            6 => PacketKind::Withdraw,
            7 => PacketKind::Bye,
            8 => PacketKind::Ring,
            other if EXTENSIONS.contains(&other) => PacketKind::Extension(other),
            _ => return None,
        })
    }

    fn to_wire(self) -> u16 {
        match self {
            PacketKind::Hello => 1,
            PacketKind::Offer => 2,
            PacketKind::Ready => 3,
            PacketKind::Blob => 4,
            PacketKind::Announce => 5,
            PacketKind::Withdraw => 6,
            PacketKind::Bye => 7,
            PacketKind::Ring => 8,
            PacketKind::Extension(kind) => kind,
        }
    }
}

/// Encodes a packet.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn new(kind: PacketKind) -> Self {
        let mut writer = Writer { bytes: Vec::with_capacity(128) };
        writer
            .put(MAGIC.to_ne_bytes())
            .put(VERSION.to_ne_bytes())
            .put(kind.to_wire().to_ne_bytes())
            .put([0; 4]);
        writer
    }

    /// Begins a packet of an extension.
    pub fn extension(kind: u16) -> Self {
        Self::new(PacketKind::Extension(kind))
    }

    /// Appends a field.
    pub fn put<const N: usize>(&mut self, field: [u8; N]) -> &mut Self {
        self.extend(&field)
    }

    /// Appends bytes.
    pub fn extend(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Returns the complete packet.
    pub fn finish(mut self) -> Vec<u8> {
        let len = self.bytes.len() as u32;
        self.bytes[12..HEAD].copy_from_slice(&len.to_ne_bytes());
        self.bytes
    }
}

/// Decodes a packet.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn open(packet: &'a [u8]) -> Result<(PacketKind, Self), HandshakeError> {
        let mut head = Reader { rest: packet };
        if u64::from_ne_bytes(head.take()?) != MAGIC {
            return Err(HandshakeError::BadPacket);
        }
        let theirs = u16::from_ne_bytes(head.take()?);
        if theirs != VERSION {
            return Err(HandshakeError::Version { theirs, ours: VERSION });
        }
        let kind = PacketKind::from_wire(u16::from_ne_bytes(head.take()?))
            .ok_or(HandshakeError::BadPacket)?;
        if u32::from_ne_bytes(head.take()?) as usize != packet.len() {
            return Err(HandshakeError::BadPacket);
        }
        Ok((kind, head))
    }

    /// Checks the header of an extension's packet, and returns the packet's kind and a reader of
    /// its body.
    ///
    /// # Errors
    /// The packet is malformed, or its kind does not belong to an extension.
    pub fn extension(packet: &'a [u8]) -> Result<(u16, Self), HandshakeError> {
        match Self::open(packet)? {
            (PacketKind::Extension(kind), body) => Ok((kind, body)),
            _ => Err(HandshakeError::BadPacket),
        }
    }

    /// Reads the next field.
    ///
    /// # Errors
    /// Fewer than `N` bytes remain.
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N], HandshakeError> {
        let (field, rest) = self.rest.split_first_chunk::<N>().ok_or(HandshakeError::BadPacket)?;
        self.rest = rest;
        Ok(*field)
    }

    /// Returns the remaining bytes.
    pub fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// Checks that no bytes remain.
    ///
    /// # Errors
    /// Bytes remain.
    pub fn end(self) -> Result<(), HandshakeError> {
        if self.rest.is_empty() { Ok(()) } else { Err(HandshakeError::BadPacket) }
    }
}
