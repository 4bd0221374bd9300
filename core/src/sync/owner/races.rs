//! Two threads that own the same memory in turn, run as threads and under the model checker.

extern crate std;

use std::sync::Arc;

use super::*;
use crate::sync::primitive::Watch;
use crate::sync::testing::{model, thread};

#[test]
fn an_owner_sees_what_the_last_one_wrote() {
    model(|| {
        let scene = Arc::new((Owner::new(), Watch::new()));
        let visit = |scene: &(Owner, Watch), me: u64| {
            if scene.0.take(me) {
                assert!(scene.0.is(me) && !scene.0.is(me + 1));
                scene.1.write(0);
                scene.0.give();
            }
        };
        let other = thread::spawn({
            let scene = scene.clone();
            move || visit(&scene, 1)
        });
        visit(&scene, 5);
        other.join().unwrap();
        assert!(scene.0.take(9) && !scene.0.take(11));
    });
}
