//! Checks whether peers live: reads their sockets, and asks the kernel about their processes. Makes
//! one `poll(2)` call that does not wait, and receives a bounded number of packets per peer.

use std::os::fd::AsRawFd;

use fishplate_core::error::PeerError;
use fishplate_core::rail::Sink;
use fishplate_core::sync::host::Host;

use super::ShmRail;

/// Number of peers that one call of [`check_peers`](fishplate_core::rail::Rail::check_peers)
/// checks.
pub(super) const CHECKED: usize = 32;

impl<H: Host> ShmRail<H> {
    pub(super) fn check<S: Sink>(&mut self, sink: &mut S) {
        self.polls.clear();
        let first = if self.checked < self.active.len() { self.checked } else { 0 };
        self.checked = self.active.len().min(first + CHECKED);
        for peer in &self.active[first..self.checked] {
            let remote = self.peers[usize::from(peer.0)]
                .as_ref()
                .and_then(|attached| attached.remote.as_ref());
            let socket = remote.map_or(-1, |remote| remote.control.fd().as_raw_fd());
            let pidfd =
                remote.and_then(|remote| remote.pidfd.as_ref()).map_or(-1, AsRawFd::as_raw_fd);
            // `poll(2)` skips negative descriptors.
            self.polls.push(libc::pollfd { fd: socket, events: libc::POLLIN, revents: 0 });
            self.polls.push(libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 });
        }
        // SAFETY: the pointer and the count describe the vector. If the call fails, `revents` stays
        // 0.
        unsafe { libc::poll(self.polls.as_mut_ptr(), self.polls.len() as libc::nfds_t, 0) };
        for (peer, polls) in self.active[first..self.checked].iter().zip(self.polls.chunks_exact(2))
        {
            let peer = *peer;
            let Some(attached) = self.peers[usize::from(peer.0)].as_deref_mut() else { continue };
            let Some(remote) = &mut attached.remote else { continue };
            let [socket, pidfd] = [polls[0].revents, polls[1].revents];
            // Pumps even without input if announcements wait for room in the socket.
            let heard = (socket == 0 && !remote.control.has_notices()) || remote.control.pump();
            // A Bye may be queued behind more packets than one pass receives. So a dead process
            // counts as died only once its socket is drained.
            let ended = remote.control.ended().or((pidfd != 0 && heard).then_some(PeerError::Died));
            let Some(why) = ended else { continue };
            if attached.is_up() {
                self.roster.warm(attached, peer);
                // The peer writes no more, so this call empties the peer's lane.
                attached.consume(peer, self.config.lane_cells, &self.regions, &self.host, sink);
                attached.fail(why);
            }
            attached.report(peer, u32::MAX, sink);
        }
    }
}
