//! Compares our libfabric structures with the installed headers. A C program generated from the
//! same list prints sizes, offsets and constants. `FISHPLATE_FABRIC_INCLUDE` names another
//! directory of headers.
//!
//! In headers newer than 1.17 a structure may be longer, never shorter. Offsets must be equal.
#![allow(clippy::unnecessary_cast, reason = "numbers of several types are compared as one")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs, process};

use fishplate_sys::fabric::raw::*;
use memoffset::{offset_of, span_of};

/// Our sizes, offsets and constants, and the C program that prints libfabric's values.
#[derive(Default)]
struct Both {
    ours: BTreeMap<String, i128>,
    c: String,
}

impl Both {
    fn size(&mut self, name: &str, size: usize) {
        let c_name = format!("struct {name}");
        self.ours.insert(format!("{name} size"), size as i128);
        writeln!(self.c, "printf(\"{name} size %zu\\n\", sizeof({c_name}));").unwrap();
    }

    fn field(&mut self, name: &str, field: &str, c_field: &str, offset: usize, size: usize) {
        let c_name = format!("struct {name}");
        self.ours.insert(format!("{name}.{field} offset"), offset as i128);
        self.ours.insert(format!("{name}.{field} size"), size as i128);
        writeln!(
            self.c,
            "printf(\"{name}.{field} offset %zu\\n\", offsetof({c_name}, {c_field}));\n\
             printf(\"{name}.{field} size %zu\\n\", sizeof((({c_name} *)0)->{c_field}));"
        )
        .unwrap();
    }

    fn number(&mut self, name: &str, number: i128) {
        self.ours.insert(format!("{name} number"), number);
        writeln!(self.c, "printf(\"{name} number %llu\\n\", (unsigned long long)({name}));")
            .unwrap();
    }
}

macro_rules! layout {
    (
        structures { $($structure:ident { $($field:ident)* })* }
        renamed { $($of:ident $ours:ident $c:literal $generated:ident)* }
        numbers { $($number:ident)* }
    ) => {
        fn list() -> Both {
            let mut both = Both::default();
            $(
                both.size(stringify!($structure), size_of::<$structure>());
                $({
                    let (offset, span) =
                        (offset_of!($structure, $field), span_of!($structure, $field));
                    let (structure, field) = (stringify!($structure), stringify!($field));
                    both.field(structure, field, field, offset, span.len());
                })*
            )*
            $({
                let (offset, span) = (offset_of!($of, $ours), span_of!($of, $ours));
                both.field(stringify!($of), stringify!($ours), $c, offset, span.len());
            })*
            $(both.number(stringify!($number), ($number) as u64 as i128);)*
            both
        }
    };
}

include!("list.rs");

fn skipped(why: &str) {
    println!("SKIPPED our_structures_are_those_of_the_headers: {why}");
}

#[test]
fn our_structures_are_those_of_the_headers() {
    let include = env::var("FISHPLATE_FABRIC_INCLUDE").unwrap_or("/usr/include".into());
    if !PathBuf::from(&include).join("rdma/fabric.h").exists() {
        return skipped(&format!("no rdma/fabric.h in {include} (Debian: libfabric-dev)"));
    }
    let both = list();
    let source = format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include <sys/uio.h>\n#include <rdma/fabric.h>\n\
         #include <rdma/fi_domain.h>\n#include <rdma/fi_endpoint.h>\n#include \
         <rdma/fi_eq.h>\n#include <rdma/fi_rma.h>\n#include <rdma/fi_atomic.h>\n#include \
         <rdma/fi_cm.h>\n#include <rdma/fi_errno.h>\nint main(void) {{\nprintf(\"version number \
         %d\\n\", FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION));\n{}return 0;\n}}\n",
        both.c
    );
    let place = env::temp_dir().join(format!("fishplate-layout-{}", process::id()));
    fs::create_dir_all(&place).unwrap();
    let (file, program) = (place.join("probe.c"), place.join("probe"));
    fs::write(&file, source).unwrap();
    let compiler = env::var("CC").unwrap_or("cc".into());
    let built =
        Command::new(&compiler).arg("-I").arg(&include).arg("-o").arg(&program).arg(&file).output();
    let Ok(built) = built else {
        return skipped(&format!("no C compiler {compiler:?}"));
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let said = Command::new(&program).output().unwrap();
    fs::remove_dir_all(&place).unwrap();
    let mut theirs = BTreeMap::new();
    for line in String::from_utf8(said.stdout).unwrap().lines() {
        let (what, number) = line.rsplit_once(' ').unwrap();
        theirs.insert(what.to_string(), number.parse::<i128>().unwrap());
    }
    let version = theirs.remove("version number").unwrap() as u32;
    let later = version > fi_version(1, 17);
    println!("{} facts, headers of {}.{}", theirs.len(), version >> 16, version & 0xffff);
    assert_eq!(theirs.len(), both.ours.len());
    let mut wrong = vec![];
    for (what, ours) in &both.ours {
        let theirs = theirs[what];
        let structure = what.ends_with(" size") && !what.contains('.');
        // Our `fi_cq_err_entry` includes a field that 1.20 added.
        let longer = what == "fi_cq_err_entry size";
        let fits = match (structure, later) {
            _ if longer => theirs <= *ours,
            (true, true) => theirs >= *ours,
            _ => theirs == *ours,
        };
        if !fits {
            wrong.push(format!("{what}: ours {ours}, theirs {theirs}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
