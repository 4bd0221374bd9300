//! Connects endpoints. One deadline covers the call. Each peer first answers with its address and
//! is then connected. No step blocks, so no peer delays another.

use std::thread;
use std::time::{Duration, Instant};

use fishplate::PeerId;

use crate::dial::{Dial, is_absent};
use crate::error::Error;
use crate::frame::Frame;
use crate::handle::{Ep, EpAddr};
use crate::home::Home;
use crate::table::{find, guard};

const ROUND: Duration = Duration::from_micros(200);

const LOOK: Duration = Duration::from_millis(100);

const FOREVER: Duration = Duration::from_secs(24 * 3600);

enum Stage {
    Asks(Dial),
    Meets(Meeting),
    Reached(PeerId),
    Failed(Error),
}

struct Meeting {
    peer: PeerId,
    /// The peer's epid, if the peer is on this host. Before a peer is connected, only a local
    /// peer's death can be detected.
    local: Option<u64>,
    look: Instant,
}

impl Meeting {
    fn new(peer: PeerId, local: Option<u64>) -> Meeting {
        Meeting { peer, local, look: Instant::now() + LOOK }
    }

    /// Returns whether a peer on this host is known to have died. Checks at most once per [`LOOK`].
    fn is_hopeless(&mut self, now: Instant) -> bool {
        if now < self.look {
            return false;
        }
        self.look = now + LOOK;
        self.local.is_some_and(is_absent)
    }
}

impl Stage {
    fn is_over(&self) -> bool {
        matches!(self, Stage::Reached(_) | Stage::Failed(_))
    }
}

/// Connects endpoints by epid. Connected peers stay connected.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_ep_connect(
    ep: *mut Ep,
    count: i32,
    epids: *const u64,
    mask: *const i32,
    errors: *mut Error,
    addresses: *mut *mut EpAddr,
    timeout: i64,
) -> Error {
    let Ok(count) = usize::try_from(count) else { return Error::PARAM };
    if count == 0 || epids.is_null() || errors.is_null() || addresses.is_null() {
        return Error::PARAM;
    }
    let timeout = match u64::try_from(timeout) {
        Ok(ns @ 1..) => Duration::from_nanos(ns).min(FOREVER),
        _ => FOREVER,
    };
    guard(|| {
        // SAFETY: `epids` was checked not null. PSM2 requires `count` epids, and `count` mask
        // entries unless `mask` is null.
        let wanted = (0..count)
            .map(|at| unsafe { (mask.is_null() || *mask.add(at) != 0).then(|| *epids.add(at)) });
        let wanted: Vec<Option<u64>> = wanted.collect();
        let Some((home, stages)) = connect(ep, &wanted, Instant::now() + timeout) else {
            return Error::PARAM;
        };
        let mut first = Error::OK;
        for (at, stage) in stages.iter().enumerate() {
            let (error, address) = match stage {
                None => (Error::UNKNOWN, std::ptr::null_mut()),
                Some(Stage::Reached(peer)) => (Error::OK, home.address(*peer)),
                Some(Stage::Failed(error)) => (*error, std::ptr::null_mut()),
                Some(Stage::Asks(_)) => (Error::UNREACHABLE, std::ptr::null_mut()),
                Some(Stage::Meets(_)) => (Error::TIMEOUT, std::ptr::null_mut()),
            };
            if stage.is_some() && first == Error::OK {
                first = error;
            }
            // SAFETY: the pointers were checked not null, and PSM2 requires arrays of `count`
            // elements.
            unsafe {
                errors.add(at).write(error);
                if stage.is_some() {
                    addresses.add(at).write(address);
                }
            }
        }
        first
    })
}

