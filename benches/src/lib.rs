//! The instruction budgets: one line per path, with its limit and the measured count.
//!
//! Counts are exact for a given compiler, so a limit is the measured value plus 5 % or two
//! instructions, whichever is more. A path that exceeds its limit fails the run. To raise a limit,
//! change this file, and have the change reviewed. Each benchmark runs its path [`REPEATS`] times,
//! set-up is not counted, and the figures here are per repeat.

pub mod noop;
pub mod processors;
pub mod setup;
pub mod tape;

/// How often a benchmark repeats its path, unless its budget says otherwise.
pub const REPEATS: u64 = 1000;

/// Units per tag-matching workload: rounds of 64, or one round at the greatest depth. Workloads
/// that scan in every unit run a 16th as many.
pub const UNITS: u64 = 65_536;

#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Name of the benchmark function in `instructions/`.
    pub name: &'static str,
    /// Number of values that one repeat moves. The table also prints figures per value.
    pub per: u64,
    pub repeats: u64,
    /// Maximum instructions per repeat. `None` for other libraries.
    pub limit: Option<f64>,
    /// Instructions per repeat when the limit was set.
    pub measured: f64,
}

const fn ours(name: &'static str, limit: f64, measured: f64) -> Budget {
    Budget { name, per: 1, repeats: REPEATS, limit: Some(limit), measured }
}

const fn rival(name: &'static str, measured: f64) -> Budget {
    Budget { name, per: 1, repeats: REPEATS, limit: None, measured }
}

impl Budget {
    const fn per(self, values: u64) -> Self {
        Budget { per: values, ..self }
    }

    const fn repeats(self, repeats: u64) -> Self {
        Budget { repeats, ..self }
    }
}

