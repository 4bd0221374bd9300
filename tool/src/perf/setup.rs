//! The settings for opening a side, from the command line or from the first process.

use std::time::Duration;

use fishplate::config::Settings;

use crate::args::{DeviceName, Mode, Transport};

/// The settings of a side.
#[derive(Clone, Debug)]
pub struct Setup {
    pub transport: Transport,
    pub rails: usize,
    pub settings: Settings,
    /// The memory of payloads, with `--transport gpu`.
    pub device: Option<DeviceName>,
    /// Payloads on a device travel through bounce slots.
    pub relay: bool,
    pub mode: Mode,
    /// Both sides share one processor.
    pub crowded: bool,
    pub region: usize,
    /// The time limit.
    pub timeout: Duration,
}
