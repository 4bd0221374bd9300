//! Memory that tests hand out as `'static`. It is never freed, or at the end of a [`Scope`], which
//! runs of many seeds need.

use std::cell::RefCell;

type Free = Box<dyn FnOnce()>;

thread_local! {
    /// Frees what was handed out in the scope that is open, newest last. `None`: no scope is.
    static OPEN: RefCell<Option<Vec<Free>>> = const { RefCell::new(None) };
}

/// Frees on drop what this thread has [leaked](leak) since its creation. Declare it before anything
/// that borrows that memory, so that it is dropped last.
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

/// `n` copies of a value.
pub fn leak<T: Clone + 'static>(value: T, n: usize) -> &'static mut [T] {
    keep(vec![value; n].into_boxed_slice())
}

pub fn leak_one<T: 'static>(value: T) -> &'static mut T {
    &mut keep(Box::new([value]) as Box<[T]>)[0]
}

fn keep<T: 'static>(values: Box<[T]>) -> &'static mut [T] {
    let values = Box::into_raw(values);
    OPEN.with_borrow_mut(|open| {
        if let Some(frees) = open {
            // SAFETY: from `into_raw` above. The only borrow is returned below, and the owner of
            // the scope drops what has it first.
            frees.push(Box::new(move || drop(unsafe { Box::from_raw(values) })));
        }
    });
    // SAFETY: as above; nothing else has borrowed it.
    unsafe { &mut *values }
}
