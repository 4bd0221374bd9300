//! Threads that add and drain, run as threads and under the model checker.

extern crate std;

use std::sync::Arc;

use super::*;
use crate::sync::testing::{model, thread};

struct Scene {
    turns: Turns,
    /// The list: how much was added and not drained. Relaxed on purpose: the scenario must rely
    /// only on the fences of the turns.
    list: AtomicU32,
}

impl Scene {
    fn drain(&self) {
        loop {
            self.list.swap(0, Ordering::Relaxed);
            self.turns.end();
            if self.list.load(Ordering::Relaxed) == 0 || !self.turns.take() {
                return;
            }
        }
    }

    fn add(&self) {
        self.list.fetch_add(1, Ordering::Relaxed);
        if self.turns.take() {
            self.drain();
        }
    }
}

#[test]
fn nothing_that_was_added_stays() {
    model(|| {
        let scene = Arc::new(Scene { turns: Turns::new(1), list: AtomicU32::new(0) });
        let other = thread::spawn({
            let scene = scene.clone();
            move || scene.add()
        });
        scene.add();
        other.join().unwrap();
        assert_eq!(scene.list.load(Ordering::Relaxed), 0);
        assert!(scene.turns.take() && !scene.turns.take());
    });
}
