//! An engine that uses UCX's tag matching: one worker with an endpoint to itself, over the `self`
//! transport. The library is loaded at run time (Debian: package libucx0). The structures match API
//! version 1.10 and later.
//!
//! The upper 20 bits of UCX's tag contain the source, and the 8 bytes of the message contain the
//! cookie.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use super::engine::{Engine, Pairs, Wanted};

type Status = i8;
type ReceiveDone = unsafe extern "C" fn(*mut c_void, Status, *const c_void, *mut c_void);

#[repr(C)]
struct RequestParam {
    op_attr_mask: u32,
    flags: u32,
    request: *mut c_void,
    receive_done: Option<ReceiveDone>,
    datatype: u64,
    user_data: *mut c_void,
    reply_buffer: *mut c_void,
    memory_type: u64,
    recv_info: *mut c_void,
    memh: *mut c_void,
}

const FIELD_CALLBACK: u32 = 1 << 1;
const FIELD_USER_DATA: u32 = 1 << 2;
const VERSION: (c_uint, c_uint) = (1, 10);
const SOURCE_SHIFT: u32 = 44;
const ALL_TAG: u64 = (1 << SOURCE_SHIFT) - 1;

const PLAIN: RequestParam = RequestParam {
    op_attr_mask: 0,
    flags: 0,
    request: null_mut(),
    receive_done: None,
    datatype: 0,
    user_data: null_mut(),
    reply_buffer: null_mut(),
    memory_type: 0,
    recv_info: null_mut(),
    memh: null_mut(),
};

macro_rules! functions {
    ($($name:ident($($arg:ty),*) $(-> $result:ty)?;)*) => {
        struct Library { $($name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)* }

        impl Library {
            fn open() -> Result<Self, String> {
                // SAFETY: the name is a C string. The library belongs to the system, so its
                // constructors are trusted.
                let library = unsafe { libc::dlopen(c"libucp.so.0".as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err("libucp.so.0 is not installed; on Debian: apt install \
                        libucx0".into());
                }
                Ok(Library { $($name: {
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the library is open, and the name ends with a zero.
                    let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                    if found.is_null() {
                        return Err(format!("libucp.so.0 has no {}", stringify!($name)));
                    }
                    // SAFETY: UCX 1.10's header declares this type for this name.
                    unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($arg),*) $(-> $result)?,
                        >(found)
                    }
                },)* })
            }
        }
    };
}

functions! {
    ucp_config_read(*const c_char, *const c_char, *mut *mut c_void) -> Status;
    ucp_config_modify(*mut c_void, *const c_char, *const c_char) -> Status;
    ucp_config_release(*mut c_void);
    ucp_init_version(c_uint, c_uint, *const [u64; 10], *mut c_void, *mut *mut c_void) -> Status;
    ucp_cleanup(*mut c_void);
    ucp_worker_create(*mut c_void, *const [u64; 25], *mut *mut c_void) -> Status;
    ucp_worker_destroy(*mut c_void);
    ucp_worker_progress(*mut c_void) -> c_uint;
    ucp_worker_get_address(*mut c_void, *mut *mut c_void, *mut usize) -> Status;
    ucp_worker_release_address(*mut c_void, *mut c_void);
    ucp_ep_create(*mut c_void, *const [u64; 13], *mut *mut c_void) -> Status;
    ucp_tag_send_nbx(*mut c_void, *const c_void, usize, u64, *const RequestParam) -> isize;
    ucp_tag_recv_nbx(*mut c_void, *mut c_void, usize, u64, u64, *const RequestParam) -> isize;
    ucp_tag_probe_nb(*mut c_void, u64, u64, c_int, *mut [u64; 2]) -> *mut c_void;
    ucp_tag_msg_recv_nbx(
        *mut c_void, *mut c_void, usize, *mut c_void, *const RequestParam) -> isize;
    ucp_request_cancel(*mut c_void, *mut c_void);
    ucp_request_free(*mut c_void);
}

