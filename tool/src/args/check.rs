//! Checks the options of `perf` that limit each other.

use super::{Failure, Outcome, PerfArgs, Test, Transport, bounds, name, sizes};

pub const REGION: usize = 64 << 20;
/// Two regions and the page of signals must fit the address space.
const REGION_MAX: usize = 64 << 30;
/// Maximum number of rails within one process, and between two processes.
pub const RAILS_IN_PROCESS: usize = 4;
const RAILS_BETWEEN: usize = 15;

impl PerfArgs {
    pub(super) fn sizes(&self) -> Outcome<Vec<usize>> {
        let ranged = self.begin.is_some() || self.end.is_some() || self.factor.is_some();
        let sizes = if ranged {
            let begin = self.begin.unwrap_or(8);
            let end = self.end.unwrap_or(begin.max(4 << 20));
            bounds::size(begin, self.test, self.region.max(begin))?;
            sizes::range(begin, end, self.factor.unwrap_or(2)).map_err(Failure::usage)?
        } else if self.size.is_empty() {
            vec![8]
        } else {
            self.size.clone()
        };
        sizes.iter().try_for_each(|&size| bounds::size(size, self.test, self.region))?;
        Ok(sizes)
    }

    pub(super) fn check_numbers(&self) -> Outcome {
        if self.region == 0 || self.region > REGION_MAX {
            return Err(Failure::usage(format!(
                "--region {}: use 1 byte to {}",
                sizes::show(self.region),
                sizes::show(REGION_MAX)
            )));
        }
        bounds::iterations(self.iters.unwrap_or(1), self.warmup.unwrap_or(0))?;
        bounds::window(self.window.into())?;
        if self.rails == 0 {
            return Err(Failure::usage(
                "--rails 0: no rail would connect the two sides; use at least 1",
            ));
        }
        let most = match self.transport {
            Transport::Loopback | Transport::Sim => RAILS_IN_PROCESS,
            _ => RAILS_BETWEEN,
        };
        if self.rails > most {
            return Err(Failure::usage(format!(
                "--rails {}: --transport {} has at most {most} rails; use fewer",
                self.rails,
                name(self.transport)
            )));
        }
        if self.streams.iter().any(|streams| !(1..=1024).contains(streams)) {
            return Err(Failure::usage("--streams: use numbers from 1 to 1024"));
        }
        match self.seeds {
            Some(0) => return Err(Failure::usage("--seeds 0: nothing would run; use at least 1")),
            Some(seeds) if self.seed.checked_add(seeds - 1).is_none() => {
                return Err(Failure::usage(format!(
                    "--seed {} --seeds {seeds}: the last seed exceeds the maximum, {}; use a \
                     smaller --seed or --seeds",
                    self.seed,
                    u64::MAX
                )));
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn check_roles(&self) -> Outcome {
        let two = matches!(self.transport, Transport::Shm | Transport::Fabric | Transport::Gpu);
        if !two && (self.listen.is_some() || self.connect.is_some()) {
            return Err(Failure::usage(format!(
                "--listen and --connect join two processes, but {} runs in one; use --transport \
                 shm, gpu or fabric",
                name(self.transport)
            )));
        }
        if matches!(self.transport, Transport::Shm | Transport::Gpu) && self.rails != 1 {
            return Err(Failure::usage(format!(
                "--rails {}: two processes share one memory, so {} has one rail; use --transport \
                 fabric, sim or loopback",
                self.rails,
                name(self.transport)
            )));
        }
        self.check_device()?;
        if self.seeds.is_some()
            && (self.transport != Transport::Sim
                || !matches!(self.test, Test::PutSignal | Test::Tag))
        {
            return Err(Failure::usage(
                "--seeds: only put-signal and tag over sim have seeds; use one of them with \
                 --transport sim",
            ));
        }
        bounds::test(self.test, self.transport)?;
        if self.transport != Transport::Fabric
            && !(self.provider.is_empty() && self.interface.is_empty())
        {
            return Err(Failure::usage(format!(
                "--provider and --interface choose libfabric rails, and {} has none; use \
                 --transport fabric",
                name(self.transport)
            )));
        }
        if self.transport == Transport::Sim && (self.duration.is_some() || self.hist.is_some()) {
            let (option, instead) = match self.duration {
                Some(_) => ("--duration", "-n, or "),
                None => ("--hist", ""),
            };
            return Err(Failure::usage(format!(
                "{option}: simulated operations take no time; use {instead}another --transport"
            )));
        }
        bounds::directions(self.bidirectional, self.test, self.transport)?;
        bounds::mode(self.mode, self.test, self.transport)
    }

    fn check_device(&self) -> Outcome {
        if self.transport != Transport::Gpu {
            return match self.device.is_empty() && self.ipc_path.is_none() {
                true => Ok(()),
                false => Err(Failure::usage(format!(
                    "--device and --ipc-path choose memory of a device, and {} has none; use \
                     --transport gpu",
                    name(self.transport)
                ))),
            };
        }
        if self.device.len() > 2 {
            return Err(Failure::usage(
                "--device: name one device for both sides, or one for each",
            ));
        }
        if self.meeting_is_given() && self.device.len() > 1 {
            return Err(Failure::usage(
                "--device: with --listen or --connect, each side names its own device; name one",
            ));
        }
        self.layout.map_or(Ok(()), |layout| bounds::layout(layout, self.transport))
    }

    pub(super) fn meeting_is_given(&self) -> bool {
        self.listen.is_some() || self.connect.is_some()
    }
}
