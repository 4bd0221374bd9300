//! Names the other side and the rails to it in messages.

use std::fmt;

use fishplate::node::{Error, RailError};
use fishplate_core::engine::protocol::Received;
use fishplate_core::error::{
    Awaited, CompleteError, OpError, PeerError, PostError, Stuck, WaitError,
};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Fault, Outcome as Ended};

use crate::failure::Failure;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    name: String,
    /// The libfabric rails, from the node's rail 1 on. Empty if shared memory is the only rail.
    rails: Vec<String>,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Who {
    pub fn new(name: impl Into<String>, rails: Vec<String>) -> Self {
        Who { name: name.into(), rails }
    }

    /// Returns the error of a run that lost the other side, or a rail to it.
    #[cold]
    pub fn lost(&self, why: PeerError) -> Failure {
        match why {
            PeerError::Rail(rail) => {
                Failure::Lost(format!("lost {self}: {} failed", self.rail(rail)))
            }
            why => self.gone(why),
        }
    }

    /// Names the libfabric rails to the other side, if there are any.
    #[cold]
    pub fn gone(&self, how: impl fmt::Display) -> Failure {
        match self.rails.is_empty() {
            true => Failure::lost(&self.name, how),
            false => Failure::Lost(format!("lost {self} over {}: {how}", self.rails.join(" and "))),
        }
    }

    #[cold]
    pub fn failed(&self, what: &str, error: Error) -> Failure {
        match error {
            Error::Op(OpError::PeerFailed(why)) => self.lost(why),
            Error::Wait(error) => self.wait_failed(error),
            Error::Failed(outcome) => self.ended(what, outcome),
            error => Failure::run(format!("{what} with {self} failed: {error}")),
        }
    }

    #[cold]
    fn wait_failed(&self, error: WaitError) -> Failure {
        match error {
            WaitError::PeerFailed(_, why) => self.lost(why),
            WaitError::Deadline(stuck) => Failure::run(format!(
                "{self} did not answer in time{}; if it is only slow, use a longer --timeout",
                self.stuck(stuck)
            )),
            error => Failure::run(format!("waiting for {self} failed: {error}")),
        }
    }

    /// Returns the error of an expired deadline when the peer has answered all requests.
    #[cold]
    pub fn out_of_time(&self, stuck: Stuck) -> Failure {
        Failure::run(format!(
            "the run did not complete in time: {self} has answered every request{}; use a longer \
             --timeout",
            self.stuck(stuck)
        ))
    }

    #[cold]
    fn ended(&self, what: &str, outcome: Ended) -> Failure {
        match outcome {
            Ended::Failed(fault) | Ended::Unknown(fault) => self.fault(what, outcome, fault),
            Ended::Done => Failure::run(format!("{what} with {self} {outcome}")),
        }
    }

    #[cold]
    pub fn receive_ended(&self, outcome: Received) -> Failure {
        match outcome {
            Received::Failed(fault) | Received::Unknown(fault) => {
                self.fault("a receive", outcome, fault)
            }
            _ => Failure::run(format!("a receive from {self}: {outcome}")),
        }
    }

    fn fault(&self, what: &str, outcome: impl fmt::Display, fault: Fault) -> Failure {
        match fault {
            Fault::Peer(why) => self.lost(why),
            Fault::Rail(rail, CompleteError::PeerDown) | Fault::Post(rail, PostError::PeerDown) => {
                self.lost(PeerError::Rail(rail))
            }
            // The other side exports its memory until it ends.
            Fault::Post(_, PostError::BadKey) => self.gone("it no longer exports its memory"),
            _ => Failure::run(format!("{what} with {self} {outcome}")),
        }
    }

    /// Describes the missing acknowledgement or arrival: its rail and its number, if known.
    fn stuck(&self, stuck: Stuck) -> String {
        let Stuck { awaits, rail, hole, unanswered, .. } = stuck;
        let mut text = rail.map_or(String::new(), |rail| format!(" on {}", self.rail(rail)));
        if let Some(hole) = hole {
            text += &match awaits {
                Awaited::Completion => format!(", and operation {hole} is not acknowledged"),
                _ => format!(", and operation {hole} from it has not arrived"),
            };
        }
        if unanswered {
            text += ", and has sent nothing since the two connected";
        }
        text
    }

    pub fn out_of_use(&self, error: &RailError) -> String {
        format!("{} is out of use: {}", self.rail(error.rail), error.why())
    }

    pub fn rail(&self, rail: RailId) -> String {
        let number = usize::from(rail.0).checked_sub(1);
        match number.and_then(|number| self.rails.get(number)) {
            Some(name) => name.clone(),
            None => format!("rail {}", rail.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_peer_and_rail() {
        let rails = vec!["rail 0 (tcp on a)".to_owned(), "rail 1 (tcp on b)".to_owned()];
        let who = Who::new("the process at 10.0.0.2:7", rails);
        let told = who.lost(PeerError::Rail(RailId(2))).to_string();
        assert!(
            told.contains("10.0.0.2") && told.contains("tcp on b") && !told.contains("tcp on a"),
            "{told}"
        );
        let told = who.lost(PeerError::Died).to_string();
        assert!(
            told.contains("10.0.0.2")
                && told.contains("tcp on a")
                && told.contains("process has ended"),
            "{told}"
        );
        let refused = Fault::Post(RailId(1), PostError::BadKey);
        let told = who.ended("get", Ended::Failed(refused)).to_string();
        assert!(told.contains("lost the process at 10.0.0.2") && told.contains("memory"), "{told}");
        let told = who.gone("it hung up").to_string();
        assert!(
            told.contains("10.0.0.2") && told.contains("tcp on a") && told.contains("hung up"),
            "{told}"
        );
        let stuck = Stuck { rail: Some(RailId(1)), hole: Some(17), ..Stuck::default() };
        let told = who.wait_failed(WaitError::Deadline(stuck)).to_string();
        assert!(
            told.contains("tcp on a") && told.contains("17") && told.contains("--timeout"),
            "{told}"
        );
        let fault = Fault::Peer(PeerError::Removed);
        let told = who.out_of_use(&RailError { rail: RailId(2), fault, provider: None });
        assert_eq!(told, "rail 1 (tcp on b) is out of use: it was disabled");
        let told = who.wait_failed(WaitError::Deadline(Stuck::default())).to_string();
        assert!(told.contains("in time;"), "{told}");
    }
}
