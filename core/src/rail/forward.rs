//! Methods of a [`Rail`](super::Rail) that a wrapper takes from the rail inside it.

/// Implements the listed methods of [`Rail`](crate::rail::Rail) for a wrapper. Each calls the same
/// method of the inner rail with the same arguments.
///
/// `self.field` names the inner rail. A wrapper of several kinds of rail passes a macro instead:
/// `each!(self)`, where `each!(self, rail => call)` evaluates `call` with `rail` bound to the inner
/// rail. [`setup`](crate::rail::Rail::setup) cannot be listed, because its type is the wrapper's
/// choice. Deny `clippy::missing_trait_methods` on the `impl`: a method that is neither listed nor
/// written would use the trait's default, which ignores the inner rail.
///
/// ```
/// use fishplate_core::forward_rail;
/// use fishplate_core::rail::{Rail, Sink};
///
/// /// Counts polls.
/// struct Counted<R> {
///     rail: R,
///     polls: u64,
/// }
///
/// #[deny(clippy::missing_trait_methods)]
/// // SAFETY: every call reaches the inner rail, which keeps the promises.
/// unsafe impl<R: Rail> Rail for Counted<R> {
///     type Setup<'a>
///         = R::Setup<'a>
///     where
///         Self: 'a;
///
///     const COPIES: bool = R::COPIES;
///
///     const CLOCK: Option<fn() -> u64> = R::CLOCK;
///
///     fn setup(&mut self) -> R::Setup<'_> {
///         self.rail.setup()
///     }
///
///     fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
///         self.polls += 1;
///         self.rail.poll(budget, sink)
///     }
///
///     forward_rail! { self.rail =>
///         caps register deregister touches import try_import release detach fence late mute
///         fence_left reopen rejoin fences_all is_fenced post_write post_write_checked post_read
///         post_rendezvous_read post_message post_atomic flush copy_to copy_from reads_addresses
///         read_address write_device read_device place_device fetch_device notify doubt check_peers
///     }
/// }
/// ```
#[macro_export]
macro_rules! forward_rail {
    ($self:ident.$field:ident => $($method:ident)*) => {
        $($crate::forward_rail_method! { $method $self [.$field] })*
    };
    ($each:ident!($self:ident) => $($method:ident)*) => {
        $($crate::forward_rail_method! { $method $self [$each!] })*
    };
}

