//! An engine and the memory that it borrows, in one value that can be stored and moved.

use std::mem::ManuallyDrop;
use std::ptr::{NonNull, addr_of, addr_of_mut};
use std::sync::Arc;

use fishplate_core::engine::protocol::{MatchConfig, RecvSlot};
use fishplate_core::engine::tag::PostedSlot;
use fishplate_core::engine::{Config, ContextId, Engine, Waiter};
use fishplate_core::error::AttachError;
use fishplate_core::psm::MqState;
use fishplate_core::rail::Rails;
use fishplate_core::sync::event::{EventCount, Park};
use fishplate_core::sync::host::{Host, Woken};
use fishplate_core::sync::spin::Policy;
use fishplate_gpu::{Bell, GpuWaitObject};
use fishplate_shm::WaitObject;
use fishplate_sys::LinuxHost;

use super::rail::NodeRail;
use super::sleep::Sleep;
use crate::config::RAILS_LIMIT;
use crate::storage::{FailoverStorage, Limits, MatchStorage, Storage};

pub(super) const CONTEXT: ContextId = ContextId(0);

pub(super) type NodeEngine = Engine<'static, NodeRail, RAILS_LIMIT>;

pub(super) type NodeWaiter = Waiter<'static, LinuxHost, NodeWaitObject>;

/// The wait object of a node: the wait object of its first rail, alone or with a set of
/// descriptors.
#[derive(Clone)]
pub(super) struct NodeWaitObject {
    first: FirstWaitObject,
    set: Option<Arc<Sleep>>,
}

#[derive(Clone)]
pub(super) enum FirstWaitObject {
    Shm(WaitObject),
    Gpu(GpuWaitObject),
}

impl NodeWaitObject {
    pub fn new(first: FirstWaitObject, set: Option<Sleep>) -> NodeWaitObject {
        NodeWaitObject { first, set: set.map(Arc::new) }
    }

    /// Returns a bell that ends the current sleep.
    pub fn bell(&self) -> Bell {
        let (wait_object, host) = (self.clone(), LinuxHost::shared());
        Bell::new(move || {
            wait_object.event().notify_with(&host, || {
                if let Some(sleep) = wait_object.elsewhere() {
                    sleep.ring();
                }
            });
        })
    }

    /// Returns the eventcount that peers notify.
    pub fn event(&self) -> &EventCount {
        match &self.first {
            FirstWaitObject::Shm(wait_object) => wait_object,
            FirstWaitObject::Gpu(wait_object) => wait_object.event(),
        }
    }

    /// Makes the last check for work before a sleep of at most `timeout_ns`. Returns the maximum
    /// length of the sleep in nanoseconds, or `None` if `work` returns true.
    pub fn look(&self, timeout_ns: u64, work: impl FnOnce() -> bool) -> Option<u64> {
        match &self.first {
            FirstWaitObject::Shm(_) => (!work()).then_some(timeout_ns),
            FirstWaitObject::Gpu(wait_object) => wait_object.look(timeout_ns, work),
        }
    }

    /// Returns the maximum lengths of a sleep early and late in a wait, in nanoseconds. `network`
    /// is `true` if the node has libfabric rails. Libfabric rails that cannot end a sleep must be
    /// polled.
    pub fn longest(&self, network: bool) -> [u64; 2] {
        match network && self.elsewhere().is_none() {
            true => [100_000, 1_000_000],
            false => [10_000_000, 10_000_000],
        }
    }

    /// Returns the set of descriptors that the node sleeps on, if it has one.
    pub fn elsewhere(&self) -> Option<&Sleep> {
        self.set.as_deref()
    }
}

impl Park for NodeWaitObject {
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        let look = || self.look(timeout_ns, work);
        match self.elsewhere() {
            None => {
                let mut longest_ns = None;
                let armed = self.event().prepare(host).recheck(|| {
                    longest_ns = look();
                    longest_ns.is_none()
                })?;
                Some(armed.commit(host, longest_ns?))
            }
            Some(sleep) => sleep.park([self.event()], host, || {
                // SAFETY: no other thread uses the rails, because a waiter sleeps only inside a
                // call with exclusive access to the node.
                look().and_then(|timeout_ns| unsafe { sleep.advised(timeout_ns) })
            }),
        }
    }
}

