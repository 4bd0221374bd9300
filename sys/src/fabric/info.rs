//! `fi_info`: the offers of providers, and hints. Slow path. The library allocates and frees all
//! `fi_info` structures, because they may be longer than our declarations.

use alloc::string::String;
use alloc::vec::Vec;
use core::ffi::{CStr, c_char, c_int};
use core::fmt;
use core::ptr::{self, NonNull};

use super::error::{CallError, Code};
use super::library::{Library, copy_string};
use super::raw::*;

impl Library {
    /// Returns the library's text for an `fi_info`.
    #[doc(alias = "fi_tostr")]
    pub fn show(&self, info: &Info) -> String {
        // SAFETY: the `fi_info` is complete. The result is in a thread-local buffer, and is copied
        // at once.
        unsafe { copy_string((self.entries.tostr)(info.as_ptr().cast(), FI_TYPE_INFO)) }
            .unwrap_or_default()
    }

    /// Returns the offers that match `hints`, best first. `node` is the remote address, or the
    /// local address with `FI_SOURCE`.
    ///
    /// # Errors
    /// `FI_ENODATA` if nothing matches, or another code of the library.
    #[doc(alias = "fi_getinfo")]
    pub fn getinfo(
        &self,
        node: Option<&CStr>,
        service: Option<&CStr>,
        flags: u64,
        hints: &Hints,
    ) -> Result<Vec<Info>, CallError> {
        let text = |string: Option<&CStr>| string.map_or(ptr::null::<c_char>(), CStr::as_ptr);
        let mut list: *mut fi_info = ptr::null_mut();
        // SAFETY: the strings and hints are valid during the call, and the result is written to
        // `list`.
        let returned = unsafe {
            let (node, service, hints) = (text(node), text(service), hints.as_ptr());
            (self.entries.getinfo)(self.api_version(), node, service, flags, hints, &mut list)
        };
        CallError::check("fi_getinfo", returned as isize)?;
        let mut found = Vec::new();
        let mut next = list;
        while !next.is_null() {
            // SAFETY: `next` is an entry of the library's list, which ends with null.
            unsafe {
                found.extend(Info::copy_of(*self, next));
                next = (*next).next;
            }
        }
        // SAFETY: the library allocated the list, and nothing points into it any more.
        unsafe { (self.entries.freeinfo)(list) };
        Ok(found)
    }
}

/// One offer: a provider, one of its domains, and the attributes of its endpoints.
pub struct Info {
    library: Library,
    ptr: NonNull<fi_info>,
}

// SAFETY: this value owns its structure, and nothing in the structure is tied to a thread.
unsafe impl Send for Info {}
// SAFETY: a shared reference only reads the structure.
unsafe impl Sync for Info {}

impl Info {
    /// Copies one entry of a list.
    ///
    /// # Safety
    /// `entry` points to a valid entry.
    pub(super) unsafe fn copy_of(library: Library, entry: *const fi_info) -> Option<Info> {
        // SAFETY: our caller guarantees a valid entry.
        let ptr = NonNull::new(unsafe { (library.entries().dupinfo)(entry) })?;
        let info = Info { library, ptr };
        // SAFETY: `fi_dupinfo` just created the structure. A structure that lacks one of the five
        // parts is rejected here.
        let whole = unsafe {
            let raw = ptr.as_ref();
            !(raw.tx_attr.is_null()
                || raw.rx_attr.is_null()
                || raw.ep_attr.is_null()
                || raw.domain_attr.is_null()
                || raw.fabric_attr.is_null())
        };
        whole.then_some(info)
    }

    /// Returns the library that made the offer.
    pub fn library(&self) -> Library {
        self.library
    }

    /// Returns a pointer to the structure.
    pub fn as_ptr(&self) -> *mut fi_info {
        self.ptr.as_ptr()
    }

    /// Returns the structure. The pointers to its five parts are not null.
    pub fn raw(&self) -> &fi_info {
        // SAFETY: this value owns the structure until drop. The library's structure is at least as
        // long as ours.
        unsafe { self.ptr.as_ref() }
    }

