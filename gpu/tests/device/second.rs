//! The second process. It opens a handle, and executes commands of the first process.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use fishplate_gpu::{Device, DevicePtr, Handle};

use super::suite::{Pinned, pattern, settle};
use super::support::{Killed, name, spawn};
use super::{Kit, first};

/// The second process, as the first process sees it.
pub struct Second {
    child: Killed,
    stream: BufReader<UnixStream>,
}

impl Second {
    /// Starts the second process with a handle. The process inherits the descriptors of the handle.
    pub fn start<K: Kit>(handle: &Handle, size: u64) -> Second {
        let address = name();
        let told = SocketAddr::from_abstract_name(&address.as_bytes()[1..]).unwrap();
        let listener = UnixListener::bind_addr(&told).unwrap();
        // SAFETY: the call takes no pointer. The new descriptor is ours, and is inherited by
        // children.
        let inherit = |fd: &OwnedFd| unsafe { OwnedFd::from_raw_fd(libc::dup(fd.as_raw_fd())) };
        let inherited: Vec<(OwnedFd, u64)> = match handle {
            Handle::Legacy(_) => vec![],
            Handle::Descriptor(fd) => vec![(inherit(fd), size)],
            Handle::Segments(segments) => {
                segments.iter().map(|(fd, size)| (inherit(fd), *size)).collect()
            }
        };
        let child = spawn(K::NAME, &address);
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut second = Second { child, stream: BufReader::new(stream) };
        let words = match handle {
            Handle::Legacy(bytes) => {
                bytes.iter().fold("legacy ".to_owned(), |text, byte| format!("{text}{byte:02x}"))
            }
            _ => {
                let one = |(fd, size): &(OwnedFd, u64)| format!("{}:{size}", fd.as_raw_fd());
                format!("descriptors {}", inherited.iter().map(one).collect::<Vec<_>>().join(","))
            }
        };
        assert_eq!(second.ask(&format!("handle {words} {size}")), "ok");
        second
    }

    /// Sends a command, and returns the answer.
    pub fn ask(&mut self, what: &str) -> String {
        writeln!(self.stream.get_mut(), "{what}").unwrap();
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Lets the process exit, and checks its exit status.
    pub fn end(mut self) {
        assert_eq!(self.ask("end"), "ok");
        self.child.join();
    }
}

/// Runs in the second process.
pub fn serve<K: Kit>(address: &OsStr) {
    let told = SocketAddr::from_abstract_name(&address.as_bytes()[1..]).unwrap();
    let stream = UnixStream::connect_addr(&told).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut device = first::<K>();
    let mut host = Pinned::new(&mut device, 4 << 20);
    let mut handle: Option<(Handle, u64)> = None;
    let mut open: Option<DevicePtr> = None;
    loop {
        let line = lines.next().expect("the first process went away").unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let answer = match words[0] {
            "handle" => {
                let made = match words[1] {
                    "legacy" => {
                        let byte = |at: usize| {
                            u8::from_str_radix(&words[2][2 * at..2 * at + 2], 16).unwrap()
                        };
                        Handle::Legacy(std::array::from_fn(byte))
                    }
                    _ => {
                        let one = |word: &str| {
                            let (fd, size) = word.split_once(':').unwrap();
                            // SAFETY: this process inherited the descriptor, and nothing else owns
                            // it.
                            let fd = unsafe { OwnedFd::from_raw_fd(fd.parse().unwrap()) };
                            (fd, size.parse().unwrap())
                        };
                        let mut segments: Vec<_> = words[2].split(',').map(one).collect();
                        match segments.len() {
                            1 => Handle::Descriptor(segments.remove(0).0),
                            _ => Handle::Segments(segments),
                        }
                    }
                };
                handle = Some((made, number(3)));
                "ok".into()
            }
            "open" | "again" => {
                let (handle, size) = handle.as_ref().unwrap();
                // SAFETY: the first process keeps the memory until this process has closed it.
                let opened = unsafe { device.open(handle, *size) };
                match (opened, open) {
                    (Ok(base), None) => {
                        open = Some(base);
                        "ok".into()
                    }
                    (Ok(base), Some(before)) => {
                        // SAFETY: no work is queued.
                        unsafe { device.close(base) }.unwrap();
                        if base == before { "same".into() } else { "another".into() }
                    }
                    (Err(_), Some(_)) => "refused".into(),
                    (Err(error), None) => format!("{error}"),
                }
            }
            "check" | "write" => {
                let (seed, offset, len) = (number(1) as u8, number(2), number(3));
                let there = open.unwrap().at(offset);
                let writes = words[0] == "write";
                host.fill(
                    0,
                    &if writes { pattern(seed, len as usize) } else { vec![0; len as usize] },
                );
                let (to, from) = if writes { (there, host.seen) } else { (host.seen, there) };
                // SAFETY: both ranges stay open or pinned until the stream has finished.
                unsafe { device.copy(0, to, from, len) }.unwrap();
                settle(&mut device, 0);
                match writes || host.read(0, len as usize) == pattern(seed, len as usize) {
                    true if writes => "ok".into(),
                    true => "good".into(),
                    false => "bad".into(),
                }
            }
            "close" => {
                // SAFETY: no work is queued.
                unsafe { device.close(open.take().unwrap()) }.unwrap();
                "ok".into()
            }
            "end" => {
                host.end(&mut device);
                assert_eq!(K::held(&device), 0);
                writeln!(&stream, "ok").unwrap();
                return;
            }
            other => panic!("{other}"),
        };
        writeln!(&stream, "{answer}").unwrap();
    }
}
