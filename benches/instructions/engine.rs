//! Instruction counts of the engine: arrivals in the receive window, signals, a put-signal from
//! post to completion, quiet, and notifying a worker that is awake.
//!
//! Arrivals are the recorded posts of another engine, replayed from a [`Tape`] in order or
//! reordered. Counts of arrivals and completions include their share of a bounded pass
//! ([`Engine::progress`]) and of the acknowledgements in that pass.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;

use fishplate_benches::REPEATS;
use fishplate_benches::setup::{memory, region};
use fishplate_benches::tape::{Event, PACE, Tape};
use fishplate_core::engine::{
    Asleep, Config, ContextId, Engine, HANDLE_MAX, Issued, Notice, Signal, Waiter,
};
use fishplate_core::mem::{LocalId, PeerId, RailId, RemoteId};
use fishplate_core::op::{Cmp, SignalOp};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::event::EventCount;
use fishplate_core::sync::host::SpinHost;
use iai_callgrind::{library_benchmark, library_benchmark_group, main};

mod budget;
use budget::budget;

/// Size of the window, larger than the number of posts of any benchmark.
const WINDOW: usize = 2048;
const CONTEXT: ContextId = ContextId(0);
/// Offset of the signal word in the region. The payload is at offset 0.
const SIGNAL: u64 = 64;

/// An engine with one peer, a region, and the peer's imported region.
struct Side<R: Rail + 'static> {
    engine: Engine<'static, R, 1>,
    peer: PeerId,
    mine: LocalId,
    theirs: RemoteId,
}

/// Creates an engine on `rail` with one peer: another engine of this kind, or the engine itself.
fn side<R: Rail>(rail: R) -> &'static mut Side<R> {
    let config = Config { window: WINDOW as u32, ..Config::DEFAULT };
    let mut engine = Engine::new(config, [rail], memory(&config, WINDOW)).unwrap();
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 1).unwrap();
    let mine = engine.register(region()).unwrap();
    let mut handle = [0; HANDLE_MAX];
    let len = engine.export(mine, &mut handle).unwrap();
    let theirs = engine.import(peer, &handle[..len]).unwrap();
    Box::leak(Box::new(Side { engine, peer, mine, theirs }))
}

impl<R: Rail> Side<R> {
    fn signal(&self) -> Signal {
        Signal { at: self.theirs.at(SIGNAL), op: SignalOp::Add, value: 1 }
    }

    fn put_signal(&mut self, notice: Notice) -> Issued {
        let (from, to) = (self.mine.at(0), self.theirs.at(0));
        self.engine.put_signal(CONTEXT, from, 8, to, self.signal(), notice).unwrap()
    }
}

/// Creates a receiver over a [`Tape`] that delivers the repeated posts of `send`, reordered by
/// `order`.
fn receiver(
    posts: u64,
    send: impl Fn(&mut Side<Tape>),
    order: impl Fn(&mut Vec<Event>),
) -> &'static mut Side<Tape> {
    let sender = side(Tape::recording());
    for _ in 0..posts {
        send(sender);
        sender.engine.progress();
    }
    let mut arrivals = sender.engine.rail_mut(RailId(0)).unwrap().take();
    order(&mut arrivals);
    assert_eq!(arrivals.len() as u64, REPEATS);
    side(Tape::playing(arrivals))
}

fn put(side: &mut Side<Tape>) {
    side.engine.put(CONTEXT, side.mine.at(0), 8, side.theirs.at(0), Notice::Silent).unwrap();
}

fn play(side: &mut Side<Tape>) {
    while side.engine.progress() != 0 {}
    assert_eq!(side.engine.stats().arrived, REPEATS);
}

#[library_benchmark(config = budget("window_in_order"))]
#[bench::run(receiver(REPEATS, put, |_| ()))]
fn window_in_order(side: &'static mut Side<Tape>) {
    play(side);
}

// Order 1 0 3 2 5 4 ...: every second arrival fills the hole before it.
#[library_benchmark(config = budget("window_swapped"))]
#[bench::run(receiver(REPEATS, put, |all| all.chunks_mut(2).for_each(|two| two.reverse())))]
fn window_swapped(side: &'static mut Side<Tape>) {
    play(side);
}