/// All paths. Measured with the compiler of `rust-toolchain.toml`, on x86-64 without extra target
/// features.
#[rustfmt::skip]
pub const BUDGETS: &[Budget] = &[
    //   path                               limit measured
    ours("ring_push",                      14.1,     12.1),
    ours("ring_pop",                       12.1,     10.1),
    ours("ring_push_pop",                 34.1,     32.1),
    ours("ring_batch_32",                 191.7,    182.6).per(32),
    rival("rtrb_push_pop",                           46.2),
    rival("crossbeam_push_pop",                      58.1),
    rival("ringbuf_push_pop",                        69.1),
    rival("heapless_push_pop",                       29.1),
    ours("window_in_order",               40.1,     38.1),
    ours("window_swapped",               247.8,    236.0),
    ours("window_one_hole",              179.2,    170.7),
    ours("window_1000_holes",            179.2,    170.7),
    ours("signal_apply",                 280.4,    267.1),
    ours("put_signal_apply",             325.9,    310.4),
    ours("put_signal_post",              279.3,    266.0),
    ours("put_sender",                   391.6,    373.0),
    ours("put_sender_silent",            159.6,    152.0),
    ours("put_signal_sender",            477.7,    455.0),
    ours("put_signal_to_completion",    1747.3,   1664.1),
    ours("put_signal_32_and_quiet",    26347.7,  25093.1).per(32),
    ours("put_signal_mapped",             69.3,     66.0),
    ours("signal_mapped",                 34.0,     32.0),
    ours("wait_signal_arrived",            14.0,     12.0),
    ours("quiet_idle_4",                  81.9,     78.0).per(4),
    ours("progress_idle",                 37.1,     36.0),
    ours("shm_put_signal",               60.9,     58.0),
    ours("shm_signal",                    43.0,     41.0),
    ours("shm_progress_idle",           106.0,    101.0),
    ours("shm_progress_idle_128",       147.1,    140.1),
    ours("node_put_signal",              64.0,     61.0),
    // All arguments are known only at run time. The C library may take 12 instructions more than
    // `Node`.
    ours("node_put_signal_called",       151.2,    144.0),
    ours("c_put_signal",                 155.4,    148.0),
    ours("node_put_signal_bytes",       106.0,    101.0),
    ours("node_signal",                  46.2,     44.0),
    ours("node_wait_arrived",            25.0,     23.0),
    ours("node_quiet_idle",              23.0,     21.0),
    ours("node_progress_idle",          148.0,    141.0),
    ours("node_queue_round",           1016.2,    967.9),
    ours("node_queue_psm2",             945.0,    900.0),
    ours("node_queue_idle",             165.9,    158.0),
    ours("notify_awake",                   10.1,      8.1),
    ours("tag_expected",                165.4,    157.6),
    ours("tag_unexpected",              178.3,    169.9),
    ours("tag_expected_shaped",         129.7,    123.6),
    ours("tag_p1_64",                   454.8,    433.2).repeats(UNITS),
    ours("tag_p1_64k",                  440.1,    419.2).repeats(UNITS),
    ours("tag_p2_64",                   454.8,    433.2).repeats(UNITS),
    ours("tag_p2_64k",                  440.1,    419.2).repeats(UNITS),
    ours("tag_p3_64",                   440.1,    419.2).repeats(UNITS),
    ours("tag_p3_64k",                  440.1,    419.2).repeats(UNITS),
    ours("tag_p4_64",                   440.1,    419.2).repeats(UNITS),
    ours("tag_p4_64k",                  440.1,    419.2).repeats(UNITS),
    ours("tag_p5_64",                   454.8,    433.2).repeats(UNITS),
    ours("tag_p5_64k",                  440.1,    419.2).repeats(UNITS),
    ours("tag_p6_64",                   370.6,    353.0).repeats(UNITS),
    ours("tag_p6_64k",                  385.7,    367.4).repeats(UNITS),
    ours("tag_p7_64",                   477.3,    454.6).repeats(UNITS),
    ours("tag_p7_64k",                  482.3,    459.4).repeats(UNITS),
    ours("tag_p8_64",                   476.0,    453.4).repeats(UNITS),
    ours("tag_p8_64k",                  485.8,    462.7).repeats(UNITS),
    ours("tag_p9_64",                   381.4,    363.3).repeats(UNITS),
    ours("tag_p9_64k",                  397.9,    379.0).repeats(UNITS),
    ours("tag_p10_64",                  444.3,    423.2).repeats(UNITS),
    ours("tag_p10_64k",                 444.3,    423.2).repeats(UNITS),
    ours("tag_p11_64",                 1996.2,   1901.2).repeats(UNITS),
    ours("tag_p11_64k",                1996.2,   1901.2).repeats(UNITS),
    ours("tag_u1_64",                   580.9,    553.3).repeats(UNITS),
    ours("tag_u1_64k",                  599.2,    570.7).repeats(UNITS),
    ours("tag_u2_64",                   573.1,    545.9).repeats(UNITS),
    ours("tag_u2_64k",                  593.7,    565.5).repeats(UNITS),
    ours("tag_u3_64",                   575.8,    548.4).repeats(UNITS),
    ours("tag_u3_64k",                  592.9,    564.7).repeats(UNITS),
    ours("tag_u4_64",                   580.3,    552.7).repeats(UNITS),
    ours("tag_u4_64k",                  599.1,    570.6).repeats(UNITS),
    ours("tag_u6_64",                   670.9,    639.0).repeats(UNITS),
    ours("tag_u6_64k",                  693.9,    660.9).repeats(UNITS),
    ours("tag_c1_64",                   260.5,    248.1).repeats(UNITS),
    ours("tag_p11_1k",                 1943.7,   1851.2).repeats(UNITS),
    rival("list_p1_64",                          1111.3).repeats(UNITS / 16),
    rival("list_p11_1k",                        16474.3).repeats(UNITS / 16),
    ours("pool_local_pair",                20.0,     18.0),
    ours("pool_window_32",               1053.1,   1003.0).per(32),
    ours("queue_32_commands",           12081.7,  11506.4).per(32),
    ours("pool_remote_release",            21.2,     19.2),
    ours("pool_remote_pair",               42.1,     40.1),
    ours("pool_batch_32",                1517.6,   1445.4).per(32),
    ours("pool_id_pair",                   63.1,     60.1),
    ours("pool_1_stream",                 532.3,    507.0).per(16),
    ours("pool_32_streams",               532.3,    507.0).per(16).repeats(32 * REPEATS),
    rival("box_pair",                               138.1),
    // Paths over a provider that does nothing. The `bare_` paths make the same calls without a
    // rail, so the difference is the rail's share.
    ours("fabric_write_to_completion",   238.3,    227.0),
    rival("bare_write_to_completion",               125.1),
    ours("fabric_write_inject",            80.8,     77.0),
    rival("bare_write_inject",                       26.0),
    // A silent 8-byte put, from the call to its acknowledgement: at most 150 instructions more than
    // the provider's calls.
    ours("put_over_fabric",              215.1,    204.9).repeats(960),
    rival("bare_put",                                67.4).repeats(960),
    ours("put_over_fabric_inject",       136.9,    130.4).repeats(960),
    rival("bare_put_inject",                         28.9).repeats(960),
    ours("fabric_message",                 43.0,     41.0),
    ours("fabric_poll_idle",               49.3,     47.0),
    ours("fabric_landed_32",             1638.0,   1560.0).per(32),
    ours("tagged_send",                  148.0,    141.0),
    ours("tagged_receive",               489.8,    466.5),
    ours("tagged_round",                 593.7,    565.5),
];

