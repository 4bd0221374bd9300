//! Checks that progress does not wait for a segment that a message names before its peer announces
//! it.

use fishplate_core::engine::Engine;
use fishplate_core::mem::{PeerId, RailId};
use fishplate_shm::{ShmConfig, socket_pair};

#[path = "support/raw.rs"]
mod raw;
#[path = "support/requests.rs"]
mod requests;
mod support;
use raw::shared_key;
use requests::{TIMEOUT, requests};
use support::*;

#[test]
fn progress_does_not_wait_for_an_unannounced_segment() {
    let _alone = alone();
    let config = ShmConfig { timeout: TIMEOUT, ..ShmConfig::default() };
    let (near, far) = (rail(config.clone()), rail(config));
    let [ours, theirs] = meet(&near, &far, socket_pair().unwrap());
    let attach = |far: &mut TestRail, victim: &mut Engine<'static, TestRail, 1>, peer: PeerId| {
        victim.rail_mut(RailId(0)).unwrap().attach(peer.peer(), ours).unwrap();
        far.attach(PEER, theirs).unwrap();
    };
    requests(
        near,
        far,
        attach,
        &[shared_key(0, 0xdead), shared_key(1, 0xbeef), shared_key(2, u32::MAX)],
    );
}
