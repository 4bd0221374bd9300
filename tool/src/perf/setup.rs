//! What the command line says of how a side is opened, and an order to the other side, too.

use fishplate::config::Settings;

use crate::args::{DeviceName, Mode, Transport};

/// What a side is opened with.
#[derive(Clone, Debug)]
pub struct Setup {
    pub transport: Transport,
    pub rails: usize,
    pub settings: Settings,
    /// Where payloads are, with `--transport gpu`.
    pub device: Option<DeviceName>,
    /// Payloads on a device travel through bounce slots.
    pub relay: bool,
    pub mode: Mode,
    /// Both sides share one processor.
    pub crowded: bool,
    pub region: usize,
    /// Seconds.
    pub timeout: u64,
}
