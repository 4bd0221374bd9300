//! Memory that tests hand out as `'static`. Without a [`Scope`] it is never freed. Otherwise it is
//! freed when the scope is dropped. Runs of many seeds need scopes, or they would run out of
//! memory.

use std::cell::RefCell;

type Free = Box<dyn FnOnce()>;

thread_local! {
    /// Functions that free the memory of the open scope, newest last. `None` if no scope is open.
    static OPEN: RefCell<Option<Vec<Free>>> = const { RefCell::new(None) };
}

/// Frees on drop all memory that this thread has [leaked](leak) since the scope was created.
/// Declare it before any borrower of that memory, so that it is dropped last.
pub struct Scope(());

impl Scope {
    pub fn new() -> Scope {
        OPEN.with_borrow_mut(|open| assert!(open.replace(vec![]).is_none(), "one at a time"));
        Scope(())
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        let frees = OPEN.take().unwrap_or_default();
        frees.into_iter().rev().for_each(|free| free());
    }
}

/// Returns `n` copies of a value.
pub fn leak<T: Clone + 'static>(value: T, n: usize) -> &'static mut [T] {
    keep(vec![value; n].into_boxed_slice())
}

pub fn leak_all<T: Clone + 'static>(values: &[T]) -> &'static mut [T] {
    keep(values.into())
}

pub fn leak_one<T: 'static>(value: T) -> &'static mut T {
    &mut keep(Box::new([value]) as Box<[T]>)[0]
}

fn keep<T: 'static>(values: Box<[T]>) -> &'static mut [T] {
    let values = Box::into_raw(values);
    OPEN.with_borrow_mut(|open| {
        if let Some(frees) = open {
            // SAFETY: the pointer is from `into_raw` above. The only borrow of it is returned
            // below, and the owner of the scope drops all borrowers before the scope.
            frees.push(Box::new(move || drop(unsafe { Box::from_raw(values) })));
        }
    });
    // SAFETY: the pointer is from `into_raw` above, and this is the only borrow of it.
    unsafe { &mut *values }
}
