//! Structures and operation tables of libfabric, in C's layout and with their C names.
//!
//! The fields are documented in `fi_getinfo(3)`, `fi_domain(3)`, `fi_endpoint(3)`, `fi_cq(3)`,
//! `fi_av(3)`, `fi_mr(3)`, `fi_rma(3)`, `fi_msg(3)` and `fi_atomic(3)`. Written for version 1.17.
//! Later libraries only append fields to these structures. So:
//!
//! - only the library allocates attributes (`fi_info` and everything below it), with `fi_dupinfo`;
//! - an attribute structure of this package is passed as [`Tailed`]: zeros follow where a later
//!   library may have fields;
//! - a table begins with its size in bytes, and an [`entry`] is called only if it lies inside the
//!   table and is not null;
//! - a structure that the library writes to our memory ([`fi_cq_err_entry`]) is as long as in every
//!   requested version.
//!
//! Entries that this package does not call have type [`Unused`], which keeps the offsets of the
//! other entries.
#![allow(non_camel_case_types, reason = "the names are those of the C headers")]
#![allow(missing_docs, reason = "the manual pages named above document them")]
#![allow(clippy::type_complexity, reason = "an operation has as many arguments as it has")]

mod attr;
mod constants;
mod data;
mod object;

pub use attr::*;
pub use constants::*;
pub use data::*;
pub use object::*;

use core::ffi::c_void;

pub type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tailed<T> {
    pub value: T,
    pub tail: [u64; 8],
}

impl<T> Tailed<T> {
    pub const fn new(value: T) -> Self {
        Tailed { value, tail: [0; 8] }
    }
}

/// A table of operations, which begins with its size in bytes.
///
/// # Safety
/// The type is `repr(C)`. It consists of `size: usize`, followed only by nullable function
/// pointers.
pub unsafe trait Table {}

macro_rules! tables {
    ($($table:ty),* $(,)?) => {$(
        // SAFETY: each listed type is `repr(C)` and defined in this module as `size`, then function
        // pointers.
        unsafe impl Table for $table {}
    )*};
}

tables! {
    fi_ops, fi_ops_fabric, fi_ops_domain, fi_ops_mr, fi_ops_av, fi_ops_cq, fi_ops_ep, fi_ops_cm,
    fi_ops_msg, fi_ops_rma, fi_ops_atomic,
}

/// Returns an entry of a table. Returns `None` if the table is missing or too short, or the entry
/// is null.
///
/// # Safety
/// `table` is null, or points to a table as long as its first word says.
#[inline]
pub unsafe fn entry<T: Table, F: Copy>(table: *const T, offset: usize) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>(), "a function pointer") };
    if table.is_null() {
        return None;
    }
    // SAFETY: our caller guarantees that the table is as long as its first word says. The entry is
    // read only if it lies inside the table.
    unsafe {
        let size = table.cast::<usize>().read();
        if size < offset + size_of::<F>() {
            return None;
        }
        let place = table.cast::<u8>().add(offset);
        if place.cast::<*const c_void>().read().is_null() {
            return None;
        }
        Some(place.cast::<F>().read())
    }
}
