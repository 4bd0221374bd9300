//! Tagged messages between engines: matching, protocols, credits, failures.

#[path = "../support/mod.rs"]
mod support;

mod apart;
mod basics;
mod carried;
mod churn;
mod close;
mod damage;
mod device;
mod device_close;
mod doubts;
mod epoch;
mod flood;
mod forge;
mod hostile;
mod hostile_answers;
mod hostile_failover;
mod hostile_pieces;
mod in_use;
mod joints;
mod lost;
mod misuse;
mod order;
mod posting;
mod psm;
mod psm_peers;
mod refused;
mod rig;
mod room;
mod scenarios;
mod speed;
mod stops;
mod unmatched;