/// Returns the stage that each epid has reached, or `None` if the endpoint is not open, or is
/// closed meanwhile.
fn connect(
    ep: *mut Ep,
    wanted: &[Option<u64>],
    deadline: Instant,
) -> Option<(Home, Vec<Option<Stage>>)> {
    let endpoint = find(ep)?;
    let home = endpoint.home;
    let address = endpoint.node.address().to_vec();
    let (uuid, epid, am) = (endpoint.uuid, endpoint.epid, endpoint.am_address());
    let own = Frame { verdict: 0, uuid, epid, address, am };
    drop(endpoint);
    let mut stages: Vec<Option<Stage>> = vec![];
    for epid in wanted {
        stages.push(match epid {
            None => None,
            Some(epid) => Some(begin(home, *epid, &own)?),
        });
    }
    loop {
        let now = Instant::now();
        let mut moved = false;
        for stage in stages.iter_mut().flatten() {
            if let Some(next) = step(home, stage, now)? {
                (*stage, moved) = (next, true);
            }
        }
        if stages.iter().flatten().all(Stage::is_over) || now >= deadline {
            return Some((home, stages));
        }
        let events = home.find()?.progress();
        if !moved && events == 0 {
            thread::sleep(ROUND);
        }
    }
}

fn begin(home: Home, epid: u64, own: &Frame) -> Option<Stage> {
    let mut endpoint = home.find()?;
    // The peer may have connected to us earlier, perhaps without active messages.
    if let Some(peer) = endpoint.peer(epid)
        && (endpoint.am.is_none() || peer.am.is_some())
    {
        let local = Some(epid).filter(|epid| !is_absent(*epid));
        return Some(Stage::Meets(Meeting::new(peer.id, local)));
    }
    if epid != own.epid {
        return Some(Stage::Asks(Dial::new(epid, own)));
    }
    let admitted = endpoint.admit(own);
    Some(admitted.map_or_else(Stage::Failed, |peer| Stage::Meets(Meeting::new(peer, None))))
}

/// The inner `None` means that the stage is unchanged.
fn step(home: Home, stage: &mut Stage, now: Instant) -> Option<Option<Stage>> {
    Some(match stage {
        Stage::Asks(dial) => match dial.step(now) {
            Ok(None) => None,
            Ok(Some(frame)) => {
                let mut endpoint = home.find()?;
                let admitted = endpoint.admit(&frame);
                if let (Ok(peer), Some(line)) = (admitted, dial.take_stream()) {
                    endpoint.keep(peer, line);
                }
                let local = dial.is_local().then_some(frame.epid);
                Some(
                    admitted
                        .map_or_else(Stage::Failed, |peer| Stage::Meets(Meeting::new(peer, local))),
                )
            }
            Err(error) => Some(Stage::Failed(error)),
        },
        Stage::Meets(meeting) => match home.find()?.reached(meeting.peer) {
            Ok(true) => Some(Stage::Reached(meeting.peer)),
            Ok(false) if meeting.is_hopeless(now) => Some(Stage::Failed(Error::EPID_NETWORK)),
            Ok(false) => None,
            Err(error) => Some(Stage::Failed(error)),
        },
        Stage::Reached(_) | Stage::Failed(_) => None,
    })
}

/// Disconnects peers and fails their outstanding requests. Neither mode waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_ep_disconnect2(
    ep: *mut Ep,
    count: i32,
    addresses: *const *mut EpAddr,
    mask: *const i32,
    errors: *mut Error,
    _mode: i32,
    _timeout: i64,
) -> Error {
    let Ok(count) = usize::try_from(count) else { return Error::PARAM };
    if count == 0 || addresses.is_null() || errors.is_null() {
        return Error::PARAM;
    }
    guard(|| {
        let Some(mut endpoint) = find(ep) else { return Error::PARAM };
        let mut first = Error::OK;
        for at in 0..count {
            // SAFETY: `addresses` was checked not null. PSM2 requires `count` addresses, and
            // `count` mask entries unless `mask` is null.
            let wanted =
                unsafe { (mask.is_null() || *mask.add(at) != 0).then(|| *addresses.add(at)) };
            let error = match wanted {
                None => Error::UNKNOWN,
                Some(address) => match endpoint.named(address) {
                    Ok(Some(peer)) => endpoint.dismiss(peer),
                    _ => Error::PARAM,
                },
            };
            if wanted.is_some() && first == Error::OK {
                first = error;
            }
            // SAFETY: `errors` was checked not null, and PSM2 requires an array of `count`
            // elements.
            unsafe { errors.add(at).write(error) };
        }
        first
    })
}
