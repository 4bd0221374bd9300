//! Device memory: puts host memory into it, and gets it back. The device is the host stand-in, so
//! no GPU is needed; `fishplate::gpu::cuda` has the one for NVIDIA's. The rail leads back to the
//! engine, so one process is enough. Run it: `cargo run --example device`.

use fishplate::core::engine::{Config, ContextId, Engine, HANDLE_MAX, Issued, Notice};
use fishplate::core::mem::{RailId, Region, RegionKind};
use fishplate::core::op::Outcome;
use fishplate::gpu::{GpuConfig, GpuRail, HostDevice};
use fishplate::{Limits, Storage, shm::ShmConfig, sys::LinuxHost};
use std::{error::Error, ptr::NonNull};

const LEN: usize = 1 << 20;
const CONTEXT: ContextId = ContextId(0);

type Rail = GpuRail<HostDevice, LinuxHost>;

/// Makes progress until the operation is done.
fn finish(engine: &mut Engine<'_, Rail, 1>, issued: Issued) -> Result<(), Box<dyn Error>> {
    let Issued::Pending(token) = issued else { return Ok(()) };
    loop {
        engine.progress();
        match engine.test(token)?.map(|completion| completion.outcome) {
            Some(Outcome::Done) => return Ok(()),
            Some(failed) => return Err(format!("cannot move the data: {failed:?}").into()),
            None => {}
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut host_memory = vec![7u8; LEN];
    let mut rail =
        Rail::new(HostDevice::new(), LinuxHost::shared(), ShmConfig::default(), GpuConfig::default())?;
    let device_memory = NonNull::new(rail.alloc(LEN as u64)?.0 as *mut u8).ok_or("no memory")?;
    let mut storage = Storage::<1>::new(&Config::DEFAULT, Limits { peers: 1, ..Limits::DEFAULT });
    let mut engine = storage.engine(Config::DEFAULT, [rail])?;
    let me = engine.reserve_peer()?;
    engine.rail_mut(RailId(0)).ok_or("no rail")?.attach_self(me.peer())?;
    engine.connect_peer(me, 1)?;

    let ours = NonNull::from(&mut host_memory[..]).cast();
    // SAFETY: `host_memory` outlives the engine, and is read again only after the engine is gone.
    let ours = engine.register(unsafe { Region::new(ours, LEN, RegionKind::Private) })?;
    let kind = RegionKind::Device { ordinal: 0 };
    // SAFETY: the rail keeps its device, and with it this allocation, as long as the engine lives.
    let on_device = engine.register(unsafe { Region::new(device_memory, LEN, kind) })?;
    let mut handle = [0; HANDLE_MAX];
    let len = engine.export(on_device, &mut handle)?;
    let there = engine.import(me, &handle[..len])?;

    // The second half of the device's memory becomes sevens; the first half stays zero.
    let put = engine.put(CONTEXT, ours.at(0), LEN / 2, there.at(LEN as u64 / 2), Notice::Report(0))?;
    finish(&mut engine, put)?;
    let get = engine.get(CONTEXT, ours.at(0), LEN, there.at(0), Notice::Report(1))?;
    finish(&mut engine, get)?;
    drop(engine);
    println!("{} of {LEN} bytes came back", host_memory.iter().filter(|&&byte| byte == 7).count());
    Ok(())
}
