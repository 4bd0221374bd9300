//! Checks that progress does not wait for an allocation that a message names before it is
//! published.

use fishplate_core::engine::Engine;
use fishplate_core::mem::{PeerId, RailId};
use fishplate_gpu::GpuConfig;
use fishplate_shm::{ShmConfig, socket_pair};

#[path = "../../shm/tests/support/raw.rs"]
mod raw;
#[path = "../../shm/tests/support/requests.rs"]
mod requests;
mod support;
use raw::shared_key;
use requests::{TIMEOUT, requests};
use support::*;

#[test]
fn progress_does_not_wait_for_an_unpublished_allocation() {
    let _alone = alone();
    let gpu = GpuConfig { timeout: TIMEOUT, ..GpuConfig::default() };
    let config = ShmConfig { timeout: TIMEOUT, ..ShmConfig::default() };
    let (near, far) = (gpu_rail(config.clone(), gpu.clone()), gpu_rail(config, gpu));
    let [ours, theirs] = meet_gpu(&near, &far, socket_pair().unwrap());
    let attach =
        |far: &mut TestGpuRail, victim: &mut Engine<'static, TestGpuRail, 1>, peer: PeerId| {
            victim.rail_mut(RailId(0)).unwrap().attach(peer.peer(), ours).unwrap();
            far.attach(PEER, theirs).unwrap();
        };
    let key = |version: u64, alloc: u64| 4 << 60 | version << 32 | alloc;
    requests(near, far, attach, &[key(1, 1), key(2, 77), shared_key(0, 0xdead)]);
}
