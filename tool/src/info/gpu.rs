//! Describes the GPU drivers on this machine and the properties of their devices, or reports why
//! there are none.

#[cfg(any(feature = "cuda", feature = "hip"))]
use fishplate_gpu::cuda::{Absent, Api, CudaInfo};
use serde_json::{Value, json};

#[cfg(not(any(feature = "cuda", feature = "hip")))]
pub fn gather() -> Value {
    json!({ "usable": "no GPUs in this build: its features `cuda` and `hip` were turned off" })
}

#[cfg(any(feature = "cuda", feature = "hip"))]
pub fn gather() -> Value {
    tell(Api::ALL.iter().map(|&api| (api, api.version(), api.devices())))
}

#[cfg(any(feature = "cuda", feature = "hip"))]
type Found = (Api, Result<String, Absent>, Result<Vec<CudaInfo>, Absent>);

#[cfg(any(feature = "cuda", feature = "hip"))]
fn tell(all: impl Iterator<Item = Found>) -> Value {
    let (mut why, mut drivers, mut devices) = (vec![], vec![], serde_json::Map::new());
    for (api, version, found) in all {
        match (version, found) {
            (Ok(version), Ok(found)) => {
                if found.is_empty() {
                    why.push(format!(
                        "the {} driver has no device",
                        api.to_string().to_uppercase()
                    ));
                }
                drivers.push(version);
                let told = found
                    .iter()
                    .map(|device| (format!("{api}:{}", device.ordinal), tell_device(api, device)));
                devices.extend(told);
            }
            (Err(absent), _) | (_, Err(absent)) => why.push(absent.to_string()),
        }
    }
    let usable = if devices.is_empty() { why.join("; ") } else { "usable".into() };
    match drivers.is_empty() {
        true => json!({ "usable": usable }),
        false => json!({ "usable": usable, "driver": drivers.join(", "), "devices": devices }),
    }
}

#[cfg(any(feature = "cuda", feature = "hip"))]
fn tell_device(api: Api, device: &CudaInfo) -> Value {
    let (domain, bus, number) = device.pci;
    let uuid = device.uuid.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    let reaches: Vec<String> =
        device.reaches.iter().map(|ordinal| format!("{api}:{ordinal}")).collect();
    let [handle, descriptor] = match api.to_string().as_str() {
        "hip" => ["hipMalloc", "hipMemCreate"],
        _ => ["cuMemAlloc", "cuMemCreate"],
    };
    json!({
        "name": device.name,
        "uuid": uuid,
        "memory_bytes": device.memory,
        "pci": format!("{domain:04x}:{bus:02x}:{number:02x}.0"),
        "reaches": reaches.join(", "),
        "export_by_handle": handle,
        "export_by_descriptor": if device.descriptors { descriptor } else { "not offered" },
        "pools": device.pools,
        "words_in_stream_order": device.write_word,
        "gpudirect": device.gpudirect,
        "remote_writes_must_be_flushed": device.must_flush,
    })
}

#[cfg(all(test, feature = "cuda", feature = "hip"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_told_and_what_is_not_says_why() {
        let absent = |api| (api, Err(Absent::NoLibrary(api)), Err(Absent::NoLibrary(api)));
        assert_eq!(
            tell([absent(Api::Cuda), absent(Api::Hip)].into_iter()),
            json!({
                "usable": "no CUDA driver: libcuda is not on this machine; no HIP driver: \
                 libamdhip64 is not on this machine"
            })
        );
        let none = (Api::Hip, Ok("HIP 7.1".to_owned()), Ok(vec![]));
        assert_eq!(tell([none.clone()].into_iter())["usable"], "the HIP driver has no device");
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
        for (api, version, name) in
            [(Api::Cuda, "CUDA 12.6", "cuda"), (Api::Hip, "HIP 7.14", "hip")]
        {
            let found = (api, Ok(version.to_owned()), Ok(vec![device.clone()]));
            let told = tell([absent(Api::Cuda), found].into_iter());
            assert_eq!((&told["usable"], &told["driver"]), (&json!("usable"), &json!(version)));
            let told = &told["devices"][format!("{name}:0")];
            let reaches = json!(format!("{name}:0, {name}:1"));
            assert_eq!((&told["pci"], &told["reaches"]), (&json!("0000:5e:00.0"), &reaches));
            assert_eq!(told["uuid"], "ab".repeat(16));
        }
    }
}
