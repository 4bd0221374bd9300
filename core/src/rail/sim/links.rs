//! Records which links are cut, and which endpoints have fenced a peer.

/// Maximum number of endpoints, which is the number of nodes times the number of rails.
pub(super) const ENDPOINTS: usize = 64;

/// The state of all links, indexed by endpoint. Each `u64` of flags has one bit per node.
pub(super) struct Cuts {
    /// `cut`: the link from this endpoint to the node is cut. `broken`: a cut has broken the
    /// attachment, which stays broken until the endpoint is attached again. `late`: traffic on a
    /// broken link may land up to this many polls late.
    pub(super) cut: [u64; ENDPOINTS],
    pub(super) broken: [u64; ENDPOINTS],
    pub(super) late: [u32; ENDPOINTS],
    /// Time at which the cut is reported.
    pub(super) told_at: [u64; ENDPOINTS],
    pub(super) muted: [u64; ENDPOINTS],
    /// `fenced`: the node is fenced at this endpoint. `fencing`: it will be fenced at time
    /// `fenced_at`.
    pub(super) fenced: [u64; ENDPOINTS],
    pub(super) fencing: [u64; ENDPOINTS],
    pub(super) fenced_at: [u64; ENDPOINTS],
}

impl Cuts {
    pub(super) const NONE: Cuts = Cuts {
        cut: [0; ENDPOINTS],
        broken: [0; ENDPOINTS],
        late: [0; ENDPOINTS],
        told_at: [0; ENDPOINTS],
        muted: [0; ENDPOINTS],
        fenced: [0; ENDPOINTS],
        fencing: [0; ENDPOINTS],
        fenced_at: [0; ENDPOINTS],
    };

    pub(super) fn reported(&self, endpoint: usize, now: u64) -> u64 {
        if now < self.told_at[endpoint] { 0 } else { self.broken[endpoint] }
    }

    /// Called when the node is attached again.
    pub(super) fn open(&mut self, endpoint: usize, node: u16) {
        self.muted[endpoint] &= !(1 << node);
        self.fenced[endpoint] &= !(1 << node);
        self.fencing[endpoint] &= !(1 << node);
        self.broken[endpoint] &= self.cut[endpoint] | !(1 << node);
    }

    pub(super) fn heal(&mut self, endpoint: usize, node: u16) {
        self.cut[endpoint] &= !(1 << node);
    }

    pub(super) fn is_cut(&self, endpoint: u16, node: u16) -> bool {
        self.cut[endpoint as usize] & 1 << node != 0
    }

    pub(super) fn is_broken(&self, endpoint: u16, node: u16) -> bool {
        self.broken[endpoint as usize] & 1 << node != 0
    }

    pub(super) fn is_fenced(&self, endpoint: u16, node: u16) -> bool {
        self.fenced[endpoint as usize] & 1 << node != 0
    }
}