/// Implements one method. `$to` is the inner rail: `[.field]` or `[each!]`.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_rail_method {
    // The methods, in the order of the trait.
    (caps $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] fn caps(&self) -> $crate::rail::Caps
    } };
    (register $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn register(
            &mut self, region: &$crate::mem::Region
        ) -> Result<($crate::rail::RailKey, u64), $crate::error::AttachError>
    } };
    (deregister $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn deregister(
            &mut self, key: $crate::rail::RailKey
        ) -> Result<(), $crate::error::AttachError>
    } };
    (touches $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn touches(&mut self, memory: $crate::rail::Local) -> bool
    } };
    (import $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn import(
            &mut self, peer: $crate::mem::Peer, key: $crate::rail::RailKey, len: u64
        ) -> Result<Option<::core::ptr::NonNull<u8>>, $crate::error::AttachError>
    } };
    (try_import $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn try_import(
            &mut self, peer: $crate::mem::Peer, key: $crate::rail::RailKey, len: u64
        ) -> Result<Option<::core::ptr::NonNull<u8>>, $crate::error::AttachError>
    } };
    (release $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn release(&mut self, peer: $crate::mem::Peer, key: $crate::rail::RailKey)
    } };
    (detach $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn detach(&mut self, peer: $crate::mem::Peer)
    } };
    (fence $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn fence(&mut self, peer: $crate::mem::Peer) -> $crate::rail::Fence
    } };
    (late $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn late(&self) -> u64
    } };
    (mute $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn mute(&mut self, peer: $crate::mem::Peer)
    } };
    (fence_left $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn fence_left(&mut self, peer: $crate::mem::Peer) -> $crate::rail::Fence
    } };
    (reopen $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn reopen(
            &mut self, peer: $crate::mem::Peer, into: &mut [u8; $crate::rail::REOPEN_MAX]
        ) -> Option<usize>
    } };
    (rejoin $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn rejoin(
            &mut self, peer: $crate::mem::Peer, address: &[u8]
        ) -> Result<(), $crate::error::AttachError>
    } };
    (fences_all $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn fences_all(&self) -> bool
    } };
    (is_fenced $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn is_fenced(&self, peer: $crate::mem::Peer) -> bool
    } };
    (post_write $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] unsafe fn post_write(
            &mut self, peer: $crate::mem::Peer, local: $crate::rail::Local,
            remote: $crate::rail::Remote, data: Option<u32>, cx: u64
        ) -> Result<$crate::rail::Posted, $crate::error::PostError>
    } };
    (post_write_checked $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] unsafe fn post_write_checked(
            &mut self, peer: $crate::mem::Peer, local: $crate::rail::Local,
            remote: $crate::rail::Remote, data: u32, cx: u64
        ) -> Result<$crate::rail::Posted, $crate::error::PostError>
    } };
    (post_read $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] unsafe fn post_read(
            &mut self, peer: $crate::mem::Peer, local: $crate::rail::Local,
            remote: $crate::rail::Remote, cx: u64
        ) -> Result<$crate::rail::Posted, $crate::error::PostError>
    } };
    (post_rendezvous_read $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] unsafe fn post_rendezvous_read(
            &mut self, peer: $crate::mem::Peer, local: $crate::rail::Local,
            remote: $crate::rail::Remote, cx: u64
        ) -> Result<$crate::rail::Posted, $crate::error::PostError>
    } };
    (post_message $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] fn post_message(
            &mut self, peer: $crate::mem::Peer, head: &[u8], body: $crate::mem::Untrusted<'_>,
            cx: u64
        ) -> Result<$crate::rail::Posted, $crate::error::PostError>
    } };
    (post_atomic $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] unsafe fn post_atomic(
            &mut self, peer: $crate::mem::Peer, amo: $crate::op::Amo, remote: $crate::rail::Remote,
            fetch: Option<::core::ptr::NonNull<u64>>, cx: u64
        ) -> Result<$crate::rail::Posted, $crate::error::PostError>
    } };
    (poll $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] fn poll<S>(&mut self, budget: u32, sink: &mut S) -> u32
    } };
    (flush $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] fn flush(&mut self)
    } };
    (copy_to $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] unsafe fn copy_to(
            &mut self, peer: $crate::mem::Peer,
            pieces: &[($crate::rail::Local, $crate::rail::Remote)]
        ) -> Option<Result<(), $crate::error::PostError>>
    } };
    (copy_from $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] unsafe fn copy_from(
            &mut self, peer: $crate::mem::Peer,
            pieces: &[($crate::rail::Local, $crate::rail::Remote)]
        ) -> Option<Result<(), $crate::error::PostError>>
    } };
    (reads_addresses $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn reads_addresses(&self, peer: $crate::mem::Peer) -> bool
    } };
    (read_address $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] unsafe fn read_address(
            &mut self, peer: $crate::mem::Peer, local: $crate::rail::Local, address: u64
        ) -> bool
    } };
    (write_device $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] unsafe fn write_device(
            &mut self, to: $crate::rail::Local, from: $crate::mem::Untrusted<'_>
        ) -> Result<(), $crate::error::PostError>
    } };
    (read_device $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] unsafe fn read_device(
            &mut self, from: $crate::rail::Local, into: &mut [u8]
        ) -> Result<(), $crate::error::PostError>
    } };
    (place_device $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] unsafe fn place_device(
            &mut self, to: $crate::rail::Local, from: $crate::mem::Untrusted<'_>, copy: &mut u32
        ) -> Result<(), $crate::error::PostError>
    } };
    (fetch_device $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] unsafe fn fetch_device(
            &mut self, from: $crate::rail::Local, into: &mut [u8], copy: &mut u32
        ) -> Result<(), $crate::error::PostError>
    } };
    (notify $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[inline(always)] fn notify(&mut self, peer: $crate::mem::Peer)
    } };
    (doubt $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        #[cold] fn doubt(&mut self, peer: $crate::mem::Peer, asks: bool) -> Option<u32>
    } };
    (check_peers $self:ident $to:tt) => { $crate::forward_rail_method! { @fn $self $to
        fn check_peers<S>(&mut self, sink: &mut S)
    } };

    (@call $self:ident [.$field:ident] $($call:tt)*) => { $self.$field.$($call)* };
    (@call $self:ident [$each:ident!] $($call:tt)*) => { $each!($self, rail => rail.$($call)*) };

    // Writes a method out: its declaration, with `$self` for `self`, and the call.
    (@fn $self:ident $to:tt $(#[$attribute:meta])*
        fn $name:ident(&self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?
    ) => {
        $(#[$attribute])*
        fn $name(&$self $(, $argument: $type)*) $(-> $result)? {
            $crate::forward_rail_method!(@call $self $to $name($($argument),*))
        }
    };
    (@fn $self:ident $to:tt $(#[$attribute:meta])*
        fn $name:ident $(<$sink:ident>)?(
            &mut self $(, $argument:ident: $type:ty)*
        ) $(-> $result:ty)?
    ) => {
        $(#[$attribute])*
        fn $name $(<$sink: $crate::rail::Sink>)?(
            &mut $self $(, $argument: $type)*
        ) $(-> $result)? {
            $crate::forward_rail_method!(@call $self $to $name($($argument),*))
        }
    };
    (@fn $self:ident $to:tt $(#[$attribute:meta])*
        unsafe fn $name:ident(&mut self $(, $argument:ident: $type:ty)*) -> $result:ty
    ) => {
        $(#[$attribute])*
        unsafe fn $name(&mut $self $(, $argument: $type)*) -> $result {
            // SAFETY: our caller guarantees the same contract.
            unsafe { $crate::forward_rail_method!(@call $self $to $name($($argument),*)) }
        }
    };
}