    /// Returns the transmit attributes.
    pub fn tx(&self) -> &fi_tx_attr {
        // SAFETY: `copy_of` checked that the pointer is not null.
        unsafe { &*self.raw().tx_attr }
    }

    /// Returns the receive attributes.
    pub fn rx(&self) -> &fi_rx_attr {
        // SAFETY: `copy_of` checked that the pointer is not null.
        unsafe { &*self.raw().rx_attr }
    }

    /// Returns the endpoint attributes.
    pub fn ep(&self) -> &fi_ep_attr {
        // SAFETY: `copy_of` checked that the pointer is not null.
        unsafe { &*self.raw().ep_attr }
    }

    /// Returns the domain attributes.
    pub fn domain(&self) -> &fi_domain_attr {
        // SAFETY: `copy_of` checked that the pointer is not null.
        unsafe { &*self.raw().domain_attr }
    }

    pub(super) fn fabric_attr(&self) -> *mut fi_fabric_attr {
        self.raw().fabric_attr
    }

    /// Returns the provider's name with its layers, such as `tcp;ofi_rxm`.
    pub fn provider(&self) -> String {
        // SAFETY: the library sets the name to null or a C string, and `copy_of` checked
        // `fabric_attr`.
        unsafe { copy_string((*self.raw().fabric_attr).prov_name) }.unwrap_or_default()
    }

    /// Returns the fabric's name.
    pub fn fabric_name(&self) -> String {
        // SAFETY: the library sets the name to null or a C string, and `copy_of` checked
        // `fabric_attr`.
        unsafe { copy_string((*self.raw().fabric_attr).name) }.unwrap_or_default()
    }

    /// Returns the domain's name: an interface for `tcp`, the provider's own name for `shm`,
    /// otherwise a device.
    pub fn domain_name(&self) -> String {
        // SAFETY: the library sets the name to null or a C string.
        unsafe { copy_string(self.domain().name) }.unwrap_or_default()
    }

    /// Returns the provider's own version: major, minor.
    pub fn provider_version(&self) -> (u32, u32) {
        // SAFETY: `copy_of` checked that the pointer is not null.
        let version = unsafe { (*self.raw().fabric_attr).prov_version };
        (version >> 16, version & 0xffff)
    }

    /// Returns the source address in the provider's format. Empty if the provider has not chosen
    /// one yet.
    pub fn source(&self) -> Vec<u8> {
        let raw = self.raw();
        if raw.src_addr.is_null() {
            return Vec::new();
        }
        // SAFETY: the address is not null, and the provider sets its length.
        unsafe { core::slice::from_raw_parts(raw.src_addr.cast::<u8>(), raw.src_addrlen) }.to_vec()
    }

    /// Returns the NIC's PCI address, if known: domain, bus, device, function.
    pub fn pci(&self) -> Option<(u16, u8, u8, u8)> {
        // SAFETY: each pointer is null or leads to a valid structure, and `as_ref` checks for null.
        unsafe {
            let bus = self.raw().nic.as_ref()?.bus_attr.as_ref()?;
            let pci = bus.pci;
            (bus.bus_type == FI_BUS_PCI).then_some((
                pci.domain_id,
                pci.bus_id,
                pci.device_id,
                pci.function_id,
            ))
        }
    }

    /// Returns the NIC's speed in bits per second, if known.
    pub fn link_speed(&self) -> Option<u64> {
        // SAFETY: each pointer is null or leads to a valid structure, and `as_ref` checks for null.
        let speed = unsafe { self.raw().nic.as_ref()?.link_attr.as_ref()?.speed as u64 };
        (speed != 0).then_some(speed)
    }
}

impl Clone for Info {
    fn clone(&self) -> Self {
        // SAFETY: this value owns a complete structure. The library returns null only when it is
        // out of memory.
        unsafe { Info::copy_of(self.library, self.as_ptr()) }.expect("memory for a copy")
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: the library's `fi_dupinfo` made the structure, and this value frees it once.
        unsafe { (self.library.entries().freeinfo)(self.ptr.as_ptr()) }
    }
}

