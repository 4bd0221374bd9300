//! Host memory as a device.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

#[test]
fn allocations_have_their_own_pages_and_unique_ids() {
    let mut device = HostDevice::new();
    assert_eq!(device.alloc(0), Err(DeviceError::Exhausted));
    assert_eq!(device.alloc(u64::MAX), Err(DeviceError::Exhausted));
    assert_eq!(device.allocation(DevicePtr(8)), Err(DeviceError::NotDeviceMemory));
    let mut buffers = std::collections::BTreeSet::new();
    for size in [1, 4096, 4097, 1 << 20] {
        let base = device.alloc(size).unwrap();
        let known = device.allocation(base).unwrap();
        assert_eq!((known.base, known.size), (base, size.next_multiple_of(4096)));
        assert!(buffers.insert(known.buffer));
        assert_eq!(device.allocation(base.at(known.size - 1)), Ok(known));
        assert_ne!(device.allocation(base.at(known.size)).ok(), Some(known));
        assert!(device.host_view(base.at(known.size - 8), 8).is_some());
        assert!(device.host_view(base.at(known.size - 8), 9).is_none());
        // SAFETY: nothing uses the memory.
        unsafe {
            device.free(base).unwrap();
            assert_eq!(device.free(base), Err(DeviceError::NotDeviceMemory));
        }
        assert_eq!(device.export(&known).unwrap_err(), DeviceError::NotDeviceMemory);
    }
    assert_eq!(device.held(), (0, 0));
}

#[test]
fn only_sealed_memory_of_another_process_opens_at_its_size() {
    let mut device = HostDevice::new();
    let base = device.alloc(4096).unwrap();
    let allocation = device.allocation(base).unwrap();
    let own = device.export(&allocation).unwrap();
    let other = fishplate_shm::extension::create(8192).unwrap();
    let mut open = |handle: &Handle, size| {
        // SAFETY: the handle names memory that lives until the end of the test, or it is rejected.
        unsafe { device.open(handle, size) }
    };
    assert_eq!(open(&own, 4096), Err(DeviceError::SameProcess));
    assert_eq!(open(&Handle::Legacy([0; LEGACY_HANDLE]), 4096), Err(DeviceError::BadHandle));
    let handle = Handle::Descriptor(other.try_clone().unwrap());
    assert_eq!(open(&handle, 8192), Err(DeviceError::BadHandle), "it could be truncated");
    fishplate_shm::extension::seal(other.as_fd()).unwrap();
    assert_eq!(open(&handle, 4096), Err(DeviceError::BadHandle));
    let there = open(&handle, 8192).unwrap();
    let known = device.allocation(there.at(5000)).unwrap();
    assert_eq!((known.base, known.size), (there, 8192));
    assert_eq!(device.held(), (1, 1));
    // SAFETY: nothing uses the memory.
    unsafe { device.close(there) }.unwrap();
    assert!(device.host_view(there, 1).is_none());
}

#[test]
fn a_word_is_stored_after_earlier_copies() {
    let mut device = HostDevice::new();
    let base = device.alloc(1 << 16).unwrap();
    let mut memory = vec![0u64; 1024];
    memory[3] = 42;
    let ptr = NonNull::from(&mut memory[..]).cast::<u8>();
    // SAFETY: the vector lives until it is unpinned.
    let pinned = unsafe { device.pin(ptr, 8192) }.unwrap();
    assert_eq!(device.host_view(pinned.at(8), 8184), NonNull::new(ptr.as_ptr().wrapping_add(8)));
    let word = device.host_view(base.at(4096), 8).unwrap().cast::<AtomicU64>();
    let word = word.as_ptr() as usize;
    let seen = std::thread::spawn(move || {
        // SAFETY: the word stays mapped until the thread is joined, and is accessed only as an
        // atomic.
        let word = unsafe { AtomicU64::from_ptr(word as *mut u64) };
        while word.load(Ordering::Acquire) != 77 {
            std::thread::yield_now();
        }
        // SAFETY: these 8 bytes are mapped too. They were written before the word, which was loaded
        // with Acquire.
        unsafe { std::ptr::from_ref(word).cast::<u64>().sub(1).read() }
    });
    // SAFETY: all ranges are mapped and do not overlap.
    unsafe {
        device.copy(2, base.at(4088), pinned.at(24), 8).unwrap();
        device.write_word(2, base.at(4096), 77).unwrap();
    }
    assert_eq!(seen.join().unwrap(), 42);
    let mark = device.mark(2).unwrap();
    assert_eq!(device.reached(mark), Ok(true));
    // SAFETY: nothing uses the memory.
    unsafe { device.unpin(ptr) }.unwrap();
    assert!(device.host_view(pinned, 1).is_none());
}