#[library_benchmark(config = budget("window_one_hole"))]
#[bench::run(receiver(REPEATS + 1, put, |all| { all.remove(0); }))]
fn window_one_hole(side: &'static mut Side<Tape>) {
    play(side);
}

#[library_benchmark(config = budget("window_1000_holes"))]
#[bench::run(receiver(2 * REPEATS, put, |all| {
    let mut n = 0;
    all.retain(|_| { n += 1; n % 2 == 0 });
}))]
fn window_1000_holes(side: &'static mut Side<Tape>) {
    play(side);
}

fn signal(side: &mut Side<Tape>) {
    side.engine.signal(CONTEXT, side.signal(), Notice::Silent).unwrap();
}

#[library_benchmark(config = budget("signal_apply"))]
#[bench::run(receiver(REPEATS, signal, |_| ()))]
fn signal_apply(side: &'static mut Side<Tape>) {
    play(side);
    assert_eq!(side.engine.stats().applied, REPEATS);
}

#[library_benchmark(config = budget("put_signal_apply"))]
#[bench::run(receiver(REPEATS, |side| { side.put_signal(Notice::Silent); }, |_| ()))]
fn put_signal_apply(side: &'static mut Side<Tape>) {
    play(side);
    assert_eq!(side.engine.stats().applied, REPEATS);
}

#[library_benchmark(config = budget("put_signal_post"))]
#[bench::run(side(Tape::playing(vec![])))]
fn put_signal_post(side: &'static mut Side<Tape>) {
    for _ in 0..REPEATS {
        black_box(side.put_signal(Notice::Silent));
    }
    assert_eq!(side.engine.stats().posted, REPEATS);
}

/// Creates a sender. Its rail reports the completion of each post, and after every [`PACE`] posts
/// an acknowledgement from the receiver.
fn sender(send: impl Fn(&mut Side<Tape>)) -> &'static mut Side<Tape> {
    let recorder = side(Tape::recording());
    for _ in 0..REPEATS {
        send(recorder);
    }
    let posts = recorder.engine.rail_mut(RailId(0)).unwrap().take();
    let answerer = side(Tape::recording());
    let mut answers = vec![];
    for some in posts.chunks(PACE as usize) {
        answerer.engine.rail_mut(RailId(0)).unwrap().play(some.to_vec());
        while answerer.engine.rail_mut(RailId(0)).unwrap().posted() == 0 {
            answerer.engine.progress();
        }
        answers.append(&mut answerer.engine.rail_mut(RailId(0)).unwrap().take());
    }
    side(Tape::paced(answers))
}

/// Runs all the work of a sender: posts, completions, acknowledgements, and taking completions one
/// by one.
fn send_to_completion(side: &mut Side<Tape>, post: impl Fn(&mut Side<Tape>, Notice) -> Issued) {
    let (mut posted, mut completed) = (0, 0);
    while posted < REPEATS {
        for _ in 0..PACE.min((REPEATS - posted) as u32) {
            black_box(post(side, Notice::Report(posted)));
            posted += 1;
        }
        side.engine.progress();
        while let Some(completion) = side.engine.next_completion() {
            assert_eq!(completion.tag, completed);
            completed += 1;
        }
    }
    // The last few posts do not fill an acknowledgement, so they are still in flight.
    assert_eq!(completed, REPEATS / PACE as u64 * PACE as u64);
}

#[library_benchmark(config = budget("put_sender"))]
#[bench::run(sender(put))]
fn put_sender(side: &'static mut Side<Tape>) {
    send_to_completion(side, |side, notice| {
        let (from, to) = (side.mine.at(0), side.theirs.at(0));
        side.engine.put(CONTEXT, from, 8, to, notice).unwrap()
    });
}

#[library_benchmark(config = budget("put_sender_silent"))]
#[bench::run(sender(put))]
fn put_sender_silent(side: &'static mut Side<Tape>) {
    for _ in 0..REPEATS / PACE as u64 {
        for _ in 0..PACE {
            let side = black_box(&mut *side);
            put(side);
        }
        side.engine.progress();
    }
    let (host, never) = (SpinHost::new(1), Asleep::new());
    side.engine.quiet(CONTEXT, side.peer, &mut Waiter::awake(&host, &never), 0).unwrap();
}

#[library_benchmark(config = budget("put_signal_sender"))]
#[bench::run(sender(|side| { side.put_signal(Notice::Silent); }))]
fn put_signal_sender(side: &'static mut Side<Tape>) {
    send_to_completion(side, |side, notice| side.put_signal(notice));
}

