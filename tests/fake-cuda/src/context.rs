//! A context handle is a constant plus the device's ordinal, and never an address.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::{
    CONTEXT, Code, INVALID_CONTEXT, INVALID_VALUE, answer, code, current, library, ordinal, put,
    start,
};

const FIRST: usize = 0x1000;

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> Code {
    if flags != 0 {
        return INVALID_VALUE;
    }
    start();
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(unsafe { put(version, 12_060) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(library().and_then(|library| unsafe { put(count, library.process.devices() as c_int) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, wanted: c_int) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(
        library()
            .and_then(|library| ordinal(library, wanted))
            .and_then(|_| unsafe { put(device, wanted) }),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Code {
    let outcome = library().and_then(|library| ordinal(library, device));
    let outcome = outcome.and(if len > 0 { Ok(()) } else { Err(INVALID_VALUE) });
    answer(outcome.map(|()| {
        let text = b"Fishplate fake GPU\0";
        let fits = text.len().min(len as usize);
        // SAFETY: the caller provides `len` bytes, and `text` ends with a zero byte.
        unsafe {
            name.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), fits);
            name.add(fits - 1).write(0);
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(
        library()
            .and_then(|library| ordinal(library, device))
            .and_then(|_| unsafe { put(bytes, 1 << 34) }),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    device: c_int,
) -> Code {
    let outcome = library().and_then(|library| {
        let ordinal = ordinal(library, device)?;
        let behaviour = library.process.driver().behaviour();
        // The keys are attribute numbers from cuda.h.
        let told = match attribute {
            33 => ordinal as c_int + 1,
            34 | 50 => 0,
            41 | 102 | 103 | 110 | 115 | 116 | 117 => 1,
            118 if behaviour.must_flush => 0,
            118 => 200,
            122 => c_int::from(behaviour.write_word),
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: the driver's documentation requires the caller to pass valid arguments.
        unsafe { put(value, told) }
    });
    answer(outcome)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> Code {
    let found = library().and_then(|library| {
        let ordinal = ordinal(library, device)?;
        library.process.uuid(ordinal).map_err(code)
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|found| unsafe { put(uuid, found) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> Code {
    let found = library().and_then(|library| {
        let (one, other) = (ordinal(library, device)?, ordinal(library, peer)?);
        let uuid = library.process.uuid(other).map_err(code)?;
        Ok(one != other && library.process.reaches(one, &uuid))
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|found| unsafe { put(can, c_int::from(found)) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> Code {
    let found = library().and_then(|library| ordinal(library, device));
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(
        found
            .and_then(|ordinal| unsafe { put(context, (FIRST + ordinal as usize) as *mut c_void) }),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Code {
    answer(library().and_then(|library| ordinal(library, device)).map(|_| ()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> Code {
    let handle = CONTEXT.get().map_or(0, |ordinal| FIRST + ordinal as usize);
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(library().and_then(|_| unsafe { put(context, handle as *mut c_void) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(current().and_then(|(_, ordinal)| unsafe { put(device, ordinal as c_int) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> Code {
    let found = library().and_then(|library| {
        if context.is_null() {
            return Ok(None);
        }
        let device = (context as usize).checked_sub(FIRST).and_then(|at| c_int::try_from(at).ok());
        ordinal(library, device.ok_or(INVALID_CONTEXT)?).map(Some)
    });
    answer(found.map(|ordinal| CONTEXT.set(ordinal)))
}
