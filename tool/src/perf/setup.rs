//! The settings for opening a side's node, from the command line or from the first process.

use std::time::Duration;

use fishplate::config::Settings;

use crate::args::{DeviceName, Mode, Transport};

#[derive(Clone, Debug)]
pub struct Setup {
    pub transport: Transport,
    pub rails: usize,
    pub settings: Settings,
    /// The memory of the payloads, with `--transport gpu`.
    pub device: Option<DeviceName>,
    pub relay: bool,
    pub mode: Mode,
    pub crowded: bool,
    pub region: usize,
    pub timeout: Duration,
}
