//! Checks the structure layouts that compiled C programs rely on. `tests/layout.c` checks the
//! header against the same numbers.

use std::mem::offset_of;

use static_assertions::const_assert_eq;

use crate::messages::{FpMessage, FpTag};
use crate::node::FpOptions;
use crate::poll::{FpCompletion, FpStats};

const_assert_eq!(size_of::<FpOptions>(), 64);
const_assert_eq!(offset_of!(FpOptions, flags), 8);
const_assert_eq!(offset_of!(FpOptions, providers), 40);
const_assert_eq!(offset_of!(FpOptions, local_rank), 56);
const_assert_eq!(size_of::<FpTag>(), 16);
const_assert_eq!(offset_of!(FpTag, high), 8);
const_assert_eq!(size_of::<FpMessage>(), 40);
const_assert_eq!(offset_of!(FpMessage, len), 16);
const_assert_eq!(offset_of!(FpMessage, source), 32);
const_assert_eq!(size_of::<FpCompletion>(), 80);
const_assert_eq!(offset_of!(FpCompletion, id), 8);
const_assert_eq!(offset_of!(FpCompletion, value), 24);
const_assert_eq!(offset_of!(FpCompletion, message), 32);
const_assert_eq!(offset_of!(FpCompletion, may_land), 72);
const_assert_eq!(size_of::<FpStats>(), 88);
const_assert_eq!(offset_of!(FpStats, passes), 80);