struct Receive {
    bytes: u64,
    context: u32,
    request: *mut c_void,
    pairs: *mut Pairs,
    free: unsafe extern "C" fn(*mut c_void),
}

pub struct Ucx {
    library: Library,
    ucp: *mut c_void,
    worker: *mut c_void,
    endpoint: *mut c_void,
    receives: Box<[Receive]>,
    pairs: Box<Pairs>,
}

unsafe extern "C" fn receive_done(
    request: *mut c_void,
    status: Status,
    _: *const c_void,
    receive: *mut c_void,
) {
    let receive: *mut Receive = receive.cast();
    // SAFETY: `receive` was passed with the request, and its array outlives all requests. One
    // thread runs all of this, and holds no reference to the receive or the pairs while it calls
    // the library.
    unsafe {
        (*receive).request = null_mut();
        if status == 0 {
            (*(*receive).pairs).add((*receive).context, (*receive).bytes as u32);
        }
        ((*receive).free)(request);
    }
}

fn done(what: &str, status: Status) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{what}: UCX status {status}")) }
}

impl Ucx {
    /// Creates a worker, and an endpoint to itself. Receives have context numbers less than
    /// `contexts`.
    pub fn new(contexts: usize) -> Result<Self, String> {
        let library = Library::open()?;
        let set = |config, name: &CStr, value: &CStr| {
            // SAFETY: `ucp_config_read` below returned the configuration. Name and value are C
            // strings.
            done("ucp_config_modify", unsafe {
                (library.ucp_config_modify)(config, name.as_ptr(), value.as_ptr())
            })
        };
        let (mut config, mut ucp, mut worker, mut endpoint) =
            (null_mut(), null_mut(), null_mut(), null_mut());
        let (mut address, mut len) = (null_mut(), 0);
        // SAFETY: each call gets the arguments that the header requires: room for results, and
        // parameter structures. The field mask of each structure names the fields that are set.
        unsafe {
            done("ucp_config_read", (library.ucp_config_read)(null(), null(), &mut config))?;
            set(config, c"TLS", c"self")?;
            // The field mask and the features are both 1, for tag matching.
            let params = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0];
            done(
                "ucp_init",
                (library.ucp_init_version)(VERSION.0, VERSION.1, &params, config, &mut ucp),
            )?;
            (library.ucp_config_release)(config);
            // The field mask names the thread mode, which is 0: one thread.
            let mut params = [0; 25];
            params[0] = 1;
            done("ucp_worker_create", (library.ucp_worker_create)(ucp, &params, &mut worker))?;
            let got = (library.ucp_worker_get_address)(worker, &mut address, &mut len);
            done("ucp_worker_get_address", got)?;
            let mut params = [0; 13];
            (params[0], params[1]) = (1, address as u64);
            done("ucp_ep_create", (library.ucp_ep_create)(worker, &params, &mut endpoint))?;
            (library.ucp_worker_release_address)(worker, address);
        }
        let mut pairs = Box::new(Pairs::default());
        let (into, free) = (&raw mut *pairs, library.ucp_request_free);
        let receives = (0..contexts as u32)
            .map(|context| Receive { bytes: 0, context, request: null_mut(), pairs: into, free })
            .collect();
        Ok(Ucx { library, ucp, worker, endpoint, receives, pairs })
    }

    fn key(wanted: Wanted) -> (u64, u64) {
        let source_mask = if wanted.source.is_some() { !ALL_TAG } else { 0 };
        let tag = (wanted.source.unwrap_or(0) as u64) << SOURCE_SHIFT | wanted.tag;
        (tag, source_mask | ALL_TAG & !wanted.ignore)
    }

    /// Records the pair if the receive completes at once.
    #[inline(always)]
    fn start(
        &mut self,
        context: u32,
        call: impl FnOnce(&Library, *mut c_void, *mut c_void, &RequestParam) -> isize,
    ) {
        let receive = &raw mut self.receives[context as usize];
        let param = RequestParam {
            op_attr_mask: FIELD_CALLBACK | FIELD_USER_DATA,
            receive_done: Some(receive_done),
            user_data: receive.cast(),
            ..PLAIN
        };
        // SAFETY: `receive` points to an element of the array of receives.
        let bytes = unsafe { &raw mut (*receive).bytes };
        match call(&self.library, self.worker, bytes.cast(), &param) {
            // SAFETY: `receive` points to an element of its array. The library no longer uses the
            // bytes.
            0 => self.pairs.add(context, unsafe { (*receive).bytes } as u32),
            // SAFETY: `receive` points to an element of its array, and no reference to the element
            // exists.
            request if !(-128..0).contains(&request) => unsafe {
                (*receive).request = request as *mut c_void
            },
            status => panic!("a receive: UCX status {status}"),
        }
    }
}

