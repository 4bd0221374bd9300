//! Tests the contract of [`Device`] with all implementations: host memory, the fakes, CUDA and HIP.
//! CUDA and HIP use a real driver or a simulated driver (`tests/cuda-fake.sh`, `tests/gpu.sh`). The
//! second process runs this test binary again.

use std::sync::OnceLock;

use fishplate_gpu::fake::{Behaviour, FakeDevice, FakeDriver, FakeProcess, MemoryKind, Violation};
use fishplate_gpu::{Device, DeviceError, DevicePtr, HostDevice, Unshared};
#[cfg(feature = "hip")]
use fishplate_gpu::{Handle, LEGACY_HANDLE};

mod support;

#[path = "device/second.rs"]
mod second;
#[path = "device/suite.rs"]
mod suite;

/// An implementation of [`Device`], and its test fixtures.
trait Kit {
    type Device: Device;

    /// The implementation's name, which the second process receives.
    const NAME: &str;

    /// Opens a device. Returns `None` for an ordinal that this kind cannot have.
    fn open(ordinal: u32) -> Option<Result<Self::Device, DeviceError>>;

    /// Returns why the implementation cannot be tested on this machine, or `None` if it can.
    fn absent() -> Option<String> {
        None
    }

    /// Returns memory that cannot be exported, with the reasons.
    fn unshared(_: &mut Self::Device) -> Vec<(DevicePtr, Unshared)> {
        vec![]
    }

    /// Returns memory in adjacent physical segments of [`SEGMENT`](suite::SEGMENT) bytes, if this
    /// kind supports it.
    fn segments(_: &mut Self::Device, _size: u64) -> Option<DevicePtr> {
        None
    }

    /// Returns the number of objects that are still open, if it is known.
    fn held(_: &Self::Device) -> u64 {
        0
    }
}

fn first<K: Kit>() -> K::Device {
    K::open(0).expect("there is a first device").unwrap()
}

/// Returns the process of one of two fake drivers. If `late` is true, the driver's copies finish
/// late.
fn fake(late: bool) -> FakeProcess {
    static DRIVERS: [OnceLock<FakeProcess>; 2] = [OnceLock::new(), OnceLock::new()];
    let behaviour = if late {
        Behaviour {
            kind: MemoryKind::Virtual,
            handles_differ: true,
            segment: suite::SEGMENT,
            ..Behaviour::LATE
        }
    } else {
        Behaviour { segment: suite::SEGMENT, ..Behaviour::PLAIN }
    };
    DRIVERS[usize::from(late)].get_or_init(|| FakeDriver::of_this_process(behaviour, 1)).clone()
}

/// The fake driver. With `LATE`, its copies are late and out of order, and memory is exported by
/// descriptors.
struct Fake<const LATE: bool>;

impl<const LATE: bool> Kit for Fake<LATE> {
    type Device = FakeDevice;
    const NAME: &str = if LATE { "fake-late" } else { "fake" };

    fn open(ordinal: u32) -> Option<Result<FakeDevice, DeviceError>> {
        Some(fake(LATE).device(ordinal))
    }

    fn unshared(device: &mut FakeDevice) -> Vec<(DevicePtr, Unshared)> {
        let kinds = [
            (MemoryKind::Pool, Unshared::Pool),
            (MemoryKind::Managed, Unshared::Managed),
            (MemoryKind::VirtualUnshared, Unshared::NoHandleType),
        ];
        kinds.map(|(kind, why)| (device.alloc_as(kind, 4096).unwrap(), why)).into()
    }

    fn segments(device: &mut FakeDevice, size: u64) -> Option<DevicePtr> {
        Some(device.alloc_as(MemoryKind::Segments, size).unwrap())
    }

    /// Returns the number of opened allocations. Checks that there was no violation, except for
    /// unknown marks, which one test uses on purpose.
    fn held(device: &FakeDevice) -> u64 {
        let found = device.process().driver().violations();
        assert!(found.iter().all(|what| *what == Violation::UnknownMark), "{found:?}");
        let counts = device.process().counts();
        counts.opens - counts.closes
    }
}

/// Host memory as a device.
struct Host;

impl Kit for Host {
    type Device = HostDevice;
    const NAME: &str = "host";

    fn open(ordinal: u32) -> Option<Result<HostDevice, DeviceError>> {
        (ordinal == 0).then(|| Ok(HostDevice::new()))
    }

