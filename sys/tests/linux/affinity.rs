//! Tests pinning of threads and the affinity that the kernel reports.

use fishplate_sys::{Errno, affinity};

#[test]
fn a_pinned_thread_runs_on_its_processor_alone() {
    std::thread::spawn(|| {
        let before = affinity::allowed().unwrap();
        assert!(before.count() >= 1 && before.iter().count() == before.count());
        for cpu in before.iter() {
            affinity::pin(cpu).unwrap();
            assert_eq!(affinity::current().unwrap(), cpu);
            assert_eq!(affinity::allowed().unwrap().iter().collect::<Vec<_>>(), [cpu]);
        }
        affinity::allow(&before).unwrap();
        assert_eq!(affinity::allowed().unwrap().count(), before.count());
    })
    .join()
    .unwrap();
}

#[test]
fn a_processor_that_does_not_exist_is_refused_by_number_and_name() {
    let refused = affinity::pin(affinity::CpuSet::MAX).unwrap_err();
    assert_eq!(refused, Errno::EINVAL);
    assert_eq!(refused.to_string(), "errno 22 (EINVAL)");
    assert_eq!(Errno::from_raw(3333).to_string(), "errno 3333");
}