/// Pairs of paths. The first path must not take more instructions than the second path.
pub const NO_MORE_THAN: &[(&str, &str)] = &[
    ("ring_push_pop", "rtrb_push_pop"),
    ("window_1000_holes", "window_one_hole"),
    ("pool_local_pair", "box_pair"),
];

/// Triples (path, factor, other): `path` may take at most `factor` times the instructions of
/// `other`.
pub const AT_MOST: &[(&str, f64, &str)] = &[
    ("tag_p1_64k", 1.05, "tag_p1_64"),
    ("tag_p2_64k", 1.05, "tag_p2_64"),
    ("tag_p3_64k", 1.05, "tag_p3_64"),
    ("tag_p4_64k", 1.05, "tag_p4_64"),
    ("tag_p5_64k", 1.05, "tag_p5_64"),
    ("tag_p6_64k", 1.05, "tag_p6_64"),
    ("tag_p7_64k", 1.05, "tag_p7_64"),
    ("tag_p8_64k", 1.05, "tag_p8_64"),
    ("tag_p9_64k", 1.05, "tag_p9_64"),
    ("tag_p10_64k", 1.05, "tag_p10_64"),
    ("tag_u1_64k", 1.05, "tag_u1_64"),
    ("tag_u2_64k", 1.05, "tag_u2_64"),
    ("tag_u3_64k", 1.05, "tag_u3_64"),
    ("tag_u4_64k", 1.05, "tag_u4_64"),
    ("tag_p11_64k", 1.05, "tag_p11_64"),
    ("tag_p11_1k", 0.25, "list_p11_1k"),
    ("pool_32_streams", 1.01, "pool_1_stream"),
];

/// Returns the limit of a path for all its repeats.
///
/// # Panics
/// If [`BUDGETS`] has no limit for this path.
pub fn limit(name: &str) -> u64 {
    let budget = BUDGETS.iter().find(|budget| budget.name == name);
    let of_ours = budget.and_then(|budget| Some((budget.limit?, budget.repeats)));
    let (per_repeat, repeats) = of_ours.expect("every path of ours has a budget");
    (per_repeat * repeats as f64) as u64
}

const _: () = {
    let mut i = 0;
    while i < BUDGETS.len() {
        let Budget { limit, measured, .. } = BUDGETS[i];
        if let Some(limit) = limit {
            let slack = (measured * 0.05).max(2.0);
            assert!(
                limit >= measured && limit <= measured + slack,
                "a limit is not the measured value and slack"
            );
        }
        i += 1;
    }
};