struct Parts {
    storage: Storage<RAILS_LIMIT>,
    matching: MatchStorage<RAILS_LIMIT>,
    failover: Option<FailoverStorage>,
    /// Longer tables of requests. They have replaced the first tables.
    grown: Option<Grown>,
    host: LinuxHost,
    wait_object: NodeWaitObject,
}

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub config: Config,
    pub matching: MatchConfig,
    pub limits: Limits,
    pub receives: usize,
    pub requests: usize,
    pub failover: bool,
}

pub(super) struct Home {
    /// Boxed, so that nodes take little of a stack.
    pub engine: ManuallyDrop<Box<NodeEngine>>,
    /// The waiter for the start of a wait.
    pub waiter: ManuallyDrop<NodeWaiter>,
    /// The waiter for the rest of a long wait.
    pub sleeper: ManuallyDrop<NodeWaiter>,
    pub queue: Option<MqState>,
    /// The room for requests, and its limit.
    room: usize,
    requests: usize,
    parts: NonNull<Parts>,
}

static_assertions::assert_impl_all!(NodeEngine: Send);
static_assertions::assert_impl_all!(NodeWaiter: Send);
static_assertions::assert_impl_all!(MqState: Send);
static_assertions::assert_impl_all!(Parts: Send);

// SAFETY: everything inside is `Send`, as asserted above, except the pointer to the parts, which
// only this value uses.
unsafe impl Send for Home {}

impl Home {
    /// Builds the engine over the rails that `add` adds. `wait_object` belongs to the first rail.
    ///
    /// # Errors
    /// The same as [`Engine::new_in`], [`Engine::attach_matching`] and [`Engine::attach_failover`].
    pub fn new(
        sizes: Sizes,
        add: impl FnOnce(&mut Rails<NodeRail, RAILS_LIMIT>),
        host: LinuxHost,
        wait_object: NodeWaitObject,
        [policy, later]: [Policy; 2],
    ) -> Result<Home, AttachError> {
        let Sizes { config, matching, limits, receives, requests, failover } = sizes;
        let streams = usize::from(limits.peers) * usize::from(config.contexts);
        // A program with a queue receives through the queue alone.
        let room = if requests == 0 { receives } else { requests.min(FIRST_REQUESTS) };
        let parts = Box::new(Parts {
            storage: Storage::new(&config, limits),
            matching: MatchStorage::new(
                &matching,
                streams,
                room,
                OUTGOING.max(requests.min(FIRST_REQUESTS)),
            ),
            failover: failover.then(|| FailoverStorage::new(&config, limits)),
            grown: None,
            host,
            wait_object,
        });
        let parts = Parked(NonNull::from(Box::leak(parts)));
        // SAFETY: the five fields are disjoint, and each is borrowed once, here. They do not move
        // and are not accessed otherwise until `Parked` is dropped. The engine and the waiters are
        // dropped before that: here because they are declared later, and in `Home` because its drop
        // starts with them.
        let (storage, memory, failover, host, wait_object) = unsafe {
            let parts = parts.0.as_ptr();
            (
                &mut *addr_of_mut!((*parts).storage),
                (*addr_of_mut!((*parts).matching)).memory(),
                (*addr_of_mut!((*parts).failover)).as_mut(),
                &*addr_of!((*parts).host),
                &*addr_of!((*parts).wait_object),
            )
        };
        let mut engine = Box::new_uninit();
        Engine::new_in(&mut engine, config, add, storage.memory())?;
        // SAFETY: `new_in` has initialized the engine.
        let mut engine = unsafe { engine.assume_init() };
        engine.attach_matching(matching, memory)?;
        if let Some(failover) = failover {
            engine.attach_failover(failover.memory())?;
        }
        let waiter = Waiter::new(host, wait_object, policy);
        let sleeper = Waiter::new(host, wait_object, later).napping();
        let place = parts.0;
        std::mem::forget(parts);
        Ok(Home {
            engine: ManuallyDrop::new(engine),
            waiter: ManuallyDrop::new(waiter),
            sleeper: ManuallyDrop::new(sleeper),
            queue: (requests != 0).then(|| MqState::new(CONTEXT)),
            room,
            requests,
            parts: place,
        })
    }

