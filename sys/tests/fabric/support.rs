//! Loads the libfabric under test and opens rails on it. `FISHPLATE_LIBFABRIC` names another
//! library.

use std::env;
use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Duration;

use fishplate_core::error::PostError;
use fishplate_core::mem::Untrusted;
use fishplate_sys::fabric::rail::{DeviceMemory, Dmabuf, Interface};
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, Library, LoadError, negotiate};

/// A deadline for tests that wait until it expires. It is longer than connecting takes on a loaded
/// machine: rxm looks for connections only every 10 ms.
pub const SHORT: Duration = Duration::from_millis(300);

/// A configuration so small that every table fills up.
pub const SMALL: FabricConfig = FabricConfig {
    max_peers: 16,
    max_message: 1024,
    depth: 32,
    receives: 64,
    bounces: 8,
    max_regions: 8,
    max_imports: 16,
    completions: 0,
    deadline: Some(Duration::from_secs(20)),
    inject: true,
    more: None,
    native_atomics: false,
    seed: None,
};

fn loaded() -> &'static Result<Library, LoadError> {
    static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
    let path = env::var("FISHPLATE_LIBFABRIC").ok().and_then(|path| CString::new(path).ok());
    // SAFETY: the tester names a libfabric, or the linker finds the library with libfabric's name.
    LIBRARY.get_or_init(|| unsafe { Library::open(path.as_deref()) })
}

/// Returns why the library cannot be loaded, if it cannot.
pub fn absent() -> Option<String> {
    loaded().as_ref().err().map(LoadError::to_string)
}

/// Returns the installed library.
pub fn library() -> Library {
    loaded().clone().unwrap_or_else(|error| panic!("{error}"))
}

/// Opens a rail, on the loopback interface if the provider has interfaces.
pub fn open(ask: &Ask<'_>, config: FabricConfig, seed: u64) -> FabricRail {
    let interface = if ask.provider == "shm" { None } else { Some("lo") };
    let offer =
        negotiate(library(), &Ask { interface, ..*ask }).unwrap_or_else(|error| panic!("{error}"));
    let config = FabricConfig { seed: Some(seed), ..config };
    FabricRail::open(&offer, config).unwrap_or_else(|error| panic!("{error}"))
}

/// Makes a module of conformance tests per line. A line has a name, a request, a configuration, and
/// the reason if a deregistered region may still be written.
macro_rules! rails {
    ($($name:ident: $ask:expr, $config:expr, $reaches_on:expr;)*) => {$(
        mod $name {
            use super::*;

            pub struct Ends;

            impl Fixture for Ends {
                type Rail = FabricRail;
                const REACHES_ON: Option<&'static str> = $reaches_on;
                const LANDS_LATE: Option<&'static str> = Some(TAKEN);
                const IMPORTS_UNSEEN: Option<&'static str> = Some("only the target knows the \
                    length of a region");


                fn absent() -> Option<String> {
                    support::absent()
                }

                fn link(seed: u64) -> Link<FabricRail> {
                    pair(&$ask, $config, seed)
                }

                fn impatient(seed: u64) -> Link<FabricRail> {
                    pair(&$ask, FabricConfig { deadline: Some(support::SHORT), ..$config }, seed)
                }

                fn kill_target(link: &mut Link<FabricRail>) -> bool {
                    kill(link)
                }
            }

            rail_conformance!(conformance_suite, Ends);
        }
    )*};
}
pub(crate) use rails;

/// Device memory without any registration. The rail still flushes the device, and each flush calls
/// the closure.
pub struct Flushed<F>(pub F);

// SAFETY: the device has no memory, so it exports and copies nothing.
unsafe impl<F: FnMut() + Send> DeviceMemory for Flushed<F> {
    fn interface(&self) -> Interface {
        Interface::Cuda
    }

    fn ordinal(&self) -> u32 {
        0
    }

    fn dmabuf(&mut self, _: NonNull<u8>, _: usize) -> Option<Dmabuf> {
        None
    }

    fn must_flush(&self) -> bool {
        true
    }

    fn flush(&mut self) -> Result<(), i32> {
        (self.0)();
        Ok(())
    }

    unsafe fn write_device(&mut self, _: NonNull<u8>, _: Untrusted<'_>) -> Result<(), PostError> {
        Err(PostError::Unsupported)
    }

    unsafe fn read_device(&mut self, _: NonNull<u8>, _: &mut [u8]) -> Result<(), PostError> {
        Err(PostError::Unsupported)
    }

    fn is_copying(&mut self) -> bool {
        false
    }
}