    fn held(device: &HostDevice) -> u64 {
        device.held().1 as u64
    }
}

/// Defines the implementations over one driver interface, and tests of that driver.
#[cfg(any(feature = "cuda", feature = "hip"))]
macro_rules! driver {
    ($module:ident, $api:ident) => {
        mod $module {
            use super::*;
            use fishplate_gpu::cuda::{Api, CudaConfig, CudaDevice, CudaMemory};

            const API: Api = Api::$api;

            fn open(ordinal: u32, memory: CudaMemory) -> Option<Result<CudaDevice, DeviceError>> {
                let config = CudaConfig { memory, marks: 32, ..CudaConfig::default() };
                Some(CudaDevice::open(API, ordinal, config))
            }

            fn absent() -> Option<String> {
                match API.devices() {
                    Err(why) => Some(why.to_string()),
                    Ok(devices) => devices.is_empty().then(|| "the driver has no device".into()),
                }
            }

            fn unshared(device: &mut CudaDevice) -> Vec<(DevicePtr, Unshared)> {
                let mut kinds = vec![(CudaMemory::Managed, Unshared::Managed)];
                let told = &API.devices().unwrap()[0];
                if told.pools && stringify!($api) == "Cuda" {
                    kinds.push((CudaMemory::Pool, Unshared::Pool));
                }
                if told.descriptors {
                    kinds.push((CudaMemory::VirtualUnshared, Unshared::NoHandleType));
                }
                kinds
                    .into_iter()
                    .map(|(kind, why)| (device.alloc_as(kind, 4096).unwrap(), why))
                    .collect()
            }

            fn segments(device: &mut CudaDevice, size: u64) -> Option<DevicePtr> {
                let able = API.devices().unwrap()[0].descriptors;
                able.then(|| {
                    device.alloc_as(CudaMemory::Segments(super::suite::SEGMENT), size).unwrap()
                })
            }

            /// Memory exported by handles of 64 bytes.
            pub struct Legacy;

            impl Kit for Legacy {
                type Device = CudaDevice;
                const NAME: &str = stringify!($module);

                fn open(ordinal: u32) -> Option<Result<CudaDevice, DeviceError>> {
                    open(ordinal, CudaMemory::Legacy)
                }

                fn absent() -> Option<String> {
                    absent()
                }

                fn unshared(device: &mut CudaDevice) -> Vec<(DevicePtr, Unshared)> {
                    unshared(device)
                }

                fn segments(device: &mut CudaDevice, size: u64) -> Option<DevicePtr> {
                    segments(device, size)
                }
            }

            /// Memory exported by descriptors.
            pub struct Virtual;

            impl Kit for Virtual {
                type Device = CudaDevice;
                const NAME: &str = concat!(stringify!($module), "-virtual");

                fn open(ordinal: u32) -> Option<Result<CudaDevice, DeviceError>> {
                    open(ordinal, CudaMemory::Virtual)
                }

                fn absent() -> Option<String> {
                    absent().or_else(|| {
                        let able = API.devices().is_ok_and(|devices| devices[0].descriptors);
                        (!able).then(|| "the device has no memory by descriptors".into())
                    })
                }

                fn unshared(device: &mut CudaDevice) -> Vec<(DevicePtr, Unshared)> {
                    unshared(device)
                }

                fn segments(device: &mut CudaDevice, size: u64) -> Option<DevicePtr> {
                    segments(device, size)
                }
            }

            #[test]
            fn the_driver_s_description_is_complete() {
                match (API.version(), API.devices()) {
                    (Err(why), Err(same)) => {
                        assert_eq!(why, same);
                        let driver = format!("{} driver", stringify!($api).to_uppercase());
                        assert!(why.to_string().contains(&driver), "{why}");
                        let error = CudaDevice::open(API, 0, CudaConfig::default()).unwrap_err();
                        assert!(
                            matches!(error, DeviceError::NoDriver | DeviceError::Driver(_)),
                            "{error}"
                        );
                    }
                    (Ok(version), Ok(devices)) => {
                        let (name, number) = version.split_once(' ').unwrap();
                        assert_eq!(name, stringify!($api).to_uppercase());
                        assert!(
                            number.parse::<f32>().is_ok_and(|number| number >= 6.0),
                            "{version}"
                        );
                        for (at, device) in devices.iter().enumerate() {
                            assert_eq!(device.ordinal, at as u32);
                            assert!(
                                !device.name.is_empty()
                                    && device.memory > 0
                                    && device.uuid != [0; 16]
                            );
                            assert!(device.reaches.contains(&device.ordinal), "{device:?}");
                        }
                    }
                    other => panic!("{other:?}"),
                }
            }

            #[test]
            fn memory_of_another_device_is_refused() {
                let (Ok(mut first), Ok(mut second)) =
                    (Legacy::open(0).unwrap(), Legacy::open(1).unwrap())
                else {
                    println!("skipped: there are no two devices");
                    return;
                };
                let base = second.alloc(4096).unwrap();
                let refused = DeviceError::OtherDevice { owner: 1, asked: 0 };
                assert_eq!(first.allocation(base.at(8)), Err(refused));
                assert_eq!(refused.to_string(), "the memory belongs to device 1, not to device 0");
                assert_eq!(second.allocation(base.at(8)).unwrap().base, base);
                let own = first.alloc(4096).unwrap();
                assert_eq!(first.allocation(own).unwrap().base, own);
                // SAFETY: no work is queued.
                unsafe { (second.free(base).unwrap(), first.free(own).unwrap()) };
            }

            #[test]
            fn a_device_works_in_any_thread() {
                if let Some(why) = absent() {
                    println!("SKIPPED a_device_works_in_any_thread: {why}");
                    return;
                }
                let mut device = first::<Legacy>();
                let base = device.alloc(4096).unwrap();
                let mut device = std::thread::spawn(move || {
                    assert_eq!(device.allocation(base).unwrap().base, base);
                    device
                })
                .join()
                .unwrap();
                // SAFETY: no work is queued.
                unsafe { device.free(base) }.unwrap();
            }
        }
    };
}

