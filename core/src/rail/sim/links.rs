//! Which links were cut, and which ends have fenced a peer.

/// Nodes times rails.
pub(super) const ENDPOINTS: usize = 64;

/// By endpoint, and in its words by node.
pub(super) struct Cuts {
    /// The link from there to the node is cut, and traffic posted on it may be this many polls
    /// late.
    pub(super) cut: [u64; ENDPOINTS],
    pub(super) late: [u32; ENDPOINTS],
    /// When that is reported.
    pub(super) told_at: [u64; ENDPOINTS],
    /// The node was fenced there, or is going to be, once time has come.
    pub(super) fenced: [u64; ENDPOINTS],
    pub(super) fencing: [u64; ENDPOINTS],
    pub(super) fenced_at: [u64; ENDPOINTS],
}

impl Cuts {
    pub(super) const NONE: Cuts = Cuts {
        cut: [0; ENDPOINTS],
        late: [0; ENDPOINTS],
        told_at: [0; ENDPOINTS],
        fenced: [0; ENDPOINTS],
        fencing: [0; ENDPOINTS],
        fenced_at: [0; ENDPOINTS],
    };

    /// The nodes that an endpoint is to be told of, by bit.
    pub(super) fn reported(&self, endpoint: usize, now: u64) -> u64 {
        if now < self.told_at[endpoint] { 0 } else { self.cut[endpoint] }
    }

    /// An endpoint is attached to a node anew.
    pub(super) fn open(&mut self, endpoint: usize, node: u16) {
        self.fenced[endpoint] &= !(1 << node);
        self.fencing[endpoint] &= !(1 << node);
    }

    pub(super) fn is_cut(&self, endpoint: u16, node: u16) -> bool {
        self.cut[endpoint as usize] & 1 << node != 0
    }
}
