use super::*;
use crate::testing::Random;

const LEN: usize = 64 << 10;

/// A simulated peer: a clock, and the time of a payload on each path in nanoseconds.
struct Link {
    payloads: PayloadPaths,
    now: u64,
    takes: [u64; 2],
    went: [u64; 2],
    open: usize,
}

impl Link {
    fn new(kernel: u64, lane: u64) -> Link {
        Link { payloads: PayloadPaths::new(), now: 1, takes: [kernel, lane], went: [0; 2], open: 0 }
    }

    fn begin(&mut self, len: usize) -> By {
        let now = self.now;
        let (by, measured) = self.payloads.choose(len, || now);
        self.went[by as usize] += 1;
        match by {
            By::Kernel => {
                self.now += self.takes[0];
                self.payloads.copied(len, measured.then_some(self.takes[0]));
            }
            By::Lane => self.payloads.asked(len, measured.then_some(now)),
        }
        by
    }

    fn end(&mut self, len: usize) {
        self.now += self.takes[1];
        let now = self.now;
        self.payloads.came(len, || now);
    }

    /// Transfers payloads one after the other. Returns the number of payloads on each path.
    fn one_by_one(&mut self, len: usize, count: usize) -> [u64; 2] {
        self.went = [0; 2];
        for _ in 0..count {
            if self.begin(len) == By::Lane {
                self.end(len);
            }
            self.now += 500;
        }
        self.went
    }

    /// Transfers payloads with up to `window` in flight through the lane. The lane transfers one
    /// payload at a time.
    fn streamed(&mut self, len: usize, window: usize, count: usize) -> [u64; 2] {
        self.went = [0; 2];
        for _ in 0..count {
            self.open += usize::from(self.begin(len) == By::Lane);
            if self.open == window {
                self.end(len);
                self.open -= 1;
            }
        }
        self.went
    }
}

/// Returns the maximum number of payloads on the slower path, which takes `ratio` times as long:
/// trials may cost 3 %, plus one unfinished trial.
fn few(count: u64, ratio: u64) -> u64 {
    count / (30 * ratio) + 1
}

#[test]
fn the_quicker_way_is_found_and_the_other_is_seldom_tried() {
    for (kernel, lane) in [(8_000, 33_000), (7_000, 10_000), (7_500, 3_300), (96_000, 29_000)] {
        let mut link = Link::new(kernel, lane);
        link.one_by_one(LEN, 1000);
        let went = link.one_by_one(LEN, 10_000);
        let (slow, ratio) = if kernel < lane { (1, lane / kernel) } else { (0, kernel / lane) };
        assert!(
            went[slow] > 0,
            "kernel {kernel}, lane {lane}: no trial, so no change would be seen"
        );
        assert!(went[slow] <= few(10_000, ratio), "kernel {kernel}, lane {lane}: {went:?}");
    }
}

#[test]
fn in_a_stream_the_lane_is_measured_by_what_comes_through_it_and_not_by_how_long_each_is_under_way()
{
    for window in [4, 16, 32] {
        for (kernel, lane) in [(96_000, 29_000), (8_000, 33_000)] {
            // Measures the other path first, so that the stream has no pause.
            let mut link = Link::new(lane, kernel);
            link.streamed(LEN, window, 4000);
            link.takes = [kernel, lane];
            link.streamed(LEN, window, 4000);
            let went = link.streamed(LEN, window, 10_000);
            let slow = usize::from(kernel < lane);
            assert!(went[slow] <= 500, "window {window}, kernel {kernel}, lane {lane}: {went:?}");
        }
    }
}

#[test]
fn a_link_that_changes_is_followed_within_a_few_hundred_payloads() {
    let mut link = Link::new(96_000, 57_000);
    link.one_by_one(LEN, 2000);
    for takes in [[80_000, 600_000], [96_000, 57_000], [82_000, 130_000], [96_000, 57_000]] {
        link.takes = takes;
        let slow = usize::from(takes[0] < takes[1]);
        let went = link.one_by_one(LEN, 2000);
        // If the path in use becomes slower, the change is seen at once. If the other path becomes
        // faster, it is seen at its next trial.
        assert!(went[slow] < [700, 100][slow], "{takes:?}: {went:?}");
        let went = link.one_by_one(LEN, 2000);
        assert!(went[slow] <= few(2000, 1), "{takes:?}, later: {went:?}");
    }
}

#[test]
fn an_interruption_now_and_then_changes_little() {
    let seed = 0x5eed_f00d;
    let mut random = Random(seed);
    let mut link = Link::new(96_000, 57_000);
    let mut went = 0;
    for _ in 0..10_000 {
        link.takes = if random.below(50) == 0 { [4_000_000; 2] } else { [96_000, 80_000] };
        went += link.one_by_one(LEN, 1)[0];
    }
    assert!(went < 400, "seed {seed:#x}: {went} of 10,000 went the slower way");
}

#[test]
fn lengths_are_known_apart() {
    let mut link = Link::new(0, 0);
    for _ in 0..2000 {
        for (len, takes) in [(16 << 10, [4_000, 2_700]), (256 << 10, [22_000, 37_000])] {
            link.takes = takes;
            link.one_by_one(len, 1);
        }
    }
    link.takes = [4_000, 2_700];
    assert!(link.one_by_one(16 << 10, 500)[0] < 20);
    link.takes = [22_000, 37_000];
    assert!(link.one_by_one(256 << 10, 500)[1] < 20);
    for (len, class) in
        [(0, 0), (16383, 0), (16384, 1), (32768, 2), (1 << 20, 7), (2 << 20, 8), (1 << 40, 8)]
    {
        let mut payloads = PayloadPaths::new();
        let place = std::ptr::from_ref(payloads.class(len)) as usize;
        assert_eq!(place, std::ptr::from_ref(&payloads.classes[class]) as usize, "{len}");
    }
}

/// The sender computes and never polls, so no payload arrives through the lane.
#[test]
fn a_trial_of_the_lane_that_brings_nothing_is_given_up() {
    for known in [0, 200] {
        let mut link = Link::new(8_000, 3_000);
        link.one_by_one(LEN, known);
        (link.payloads.classes[3].by, link.payloads.classes[3].left) = (By::Kernel, 0);
        link.went = [0; 2];
        for _ in 0..100 {
            link.begin(LEN);
            link.now += 100_000;
        }
        assert!(link.went[1] <= 12, "after {known} that came: {:?}", link.went);
        // The lane is used again after another trial measures it as fast.
        (0..link.went[1]).for_each(|_| link.end(LEN));
        link.one_by_one(LEN, 3000);
        assert!(link.one_by_one(LEN, 1000)[0] <= 40, "after {known} that came");
    }
}
