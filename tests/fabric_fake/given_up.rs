//! Tests that memory counts as in use while an abandoned copy between host and device continues.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fishplate::direct;
use fishplate::gpu::Device;
use fishplate::gpu::fake::{Behaviour, FakeDriver};
use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::Untrusted;
use fishplate_core::rail::{Local, Rail};
use fishplate_sys::fabric::rail::{DeviceMemory, Dmabuf, Interface};
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Fake, Persona};

use crate::conformance::leaked;
use crate::devices::{Devices, region};
use crate::fixture::Checked;

/// A device. Its copies to device memory fail, but continue in the background while the flag is
/// set.
struct Slow(Box<dyn DeviceMemory>, Arc<AtomicBool>);

// SAFETY: forwards to the inner device, which upholds the contract. A failing call copies nothing.
unsafe impl DeviceMemory for Slow {
    fn interface(&self) -> Interface {
        self.0.interface()
    }

    fn ordinal(&self) -> u32 {
        self.0.ordinal()
    }

    fn dmabuf(&mut self, ptr: NonNull<u8>, len: usize) -> Option<Dmabuf> {
        self.0.dmabuf(ptr, len)
    }

    fn must_flush(&self) -> bool {
        self.0.must_flush()
    }

    fn flush(&mut self) -> Result<(), i32> {
        self.0.flush()
    }

    unsafe fn write_device(&mut self, _: NonNull<u8>, _: Untrusted<'_>) -> Result<(), PostError> {
        Err(PostError::Provider(libc::ETIMEDOUT))
    }

    unsafe fn read_device(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.read_device(from, into) }
    }

    fn is_copying(&mut self) -> bool {
        self.1.load(Ordering::Relaxed)
    }
}

#[test]
fn memory_stays_in_use_until_an_abandoned_copy_finishes() {
    let persona = Persona::efa_direct().with_devices();
    let fake = Checked(Fake::new(persona.clone(), 1));
    let process = FakeDriver::new(Behaviour::PLAIN, 1).process();
    fake.0.join_devices(Arc::new(Devices([process.clone(), process.clone()])));
    let mut device = process.device(0).unwrap();
    let ask =
        Ask { interface: Some(persona.interfaces[0]), devices: true, ..Ask::new("efa-direct") };
    let offer = negotiate(fake.0.library(), &ask).unwrap();
    let mut rail = FabricRail::open(&offer, FabricConfig::default()).unwrap();
    let copies = Arc::new(AtomicBool::new(true));
    rail.reach(Box::new(Slow(direct(process.device(0).unwrap(), Interface::Cuda), copies.clone())))
        .unwrap();
    let [used, freed, host] = [
        region(device.alloc(4096).unwrap(), 4096),
        region(device.alloc(4096).unwrap(), 4096),
        leaked(64),
    ]
    .map(|memory| {
        let (key, desc) = rail.register(&memory).unwrap();
        (key, Local { ptr: memory.ptr(), len: memory.len(), desc })
    });
    assert!(!rail.touches(used.1));
    // SAFETY: the target is registered device memory.
    let placed = unsafe { rail.write_device(used.1, Untrusted::from_slice(&[1; 8])) };
    assert_eq!(placed, Err(PostError::Provider(libc::ETIMEDOUT)));
    // The rail does not know which device memory the copy uses, so all of it counts as in use.
    assert_eq!([used, freed, host].map(|(_, local)| rail.touches(local)), [true, true, false]);
    assert_eq!(rail.deregister(freed.0), Err(AttachError::Kept(libc::EBUSY)));
    assert!(!rail.touches(freed.1));
    copies.store(false, Ordering::Relaxed);
    assert!(!rail.touches(used.1));
    assert_eq!(rail.deregister(used.0), Ok(()));
}
