//! Execution of an operation at its target: memory, receives and completions.

use fishplate_sys::fabric::raw::*;

use super::{Op, State, Verb};
use crate::fabric::post;
use crate::fabric::queue::Item;

pub(super) enum Outcome {
    Done,
    /// The target has no receive, or no room in its queue.
    Later,
    Failed(i32),
}

impl State {
    pub(super) fn carry_out(&mut self, op: &Op) -> Outcome {
        let Some(dst) = op.dst.filter(|dst| self.eps.contains_key(dst)) else {
            return Outcome::Failed(libc::ECONNRESET);
        };
        let target = &self.eps[&dst];
        let (rx, takes) = (
            target.rx,
            op.verb == Verb::Send || (op.data.is_some() && self.persona.data_takes_receive),
        );
        if !target.enabled || (takes && target.recvs.is_empty()) {
            return Outcome::Later;
        }
        if (takes || op.data.is_some()) && !self.has_room(rx) {
            return Outcome::Later;
        }
        let source = self.address_of(dst, op.src);
        if op.verb == Verb::Send {
            return self.deliver(op, dst, rx, source);
        }
        let access = match op.verb {
            Verb::Read => FI_REMOTE_READ,
            _ => FI_REMOTE_WRITE,
        };
        let Some((at, of_device)) = self.remote(dst, op.addr, op.key, op.len, access) else {
            return Outcome::Failed(libc::EACCES);
        };
        // SAFETY: the target registered this range for this access, and it stays valid until the
        // registration is closed. The provider owns the origin's memory until the completion.
        unsafe {
            match op.verb {
                Verb::Write => self.store(at, &self.source(op), of_device),
                Verb::Read => self.store(op.local, &self.load(at, op.len, of_device), op.of_device),
                Verb::Atomic { .. } if of_device => return Outcome::Failed(libc::EACCES),
                Verb::Atomic { width, op: what, operand, compare, result } => {
                    match post::apply(at, width, what, operand, compare) {
                        Some(old) if !result.is_null() => {
                            std::ptr::copy(old.to_ne_bytes().as_ptr(), result, width.into());
                        }
                        Some(_) => {}
                        None => return Outcome::Failed(libc::EINVAL),
                    }
                }
                Verb::Send => {}
            }
        }
        if let Some(data) = op.data {
            let receive = if takes {
                self.eps.get_mut(&dst).and_then(|ep| ep.recvs.pop_front())
            } else {
                None
            };
            // A completion without a receive has a null context, or an arbitrary one.
            let none = if self.persona.stray_context { 0x5a5a_5a5a } else { 0 };
            let context =
                receive.map_or(std::ptr::without_provenance_mut(none), |receive| receive.context);
            let says = if self.persona.data_flag_alone { 0 } else { FI_RMA | FI_REMOTE_WRITE };
            let flags = says | FI_REMOTE_CQ_DATA;
            let entry = fi_cq_data_entry {
                op_context: context,
                flags,
                len: op.len,
                buf: std::ptr::null_mut(),
                data,
            };
            self.disown(context);
            if let Some(rx) = rx {
                self.push(rx, Item::good(entry, source));
            }
        }
        Outcome::Done
    }

    fn deliver(&mut self, op: &Op, dst: u32, rx: Option<u32>, source: u64) -> Outcome {
        let Some(receive) = self.eps.get_mut(&dst).and_then(|ep| ep.recvs.pop_front()) else {
            return Outcome::Later;
        };
        self.disown(receive.context);
        let Some(rx) = rx else {
            return Outcome::Done;
        };
        let flags = FI_MSG | FI_RECV;
        let len = op.len.min(receive.len);
        // SAFETY: the provider owns the memory of the receive and of the send until they complete.
        unsafe { self.store(receive.buf, &self.source(op)[..len], false) };
        if len < op.len {
            self.push(rx, Item::bad(receive.context, flags, FI_ETRUNC, 0, vec![]));
            return Outcome::Done;
        }
        let data = op.data.unwrap_or(0);
        let with = if op.data.is_some() { FI_REMOTE_CQ_DATA } else { 0 };
        let (op_context, buf) = (receive.context, receive.buf.cast());
        self.push(
            rx,
            Item::good(
                fi_cq_data_entry { op_context, flags: flags | with, len, buf, data },
                source,
            ),
        );
        Outcome::Done
    }

    fn address_of(&self, dst: u32, src: u32) -> u64 {
        let known = self.eps[&dst].av.and_then(|av| self.avs.get(&av));
        let at = known.and_then(|known| known.iter().position(|&ep| ep == Some(src)));
        at.map_or(FI_ADDR_NOTAVAIL, |at| at as u64)
    }

    fn remote(
        &self,
        dst: u32,
        addr: u64,
        key: u64,
        len: usize,
        access: u64,
    ) -> Option<(*mut u8, bool)> {
        let domain = self.eps[&dst].domain;
        let per_endpoint = self.persona.mr_mode & FI_MR_ENDPOINT != 0;
        let mr = self.mrs.iter().find(|mr| {
            mr.domain == domain
                && mr.key == key
                && mr.access & access != 0
                && (!per_endpoint || mr.enabled && mr.ep == Some(dst))
        })?;
        let offset = match self.persona.mr_mode & FI_MR_VIRT_ADDR {
            0 => usize::try_from(addr).ok()?,
            _ => usize::try_from(addr).ok()?.checked_sub(mr.ptr)?,
        };
        let fits = offset.checked_add(len).is_some_and(|end| end <= mr.len);
        fits.then(|| (std::ptr::with_exposed_provenance_mut(mr.ptr + offset), mr.device))
    }
}