    #[cold]
    pub fn grow_requests(&mut self) -> bool {
        let len = (2 * self.room).min(self.requests);
        if self.queue.is_none() || len <= self.room {
            return false;
        }
        let mut grown = Grown::new(len);
        // SAFETY: the memory of a vector stays where it is if the vector is moved, as it is below.
        // Nothing else uses it until the engine is dropped or has longer tables.
        let (receives, posted) = unsafe {
            (
                &mut *std::ptr::from_mut(&mut grown.receives[..]),
                &mut *std::ptr::from_mut(&mut grown.posted[..]),
            )
        };
        self.room = len;
        self.engine.grow_receives(receives, posted);
        // SAFETY: the parts live as long as this value, and only this code uses the field. The
        // engine has just released its old contents.
        unsafe { *addr_of_mut!((*self.parts.as_ptr()).grown) = Some(grown) };
        true
    }

    pub fn wait_object(&self) -> &NodeWaitObject {
        // SAFETY: the parts live as long as this value, and only shared references to this field
        // exist.
        unsafe { &*addr_of!((*self.parts.as_ptr()).wait_object) }
    }

    pub fn host(&self) -> &LinuxHost {
        self.waiter.host()
    }
}

/// Initial room of a queue, in requests, unless its limit is lower.
const FIRST_REQUESTS: usize = 1 << 14;

struct Grown {
    receives: Vec<RecvSlot>,
    posted: Vec<PostedSlot>,
}

impl Grown {
    fn new(len: usize) -> Grown {
        Grown { receives: vec![RecvSlot::EMPTY; len], posted: vec![PostedSlot::EMPTY; len] }
    }
}

/// Minimum number of payloads from slices that can wait to be posted, for
/// [`MatchMemory::outgoing`](fishplate_core::engine::protocol::MatchMemory::outgoing). A queue has
/// room for one such payload per initial request.
const OUTGOING: usize = 64;

/// Frees the parts, unless a [`Home`] takes them.
struct Parked(NonNull<Parts>);

impl Drop for Parked {
    fn drop(&mut self) {
        // SAFETY: `Home::new` leaked the box, and only this drop frees it, after all borrowers were
        // dropped.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // SAFETY: each field is dropped only here, before the parts that it borrows.
        unsafe {
            ManuallyDrop::drop(&mut self.waiter);
            ManuallyDrop::drop(&mut self.sleeper);
            ManuallyDrop::drop(&mut self.engine);
        }
        drop(Parked(self.parts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Node;
    use crate::node::{Builder, Fabric, Gpu};
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn a_bell_ends_a_sleep_on_a_word_and_one_on_descriptors() {
        let builder = || Node::builder().fabric(Fabric::Off).gpu(Gpu::StandIn);
        let sleeps: [fn(Builder) -> Builder; 2] = [|builder| builder, Builder::wait_fd];
        for (at, change) in sleeps.into_iter().enumerate() {
            let (_node, wait_object) = change(builder()).open_here().unwrap();
            assert_eq!(wait_object.elsewhere().is_some(), at == 1);
            let (bell, begun) = (wait_object.bell(), Instant::now());
            let woken = thread::scope(|scope| {
                let sleeper = scope.spawn(|| {
                    let (host, event) = (LinuxHost::shared(), wait_object.event());
                    let long_ns = 20_000_000_000;
                    match wait_object.elsewhere() {
                        None => event.park(&host, long_ns, || false),
                        Some(sleep) => sleep.park([event], &host, || Some(long_ns)),
                    }
                });
                while !wait_object.event().is_announced() {
                    thread::yield_now();
                }
                bell.ring();
                sleeper.join().unwrap()
            });
            assert_eq!(woken, Some(Woken::Called));
            assert!(begun.elapsed() < Duration::from_secs(10), "it slept on");
        }
    }
}
