use super::*;

#[test]
fn a_segment_can_neither_shrink_nor_grow_nor_lose_its_seals() {
    let segment = Segment::create(5000).unwrap();
    assert_eq!(segment.len(), 8192, "whole pages");
    for len in [0, 4096, 16384] {
        // SAFETY: the call takes no pointers, and the segment owns the descriptor.
        let rc = unsafe { libc::ftruncate(segment.fd().as_raw_fd(), len) };
        assert_eq!((rc, errno()), (-1, libc::EPERM));
    }
    assert_eq!(add_seals(segment.fd(), libc::F_SEAL_WRITE), Err(SegmentError::System(libc::EPERM)));
    assert_eq!(verify(segment.fd(), 8192), Ok(8192));
    assert_eq!(
        verify(segment.fd(), 4096),
        Err(SegmentError::Size { actual: 8192, expected: 4096 })
    );
}

/// B10: memory that its owner could still truncate, or that lacks pages, is never mapped.
#[test]
fn b10_unsealed_sparse_and_ordinary_descriptors_are_refused() {
    let fd = create(4096).unwrap();
    assert_eq!(verify(fd.as_fd(), 4096), Err(SegmentError::Unsealed));
    add_seals(fd.as_fd(), libc::F_SEAL_GROW).unwrap();
    assert_eq!(verify(fd.as_fd(), 4096), Err(SegmentError::Unsealed));
    add_seals(fd.as_fd(), libc::F_SEAL_SHRINK).unwrap();
    assert_eq!(verify(fd.as_fd(), 4096), Ok(4096));

    // SAFETY: the name is a C string literal.
    let raw = unsafe {
        libc::memfd_create(c"sparse".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    };
    // SAFETY: `memfd_create` returned this new descriptor, so nothing else owns it.
    let sparse = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: the call takes no pointers, and the descriptor is ours.
    assert_eq!(unsafe { libc::ftruncate(raw, 1 << 40) }, 0);
    seal(sparse.as_fd()).unwrap();
    assert_eq!(verify(sparse.as_fd(), 1 << 40), Err(SegmentError::Sparse));

    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(verify(file.as_fd(), file.metadata().unwrap().len()), Err(SegmentError::Unsealed));
}

/// If no huge page is free, a hole in huge pages cannot be filled, and an access causes SIGBUS.
/// Passes on kernels without huge pages.
#[test]
fn memory_of_huge_pages_is_refused() {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB;
    // SAFETY: the name is a C string literal.
    let raw = unsafe { libc::memfd_create(c"huge".as_ptr(), flags) };
    if raw < 0 {
        return;
    }
    // SAFETY: `memfd_create` returned this new descriptor, so nothing else owns it.
    let huge = unsafe { OwnedFd::from_raw_fd(raw) };
    // SAFETY: the call takes no pointers, and the descriptor is ours.
    assert_eq!(unsafe { libc::ftruncate(raw, 1 << 30) }, 0);
    seal(huge.as_fd()).unwrap();
    assert_eq!(verify(huge.as_fd(), 1 << 30), Err(SegmentError::Pages));
}

/// B19: a segment has no name that another process could guess, take, or find left behind.
#[test]
fn b19_a_segment_has_no_name_in_the_file_system() {
    let segment = Segment::create(4096).unwrap();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", segment.fd().as_raw_fd())).unwrap();
    assert_eq!(link.to_str(), Some("/memfd:fishplate (deleted)"));
    // SAFETY: the call takes no pointers, and the segment owns the descriptor.
    let flags = unsafe { libc::fcntl(segment.fd().as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
}

#[test]
fn regions_lie_inside_and_are_found_by_number_while_the_segment_lives() {
    let segment = Segment::create(4096).unwrap();
    // SAFETY: the regions are never used.
    let cut = |offset, len| unsafe { segment.region(offset, len) };
    let region = cut(4000, 96).unwrap();
    assert_eq!(region.kind(), RegionKind::Shared { segment: segment.number(), offset: 4000 });
    assert_eq!(region.ptr().as_ptr() as usize, segment.ptr().as_ptr() as usize + 4000);
    assert_eq!(cut(4000, 97).map(drop), Err(SegmentError::Range));
    assert_eq!(cut(usize::MAX, 2).map(drop), Err(SegmentError::Range));
    let number = segment.number();
    assert_eq!(Segment::find(number).map(|found| found.ptr()), Some(segment.ptr()));
    drop(segment);
    assert!(Segment::find(number).is_none());
    assert_eq!(Segment::create(0).map(drop), Err(SegmentError::Length));
    assert_eq!(Segment::create(usize::MAX).map(drop), Err(SegmentError::Length));
}

#[test]
fn a_segment_made_before_a_fork_is_found_in_the_child() {
    let segment = Segment::create(4096).unwrap();
    let mut status = -1;
    // SAFETY: the child locks and allocates, which glibc permits after a fork. It never returns
    // into the test, and does not use the region. `status` is writable.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(10);
            let cut = segment.region(0, 64).is_ok();
            let found = Segment::find(segment.number()).map(|found| found.ptr());
            libc::_exit(i32::from(!cut || found != Some(segment.ptr())));
        }
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        child
    };
    assert!(child > 0 && status == 0, "{status:#x}");
}