impl fmt::Debug for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.provider(), self.fabric_name(), self.domain_name())
    }
}

/// Callers get no mutable access to the structures, because the library follows their pointers.
macro_rules! hints {
    ($($(#[$doc:meta])* $set:ident: $field:ident of $part:ident as $number:ty;)*) => {$(
        $(#[$doc])*
        pub fn $set(&mut self, value: $number) {
            hints!(@set self, $part, $field, value);
        }
    )*};
    (@set $self:ident, raw, $field:ident, $value:ident) => {
        $self.raw().$field = $value;
    };
    (@set $self:ident, $part:ident, $field:ident, $value:ident) => {
        // SAFETY: `copy_of` checked that the pointer to this part is not null.
        unsafe { (*$self.raw().$part).$field = $value }
    };
}

/// Hints for [`Library::getinfo`]: an `fi_info` to fill in.
#[derive(Debug)]
pub struct Hints(Info);

impl Hints {
    /// Allocates empty hints.
    ///
    /// # Errors
    /// `ENOMEM` if the library is out of memory.
    #[doc(alias = "fi_allocinfo")]
    pub fn new(library: Library) -> Result<Hints, CallError> {
        // SAFETY: `fi_dupinfo` accepts null, and then allocates an empty structure with all its
        // parts.
        let info = unsafe { Info::copy_of(library, ptr::null()) };
        info.map(Hints).ok_or(CallError { call: "fi_allocinfo", code: Code(libc::ENOMEM) })
    }

    /// Returns a pointer to the structure.
    pub fn as_ptr(&self) -> *const fi_info {
        self.0.as_ptr()
    }

    fn raw(&mut self) -> &mut fi_info {
        // SAFETY: this value owns the structure until drop. The library's structure is at least as
        // long as ours.
        unsafe { self.0.ptr.as_mut() }
    }

    hints! {
        /// Sets `fi_info.caps`.
        set_caps: caps of raw as u64;
        /// Sets `fi_info.mode`.
        set_mode: mode of raw as u64;
        /// Sets `fi_ep_attr.type`.
        set_endpoint_type: r#type of ep_attr as c_int;
        /// Sets `fi_tx_attr.op_flags`.
        set_op_flags: op_flags of tx_attr as u64;
        /// Sets `fi_tx_attr.msg_order`.
        set_send_order: msg_order of tx_attr as u64;
        /// Sets `fi_tx_attr.inject_size`.
        set_inject_size: inject_size of tx_attr as usize;
        /// Sets `fi_domain_attr.mr_mode`.
        set_mr_mode: mr_mode of domain_attr as c_int;
        /// Sets `fi_domain_attr.data_progress`.
        set_data_progress: data_progress of domain_attr as c_int;
        /// Sets `fi_domain_attr.threading`.
        set_threading: threading of domain_attr as c_int;
        /// Sets `fi_domain_attr.resource_mgmt`.
        set_resource_mgmt: resource_mgmt of domain_attr as c_int;
    }

    /// Requests a provider by name.
    pub fn set_provider(&mut self, name: &CStr) {
        // SAFETY: the C library allocates the new string, and `fi_freeinfo` frees it with the C
        // library's `free`. The previous string is null or was allocated in the same way.
        unsafe {
            let attr = &mut *self.raw().fabric_attr;
            libc::free(attr.prov_name.cast());
            attr.prov_name = libc::strdup(name.as_ptr());
        }
    }

    /// Requests a domain by name.
    pub fn set_domain(&mut self, name: &CStr) {
        // SAFETY: the C library allocates the new string, and `fi_freeinfo` frees it with the C
        // library's `free`. The previous string is null or was allocated in the same way.
        unsafe {
            let attr = &mut *self.raw().domain_attr;
            libc::free(attr.name.cast());
            attr.name = libc::strdup(name.as_ptr());
        }
    }
}
