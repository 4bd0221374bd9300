//! How a side is opened, as the command line or an order to the other side says.

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
    /// Seconds.
    pub timeout: u64,
}