#[cfg(feature = "cuda")]
driver!(cuda, Cuda);
#[cfg(feature = "hip")]
driver!(hip, Hip);

/// Calls on a device leave the current device of their thread unchanged.
#[cfg(feature = "hip")]
#[test]
fn hip_memory_lies_on_its_device_and_a_thread_keeps_its_current_one() {
    let _alone = support::alone();
    let open = |ordinal| <hip::Legacy as Kit>::open(ordinal).unwrap();
    let (Ok(mut first), Ok(mut second)) = (open(0), open(1)) else {
        println!("skipped: there are no two devices");
        return;
    };
    // SAFETY: the names end with a zero byte. HIP's header declares these arguments.
    let (get, set, attribute) = unsafe {
        let library = libc::dlopen(c"libamdhip64.so".as_ptr(), libc::RTLD_NOW);
        let find = |name: &std::ffi::CStr| libc::dlsym(library, name.as_ptr());
        (
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut i32) -> u32>(find(
                c"hipGetDevice",
            )),
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> u32>(find(
                c"hipSetDevice",
            )),
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut i32, u32, u64) -> u32>(
                find(c"hipPointerGetAttribute"),
            ),
        )
    };
    for now in [1, 0] {
        assert_eq!(set(now), 0);
        for (ordinal, device) in [&mut first, &mut second].into_iter().enumerate() {
            let base = device.alloc(4096).unwrap();
            let (mut owner, mut current) = (-1, -1);
            // `HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
            assert_eq!((attribute(&mut owner, 9, base.0), owner), (0, ordinal as i32));
            assert_eq!((get(&mut current), current), (0, now));
            // SAFETY: no work is queued.
            unsafe { device.free(base) }.unwrap();
        }
    }
}