type Network = Loopback<256>;

#[library_benchmark(config = budget("put_signal_to_completion"))]
#[bench::run(side(Network::new()))]
fn put_signal_to_completion(side: &'static mut Side<Network>) {
    let (host, never) = (SpinHost::new(1), Asleep::new());
    let mut waiter = Waiter::awake(&host, &never);
    for _ in 0..REPEATS {
        let Issued::Pending(token) = side.put_signal(Notice::Report(0)) else {
            panic!("not by the queue")
        };
        black_box(side.engine.wait(token, &mut waiter, u64::MAX).unwrap());
    }
}

// One pass after each put, and a quiet after 32 puts, as a streaming program does.
#[library_benchmark(config = budget("put_signal_32_and_quiet"))]
#[bench::run(side(Network::new()))]
fn put_signal_32_and_quiet(side: &'static mut Side<Network>) {
    let (host, never) = (SpinHost::new(1), Asleep::new());
    let mut waiter = Waiter::awake(&host, &never);
    for _ in 0..REPEATS {
        for _ in 0..32 {
            black_box(side.put_signal(Notice::Silent));
            side.engine.progress();
        }
        side.engine.quiet(CONTEXT, side.peer, &mut waiter, u64::MAX).unwrap();
    }
}

#[library_benchmark(config = budget("put_signal_mapped"))]
#[bench::run(side(Network::mapped()))]
fn put_signal_mapped(side: &'static mut Side<Network>) {
    for _ in 0..REPEATS {
        assert_eq!(side.put_signal(Notice::Silent), Issued::Done { value: 0 });
    }
}

#[library_benchmark(config = budget("signal_mapped"))]
#[bench::run(side(Network::mapped()))]
fn signal_mapped(side: &'static mut Side<Network>) {
    for _ in 0..REPEATS {
        let side = black_box(&mut *side);
        side.engine.signal(CONTEXT, side.signal(), Notice::Silent).unwrap();
    }
}

#[library_benchmark(config = budget("wait_signal_arrived"))]
#[bench::run(side(Network::mapped()))]
fn wait_signal_arrived(side: &'static mut Side<Network>) {
    let (host, never) = (SpinHost::new(1), Asleep::new());
    let mut waiter = Waiter::awake(&host, &never);
    for _ in 0..REPEATS {
        let at = side.mine.at(SIGNAL);
        black_box(side.engine.wait_signal(at, Cmp::Ge, 0, None, &mut waiter, u64::MAX).unwrap());
    }
}

#[library_benchmark(config = budget("quiet_idle_4"))]
#[bench::run(side(Network::new()))]
fn quiet_idle_4(side: &'static mut Side<Network>) {
    let (host, never) = (SpinHost::new(1), Asleep::new());
    let mut waiter = Waiter::awake(&host, &never);
    for _ in 0..REPEATS {
        // Makes four calls per iteration, so that the loop's own instructions weigh little.
        for _ in 0..4 {
            let side = black_box(&mut *side);
            side.engine.quiet(CONTEXT, side.peer, &mut waiter, u64::MAX).unwrap();
        }
    }
}

#[library_benchmark(config = budget("progress_idle"))]
#[bench::run(side(Network::new()))]
fn progress_idle(side: &'static mut Side<Network>) {
    for _ in 0..REPEATS {
        black_box(side.engine.progress());
    }
}

#[library_benchmark(config = budget("notify_awake"))]
#[bench::run((SpinHost::new(1), EventCount::new()))]
fn notify_awake((host, event): (SpinHost, EventCount)) {
    for _ in 0..REPEATS {
        black_box(event.notify(&host));
    }
}

library_benchmark_group!(
    name = engine,
    benchmarks = [
        window_in_order,
        window_swapped,
        window_one_hole,
        window_1000_holes,
        signal_apply,
        put_signal_apply,
        put_signal_post,
        put_sender,
        put_sender_silent,
        put_signal_sender,
        put_signal_to_completion,
        put_signal_32_and_quiet,
        put_signal_mapped,
        signal_mapped,
        wait_signal_arrived,
        quiet_idle_4,
        progress_idle,
        notify_awake
    ]
);

main!(library_benchmark_groups = engine);
