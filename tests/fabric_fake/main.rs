//! Tests of the libfabric rail over the fake provider, with personas for providers that need
//! hardware: the contract of `Rail`, clause by clause, and further behaviour of providers.

mod apart;
mod bare;
#[path = "../../core/tests/support/mod.rs"]
mod behaviour;
#[path = "../../core/tests/conformance/mod.rs"]
mod conformance;
mod damaged;
mod devices;
mod edges;
mod engines;
mod expected;
mod failing_devices;
mod failures;
mod fixture;
mod given_up;
mod goodbye;
mod guard;
mod pulled;
mod reattach;
mod rows;
#[path = "../../shm/tests/support/mod.rs"]
mod shared;
mod silent;
mod two;
mod wrapped;

use fixture::{Calm, Cxi, Efa, EfaDirect, Psm3, Shm, Shm2, TakesReceives, Tcp, VerbsRxm};

rail_conformance!(efa_direct, EfaDirect);
rail_conformance!(efa, Efa);
rail_conformance!(verbs_rxm, VerbsRxm);
rail_conformance!(cxi, Cxi);
rail_conformance!(psm3, Psm3);
rail_conformance!(tcp, Tcp);
rail_conformance!(shm, Shm);
rail_conformance!(shm2, Shm2);
rail_conformance!(takes_receives, TakesReceives);
rail_conformance!(calm, Calm);
rail_conformance!(guarded_efa_direct, wrapped::EfaDirect);
rail_conformance!(guarded_tcp, wrapped::Tcp);
rail_conformance!(guarded_shared_memory, wrapped::Shm);
