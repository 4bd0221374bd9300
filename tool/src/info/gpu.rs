//! Describes the CUDA driver on this machine: its devices and their properties, or why there is
//! none.

#[cfg(feature = "cuda")]
use fishplate_gpu::cuda::{self, Absent, CudaInfo};
use serde_json::{Value, json};

/// Returns why no device can be described.
#[cfg(not(feature = "cuda"))]
pub fn gather() -> Value {
    json!({ "usable": "no CUDA in this build: its feature `cuda` was turned off" })
}

/// Describes the driver and its devices, or why there are none.
#[cfg(feature = "cuda")]
pub fn gather() -> Value {
    tell(cuda::version(), cuda::devices())
}

#[cfg(feature = "cuda")]
fn tell(version: Result<u32, Absent>, devices: Result<Vec<CudaInfo>, Absent>) -> Value {
    let (version, devices) = match (version, devices) {
        (Ok(version), Ok(devices)) => (version, devices),
        (Err(why), _) | (_, Err(why)) => return json!({ "usable": why.to_string() }),
    };
    let usable = if devices.is_empty() { "the CUDA driver has no device" } else { "usable" };
    let all = devices.iter().map(|device| (format!("cuda:{}", device.ordinal), tell_device(device)));
    json!({
        "usable": usable,
        "driver": format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        "devices": Value::Object(all.collect()),
    })
}

#[cfg(feature = "cuda")]
fn tell_device(device: &CudaInfo) -> Value {
    let (domain, bus, number) = device.pci;
    let uuid = device.uuid.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    let reaches: Vec<String> = device.reaches.iter().map(|ordinal| format!("cuda:{ordinal}")).collect();
    json!({
        "name": device.name,
        "uuid": uuid,
        "memory_bytes": device.memory,
        "pci": format!("{domain:04x}:{bus:02x}:{number:02x}.0"),
        "reaches": reaches.join(", "),
        "export_by_handle": "cuMemAlloc",
        "export_by_descriptor": if device.descriptors { "cuMemCreate" } else { "not offered" },
        "pools": device.pools,
        "words_in_stream_order": device.write_word,
        "gpudirect": device.gpudirect,
        "remote_writes_must_be_flushed": device.must_flush,
    })
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_told_and_what_is_not_says_why() {
        let absent = tell(Err(Absent::NoLibrary), Err(Absent::NoLibrary));
        assert_eq!(absent, json!({ "usable": "no CUDA driver: libcuda is not on this machine" }));
        assert_eq!(tell(Ok(12_060), Ok(vec![]))["usable"], "the CUDA driver has no device");
        let device = CudaInfo {
            ordinal: 0,
            name: "H".into(),
            uuid: [0xab; 16],
            memory: 1 << 30,
            pci: (0, 0x5e, 0),
            descriptors: true,
            pools: true,
            write_word: true,
            gpudirect: false,
            must_flush: false,
            reaches: vec![0, 1],
        };
        let told = tell(Ok(12_060), Ok(vec![device]));
        assert_eq!((&told["usable"], &told["driver"]), (&json!("usable"), &json!("CUDA 12.6")));
        let told = &told["devices"]["cuda:0"];
        assert_eq!((&told["pci"], &told["reaches"]), (&json!("0000:5e:00.0"), &json!("cuda:0, cuda:1")));
        assert_eq!(told["uuid"], "ab".repeat(16));
    }
}