impl Engine for Ucx {
    #[inline(always)]
    fn post(&mut self, wanted: Wanted, context: u32) {
        let (tag, mask) = Self::key(wanted);
        self.start(context, |library, worker, bytes, param| {
            // SAFETY: `self` owns the worker. `bytes` points to 8 bytes that stay in place until
            // the receive completes.
            unsafe { (library.ucp_tag_recv_nbx)(worker, bytes, 8, tag, mask, param) }
        });
    }

    #[inline(always)]
    fn arrive(&mut self, source: u32, tag: u64, cookie: u32) {
        let bytes = cookie as u64;
        let tag = (source as u64) << SOURCE_SHIFT | tag;
        // SAFETY: `self` owns the endpoint. The 8 bytes are sent before the call returns; otherwise
        // the code below panics.
        let request = unsafe {
            (self.library.ucp_tag_send_nbx)(
                self.endpoint,
                (&raw const bytes).cast(),
                8,
                tag,
                &PLAIN,
            )
        };
        assert_eq!(request, 0, "8 bytes to oneself are sent at once");
    }

    fn cancel(&mut self, context: u32) -> bool {
        let request = self.receives[context as usize].request;
        if request.is_null() {
            return false;
        }
        // SAFETY: the request belongs to this worker and is incomplete. Its completion would have
        // cleared the pointer.
        unsafe { (self.library.ucp_request_cancel)(self.worker, request) };
        true
    }

    fn probe(&mut self, wanted: Wanted) -> bool {
        let (tag, mask) = Self::key(wanted);
        let mut info = [0; 2];
        // SAFETY: `self` owns the worker. The probe leaves the message in place.
        !unsafe { (self.library.ucp_tag_probe_nb)(self.worker, tag, mask, 0, &mut info) }.is_null()
    }

    fn claim(&mut self, wanted: Wanted, context: u32) -> bool {
        let (tag, mask) = Self::key(wanted);
        let mut info = [0; 2];
        // SAFETY: `self` owns the worker. The message that the probe takes is received below.
        let message =
            unsafe { (self.library.ucp_tag_probe_nb)(self.worker, tag, mask, 1, &mut info) };
        if message.is_null() {
            return false;
        }
        self.start(context, |library, worker, bytes, param| {
            // SAFETY: `self` owns the worker. `bytes` points to 8 bytes that stay in place until
            // the receive completes. The probe has taken the message, which is received once.
            unsafe { (library.ucp_tag_msg_recv_nbx)(worker, bytes, 8, message, param) }
        });
        true
    }

    fn pairs(&self) -> Pairs {
        // SAFETY: `self` owns the worker.
        unsafe { (self.library.ucp_worker_progress)(self.worker) };
        *self.pairs
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        for context in 0..self.receives.len() as u32 {
            self.cancel(context);
        }
        // SAFETY: nothing uses the worker afterwards, and progress has completed cancelled
        // receives.
        unsafe {
            while (self.library.ucp_worker_progress)(self.worker) != 0 {}
            (self.library.ucp_worker_destroy)(self.worker);
            (self.library.ucp_cleanup)(self.ucp);
        }
    }
}