/// A failed call leaves no error that a later check by the program would find.
#[cfg(feature = "hip")]
#[test]
fn hip_calls_that_fail_leave_no_error() {
    let _alone = support::alone();
    if let Some(why) = <hip::Legacy as Kit>::absent() {
        println!("SKIPPED hip_calls_that_fail_leave_no_error: {why}");
        return;
    }
    // SAFETY: the names end with a zero byte. HIP's header declares these arguments.
    let (take, set, version) = unsafe {
        let library = libc::dlopen(c"libamdhip64.so".as_ptr(), libc::RTLD_NOW);
        let find = |name: &std::ffi::CStr| libc::dlsym(library, name.as_ptr());
        (
            std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u32>(find(
                c"hipGetLastError",
            )),
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> u32>(find(
                c"hipSetDevice",
            )),
            std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut i32) -> u32>(find(
                c"hipDriverGetVersion",
            )),
        )
    };
    let mut device = first::<hip::Legacy>();
    assert_eq!(take(), 0, "opening the device");
    assert_eq!(device.allocation(DevicePtr(64)), Err(DeviceError::NotDeviceMemory));
    assert_eq!(take(), 0, "an unknown address");
    // SAFETY: nothing uses memory that the handle might open.
    assert!(unsafe { device.open(&Handle::Legacy([0xa5; LEGACY_HANDLE]), 4096) }.is_err());
    assert_eq!(take(), 0, "an invalid handle");
    assert!(device.dmabuf(DevicePtr(64), 4096).is_none());
    assert_eq!(take(), 0, "a range without memory");
    let base = device.alloc(4096).unwrap();
    assert_eq!(device.allocation(base).unwrap().base, base);
    assert_eq!(take(), 0, "memory that is not virtual");
    let mark = device.mark(0).unwrap();
    while !device.reached(mark).unwrap() {
        assert_eq!(take(), 0, "an event that is not complete");
    }
    let mut now = 0;
    if version(&mut now) == 0 && now >= 70_000_000 {
        let own = set(1000);
        assert_ne!(own, 0);
        let mark = device.mark(0).unwrap();
        while !device.reached(mark).unwrap() {}
        assert_eq!(take(), own, "the program's own error");
    }
    // SAFETY: no work is queued.
    unsafe { device.free(base) }.unwrap();
}

/// Runs the second process, if this process is a child.
#[test]
fn child() {
    let Some((role, address)) = support::role() else { return };
    match role.as_str() {
        Host::NAME => second::serve::<Host>(&address),
        Fake::<false>::NAME => second::serve::<Fake<false>>(&address),
        Fake::<true>::NAME => second::serve::<Fake<true>>(&address),
        #[cfg(feature = "cuda")]
        cuda::Legacy::NAME => second::serve::<cuda::Legacy>(&address),
        #[cfg(feature = "cuda")]
        cuda::Virtual::NAME => second::serve::<cuda::Virtual>(&address),
        #[cfg(feature = "hip")]
        hip::Legacy::NAME => second::serve::<hip::Legacy>(&address),
        #[cfg(feature = "hip")]
        hip::Virtual::NAME => second::serve::<hip::Virtual>(&address),
        other => panic!("{other}"),
    }
}

/// Defines one test per function of the suite, for one kind of device.
macro_rules! suite {
    ($module:ident, $kit:ty) => {
        suite!($module, $kit:
            devices_have_numbers,
            a_place_lies_in_an_allocation,
            addresses_come_back_and_buffers_do_not,
            copies_arrive_whole,
            a_stream_keeps_its_order,
            marks_run_out_and_are_reused,
            a_bell_rings_once_after_its_mark,
            a_word_follows_what_it_tells_of,
            another_process_has_the_same_memory,
            segments_side_by_side_are_one_memory_to_another_process,
            a_range_over_segments_is_registered_as_one,
            an_allocation_is_opened_once,
            garbage_does_not_open,
            a_handle_of_this_process_does_not_open,
            unexportable_memory_names_the_reason,
            the_call_that_flushes_remote_writes_is_taken,
            only_what_is_pinned_is_seen_and_only_set_marks_are_known,
        );
    };
    ($module:ident, $kit:ty: $($test:ident,)*) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    let _alone = super::support::alone();
                    match <$kit as super::Kit>::absent() {
                        None => super::suite::$test::<$kit>(),
                        Some(why) => println!("SKIPPED {}: \
                            {why}", concat!(stringify!($module), "::", stringify!($test))),
                    }
                }
            )*
        }
    };
}

suite!(on_host, super::Host);
suite!(on_fake, super::Fake<false>);
suite!(on_fake_late, super::Fake<true>);
#[cfg(feature = "cuda")]
suite!(on_cuda, super::cuda::Legacy);
#[cfg(feature = "cuda")]
suite!(on_cuda_virtual, super::cuda::Virtual);
#[cfg(feature = "hip")]
suite!(on_hip, super::hip::Legacy);
#[cfg(feature = "hip")]
suite!(on_hip_virtual, super::hip::Virtual);
